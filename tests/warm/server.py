"""What would a test that starts forty programs wait for? For `import torch`. This process has done it, and forks.

Its folder has a `python` and a `torchrun` (client.py) that stand for the real ones. A fork gets the program's words,
environment, folder and open files, and is left to run it as the interpreter does: exit status, tracebacks, threads and
`atexit` are Python's own. It ends with whoever stands for it; all end when the tests' process does.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import importlib
import marshal
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path
from typing import NoReturn

OF_PROGRAMS = [
    "sklearn.datasets",
    "gymnasium",
    "torchvision.models",
    "torchvision.transforms.v2",
    *(f"torch.distributed.{part}" for part in ("fsdp", "pipelining", "tensor.parallel", "checkpoint.state_dict")),
]
IMPORTED = ["torch._dynamo", "torch.distributed.run", "ddp_course.launcher.worker", "ipykernel.kernelapp", *OF_PROGRAMS]
HERE = Path(__file__).parent
HIGH = 600  # descriptors that are on their way wait above


def serve(folder: Path) -> Callable[[], None]:
    """Fork for all who ask, until standard input ends; returns in the forks alone, with what each is to run."""
    for name in IMPORTED:
        importlib.import_module(name)
    spawn.set_executable(str(folder / "python"))  # a fork's own ranks are forks, too, and those of torchrun
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno())
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{folder}/socket")
    listening.listen(64)
    forks: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        for source in (sys.stdin, wake, listening):
            ready.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    for pid in forks:
                        end(pid)
                    shutil.rmtree(folder)
                    sys.exit()
                elif key.fileobj is wake:
                    wake.recv(4096)
                    tell_who_ended(forks, ready)
                elif key.fileobj is listening:
                    asking = listening.accept()[0]
                    try:
                        files, request = receive(asking)
                    except (OSError, EOFError):  # it was killed meanwhile
                        asking.close()
                        continue
                    # torch starts a thread in a fork, which must not take a signal: the main thread might not see it.
                    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                    pid = os.fork()
                    if not pid:
                        signal.set_wakeup_fd(-1)
                        for ours in (*forks.values(), wake, woken, listening, asking, ready):
                            ours.close()  # now: later, their numbers are the program's
                        return become(files, *request)
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                    for file in files:
                        os.close(file)
                    with suppress(OSError):  # it was killed meanwhile: the next round sees that
                        asking.sendall(pid.to_bytes(4, "big"))
                    forks[pid] = asking
                    ready.register(asking, selectors.EVENT_READ, pid)
                elif key.data in forks:  # whoever stood for it was killed
                    end(key.data)
                    ready.unregister(key.fileobj)


def end(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it is not the head of its group yet; it is not waited for, so it is still there


def tell_who_ended(forks: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    for pid, asking in list(forks.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del forks[pid]
            if asking in ready.get_map():
                ready.unregister(asking)
                with suppress(OSError):
                    asking.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
            asking.close()


def receive(asking: socket.socket) -> tuple[list[int], tuple]:
    """Return the open files of a program that asks, and its words, folder, environment, their numbers and signals."""
    head, sent, _, _ = asking.recvmsg(4, socket.CMSG_SPACE(253 * 4))
    files = array.array("i")
    for _, _, content in sent:
        files.frombytes(content)
    length, content = int.from_bytes(head, "big"), b""
    while len(content) < length:
        if not (part := asking.recv(length - len(content))):
            raise EOFError
        content += part
    return list(files), marshal.loads(content)


def become(
    files: list[int],
    command: list[str],
    folder: str,
    environ: dict[str, str],
    numbers: list[int],
    blocked: list[int],
    ignored: bool,
) -> Callable[[], None]:
    """Make this fork what a fresh Python would be; return what runs the program."""
    os.setsid()
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in files]
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({"PYTHON_EXEC": os.fsdecode(spawn.get_executable())} | environ)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    torch = sys.modules["torch"]
    torch.default_generator.seed()
    torch.set_num_threads(min(int(environ.get("OMP_NUM_THREADS", HIGH)), torch.get_num_threads()))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # after the threads that torch starts

    unbuffered = "-u" in command[:2]
    command = [word for word in command[:2] if word not in ("-u", "-Xfrozen_modules=off")] + command[2:]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty(), write_through=unbuffered)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    first, *rest = command
    if first == "-m":
        sys.argv, sys.path[0] = command[1:], folder
        return lambda: runpy._run_module_as_main(rest[0])
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        code = rest[0], "<string>"
    else:
        sys.argv, sys.path[0] = command, os.path.dirname(os.path.realpath(first))
        main.__file__ = os.path.join(folder, first)
        code = Path(first).read_bytes(), first
    return lambda: exec(compile(*code, "exec"), main.__dict__)


def run(program: Callable[[], None]) -> NoReturn:
    """Run a program and end as Python does, except that modules are not taken apart, which takes a second."""
    status, way_out = 0, None
    try:
        program()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        status, way_out = 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
        error.__traceback__ = from_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # it may be closed
            stream.flush()
    if way_out:
        signal.signal(way_out, signal.SIG_DFL)
        os.kill(os.getpid(), way_out)
    os._exit(status & 0xFF)


def from_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the part of a traceback that begins with the program."""
    while trace and Path(trace.tb_frame.f_code.co_filename).parent == HERE:
        trace = trace.tb_next
    return trace
