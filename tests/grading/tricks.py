"""Tricks of a submission that wants more than its marks: to see, to change, to outlive, to forge.

Each is a function body that returns what it got, or raises; `{...}` are places of the machine that grades. The names
say what must not happen. Run in a box by `test_box.py`, and without one, to see that the tricks are real.
"""

SEE = {
    "read the solutions": "return open('{root}/solutions/03_process_groups/03_process_groups.ipynb').read(9)",
    "read what answers are compared with": "return open('{root}/judges/solutions.json').read(9)",
    "read the judges": "return open('{root}/judges/process_groups/nodes.py').read(9)",
    "import the judges": "import judges; return judges.__file__",
    "read the gradebook": "return open('{victims}/gradebook.db', 'rb').read(9)",
    "read a neighbour": "return open('{victims}/submitted.ipynb').read(9)",
    "read the class's secret": "return open('{victims}/class_secret').read()",
    "read the instructor's files by the home of the user": "import os; return os.listdir('{home}/.ssh')",
    "read a variable of the grader": "import os; return os.environ['GRADERS_TOKEN']",
    "read a variable of any process": """
import contextlib, glob
for path in glob.glob('/proc/[0-9]*/environ'):
    with contextlib.suppress(OSError):
        if b'GRADERS_TOKEN=' in open(path, 'rb').read():
            return path
raise LookupError""",
    "see the grader's processes": """
import glob
return next(path for path in glob.glob('/proc/[0-9]*/cmdline') if b'pytest' in open(path, 'rb').read())""",
    "read a shared memory of the grader": "return open('/dev/shm/{shm}').read()",
    "go up by the root of the first process": "import os; return open('/proc/1/root{victims}/class_secret').read()",
    "go up by the working folder of the first process": "import os; return os.listdir('/proc/1/cwd/../../..{victims}')",
    "read the memory of the disk": """
import glob
return [open(path, 'rb').read(1) for path in [*glob.glob('/dev/[sv]d*'), '/dev/mem']]""",
    "read the kernel's log": "return open('/dev/kmsg').read(1)",
}
CHANGE = {
    "write the gradebook by SQL": """
import sqlite3
with sqlite3.connect('{victims}/gradebook.db') as book:
    book.execute('update grade set auto_score = 99')
return 'done'""",
    "change a neighbour": "return open('{victims}/submitted.ipynb', 'a').write('x')",
    "leave a .pth file for the next": "return open('{packages}/planted.pth', 'w').write('import os')",
    "leave a sitecustomize for the next": "return open('{packages}/sitecustomize.py', 'w').write('import os')",
    "change torch": "import torch; return open(torch.__file__, 'a').write('# x')",
    "change the course": "import ddp_course; return open(ddp_course.__file__, 'a').write('# x')",
    "plant compiled code": """
import ddp_course, os
return open(os.path.dirname(ddp_course.__file__) + '/__pycache__/x.pyc', 'w').write('x')""",
    "remove the course": """
import ddp_course, os, shutil
shutil.rmtree(os.path.dirname(ddp_course.__file__))
return 'done'""",
    "put a kernel in the place of Python's": """
import os, sys
return os.makedirs(sys.prefix + '/share/jupyter/kernels/x') or 'done'""",
    "change its own Python": "import os, sys; os.chmod(os.path.realpath(sys.executable), 0o777); return 'done'",
    "mount it writable": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b'none', b'{packages}', None, 32 | 4096, None) == 0:
    return open('{packages}/planted.pth', 'w').write('x')
raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))""",
    "mount over it": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b'x', b'/usr', b'tmpfs', 0, None) == 0:
    return 'done'
raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))""",
    "make a device": """
import os, stat
os.mknod('disk', 0o666 | stat.S_IFBLK, os.makedev(8, 0))
return open('disk', 'rb').read(1)""",
    "swap the folder of the replies": """
import os
wire = os.path.dirname(os.getcwd()) + '/wire'
os.rename(wire, wire + '2')
return os.symlink('{victims}', wire) or 'done'""",
    "swap its home": """
import os
home = os.getcwd()
os.rename(home, home + '2')
return os.symlink('{victims}', home) or 'done'""",
    "write into /etc": "return open('/etc/planted', 'w').write('x')",
    "set the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0.0); return 'done'",
    "have the kernel run a program": "return open('/proc/sys/kernel/core_pattern', 'a').write('')",
    "set the kernel": "return open('/proc/sys/vm/swappiness', 'a').write('60')",
    "press the kernel's keys": "return open('/proc/sysrq-trigger', 'a').write('h')",
}
REACH = {
    "talk to the grader's server": "import socket; return socket.create_connection(('127.0.0.1', {port}), 3)",
    "talk to the world": "import socket; return socket.create_connection(('192.0.2.1', 80), 3)",
    "look a name up": "import socket; return socket.gethostbyname('example.org')",
    "talk to an abstract socket": """
import socket
return socket.socket(socket.AF_UNIX).connect(bytes(1) + b'{abstract}') or 'done'""",
    "end the grader": "import os; os.kill({pid}, 0); return 'there'",
    "end everybody": """
import os, signal
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
os.kill({bystander}, signal.SIGUSR2)
return 'there'""",
    "trace the grader": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, {pid}, 0, 0) == 0:
    return 'done'
raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))""",
    "use a message queue of the grader": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget({ipc}, 8, 0) >= 0:
    return 'done'
raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))""",
}
ALL = {**SEE, **CHANGE, **REACH}

# A process that would go on when everything else has ended.
OUTLIVE = """
import subprocess, sys
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import os, time; os.fork() or os.setsid() or os.fork() or time.sleep(900)",
                      "{mark}"], start_new_session=True)
"""

# Answer cells that would give themselves marks for 03.1, which they do not answer; the last ones replace what serves.
FORGE = {
    "replace what judges": """
import ddp_course.grading.checking as c, ddp_course.grading as g, ddp_course.grading.sandbox.outside as o
g.check = c.check = lambda *_, **__: 5
c.judged = lambda exercise, *_: ([type("V", (), {"points": 5})()] * 5, [])
o.verdicts_on = lambda *_: ([], "5")
place = lambda *_: None""",
    "everything is equal": """
class Same(tuple):
    __eq__ = lambda *_: True
    __hash__ = tuple.__hash__
place = lambda *_: Same((0, 0, 0, "cpu"))""",
    "the judge's values, by the frames": """
import sys
def place(*_):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            for name in ("right", "expected", "wanted"):
                if hasattr(value, name):
                    return getattr(value, name)
        frame = frame.f_back""",
    "a script for who looks at it": """
from IPython.display import HTML, SVG, Javascript, Markdown, display
display(HTML("<script>alert('pwned')</script>"), Javascript("alert('pwned')"))
display(Markdown("<img src=x onerror=alert('pwned')>"))
display(SVG("<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"))
print("<script>alert('pwned')</script>", "\\x1b]8;;javascript:alert(1)\\x07pwned\\x1b]8;;\\x07")
raise ValueError("<script>alert('pwned')</script>")""",
    "replace what serves": """
import ddp_course.grading.sandbox.inside as i
i.serve = lambda asked, told, cells: open(told, "w").write('{"results": [[]], "printed": []}')
place = lambda *_: None""",
    "a reply that is not what ranks return": """
import ddp_course.grading.sandbox.inside as i
i.serve = lambda asked, told, cells: open(told, "w").write('{"points": 5, "printed": []}')
place = lambda *_: None""",
    "a reply that is a pickle": """
import ddp_course.grading.sandbox.inside as i, pickle, os
class Bad:
    def __reduce__(self):
        return os.system, ("touch {victims}/pwned",)
i.serve = lambda asked, told, cells: open(told, "wb").write(pickle.dumps(Bad()))
place = lambda *_: None""",
    "a reply without end": """
import ddp_course.grading.sandbox.inside as i
i.serve = lambda asked, told, cells: open(told, "w").write("[" * 2**27)
place = lambda *_: None""",
    "a reply that nobody ends writing": """
import ddp_course.grading.sandbox.inside as i, os
i.serve = lambda asked, told, cells: os.mkfifo(told)
place = lambda *_: None""",
    "a reply that lies elsewhere": """
import ddp_course.grading.sandbox.inside as i, os
i.serve = lambda asked, told, cells: os.symlink("{victims}/gradebook.db", told)
place = lambda *_: None""",
}
