"""How does a stranger's program run where it can do no harm? In a box: a few folders, no network, no other processes.

The box has namespaces of its own for processes, files, network and shared memory. Python, the packages and the course
are there to read; one folder, made for this run, is there to write; nothing else is there at all: no home, no
gradebook, no solutions, no judge. When the box's first process ends, all of them do. `bwrap` makes the box where it
is installed, else `unshare` does; where the kernel allows neither, there is no box, and grading asks first.

Left out on purpose: what shares the kernel shares its bugs. For programs that are worse than a student's curiosity take
a virtual machine.
Source: bwrap(1), unshare(1), mount_namespaces(7), user_namespaces(7).
Read next: `answer/limits.py`, how much a box may use; `boxed.py`, what is run in it.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ddp_course.grading.registry import judges

PACKAGE = Path(__file__).parents[2]
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "nsswitch.conf", "hosts", "fonts")
DEVICES = ("null", "zero", "full", "random", "urandom")
# Settings of the whole machine, which root may write, and who grades as root is root in the box, too, by the files.
KERNELS = [name for name in ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus") if os.path.exists(name)]
OPEN_FILES, FILE_BLOCKS = 2048, 2**19  # of 512 bytes, for the largest file
# bwrap leaves devices writable as files, and root could change their modes for the whole machine.
WAYS = ("bwrap", "unshare") if os.geteuid() else ("unshare", "bwrap")


def readable() -> list[Path]:
    """Return what is there to read in a box: the system's programs, Python with its packages, `ddp_course`."""
    places = [Path(f"/{name}") for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64")]
    places += [Path("/etc", name) for name in ETC]
    places += [Path(sys.base_prefix), Path(sys.prefix), PACKAGE]
    places += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    places += sorted(Path("/dev").glob("nvidia*"))
    kept: list[Path] = []
    for place in sorted({place for place in places if place.exists()}, key=lambda place: (len(place.parts), place)):
        if not any(outer in place.parents and not outer.is_symlink() for outer in kept):
            kept.append(place)
    return kept


def hidden() -> list[Path]:
    """Return what lies in a readable place, as where the course was installed from a wheel, and is not to be read."""
    return [Path(place) for place in judges().__path__ if any(each in Path(place).parents for each in readable())]


class Box:
    """A folder of its own, and the command that shuts a program in with it.

    Args:
        way: "bwrap", "unshare", or "" for no box at all: the folder is there, the walls are not.
    """

    def __init__(self, way: str):
        self.way = way
        self.folder = Path(tempfile.mkdtemp(prefix="ddp_box_"))  # short: sockets lie in it
        self.home, self.scratch, self.wire = (self.folder / name for name in ("home", "tmp", "wire"))
        for place in (self.home, self.scratch, self.wire):
            place.mkdir(mode=0o700)

    def _writable(self) -> tuple[Path, Path, Path]:
        # Not the folder around them: so nobody in the box can put something else in the place of one of these.
        return self.home, self.scratch, self.wire

    def environment(self) -> dict[str, str]:
        """Return all variables that a program in the box has."""
        kept = ("LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
            "PYTHONPATH": str(PACKAGE.parent),  # of which nothing but the package is there
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.home),
            "TMPDIR": str(self.scratch),
            "JUPYTER_PLATFORM_DIRS": "1",
        }

    def command(self, argv: list[str]) -> list[str]:
        """Return the command that runs `argv` in the box."""
        limited = [
            "/bin/sh",
            "-c",
            f'unset JPY_PARENT_PID; ulimit -n {OPEN_FILES}; ulimit -f {FILE_BLOCKS}; ulimit -c 0; exec "$@"',
            "sh",
            *argv,
        ]
        return {"bwrap": self._bwrap, "unshare": self._unshare, "": lambda argv: argv}[self.way](limited)

    def remove(self) -> None:
        """Delete the folder; nothing may run in the box any more."""
        for folder, _, _ in os.walk(self.folder):  # which may be locked
            os.chmod(folder, 0o700)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _bwrap(self, argv: list[str]) -> list[str]:
        options = ["--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--die-with-parent"]
        options += ["--new-session", "--hostname", "box", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for place in readable():
            if place.is_symlink():
                options += ["--symlink", os.readlink(place), str(place)]
            else:
                options += ["--dev-bind" if place.parent == Path("/dev") else "--ro-bind", str(place), str(place)]
        for place in hidden():
            options += ["--tmpfs", str(place)]
        for name in KERNELS:
            options += ["--ro-bind", name, name]
        for place in self._writable():
            options += ["--bind", str(place), str(place)]
        options += ["--remount-ro", "/", "--chdir", str(self.home)]
        return ["bwrap", *options, "--", *argv]

    def _unshare(self, argv: list[str]) -> list[str]:
        namespaces = ["--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork"]
        command = ["unshare", *namespaces, "--kill-child", "--", "/bin/sh", "-euc", self._walls()]
        return [*command, "sh", *argv]

    def _walls(self) -> str:
        """Return the shell's commands that build the box around themselves, and then go on as `$@`."""
        root = str(self.folder / "root")
        lines = [
            "PATH=$PATH:/usr/sbin:/sbin",
            "mount --make-rprivate /",
            f"mkdir -p {root}",
            f"mount -t tmpfs box {root}",
            f"mkdir {root}/tmp",
            f"mount -t tmpfs tmp {root}/tmp",  # before what is bound, since a course may lie below /tmp
        ]

        def bind(place: Path, mode: str) -> None:
            outside, inside, parent = (shlex.quote(str(p)) for p in (place, f"{root}{place}", f"{root}{place.parent}"))
            lines.extend([f"mkdir -p {parent}", f"mkdir {inside}" if place.is_dir() else f": > {inside}"])
            lines.extend([f"mount --bind {outside} {inside}", f"mount -o remount,bind,{mode} {inside}"])

        for place in readable():
            if place.is_symlink():
                inside, target = f"{root}{place}", os.readlink(place)
                lines += [f"mkdir -p {shlex.quote(os.path.dirname(inside))}"]
                lines += [f"ln -s {shlex.quote(target)} {shlex.quote(inside)}"]
            else:
                bind(place, "ro")
        lines += [f"mount -t tmpfs -o ro hidden {shlex.quote(f'{root}{place}')}" for place in hidden()]
        for device in DEVICES:
            bind(Path("/dev", device), "ro")  # its mode; what is written to it does not go to this file system
        lines += [f"mkdir -p {root}/proc {root}/dev/shm {root}/old", f"mount -t tmpfs shm {root}/dev/shm"]
        lines += [f"ln -s /proc/self/fd {root}/dev/fd"]
        for place in self._writable():
            bind(place, "rw")
        lines += [f"mount -t proc proc {root}/proc"]
        for name in KERNELS:
            lines += [f"mount --bind {root}{name} {root}{name}", f"mount -o remount,bind,ro {root}{name}"]
        lines += [f"cd {root}", "pivot_root . old", "umount -l /old", "rmdir /old"]
        lines += ["mount -o remount,ro /", f"cd {shlex.quote(str(self.home))}"]
        lines += [f"{shlex.quote(sys.executable)} -IS -c {shlex.quote(_LOOPBACK_UP)}"]
        # The shell stays the first process: it takes over orphans, and a first process would not hear its own signals.
        stay = '"$@"; exit $?'
        lines += [f"exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- /bin/sh -c '{stay}' sh \"$@\""]
        return "\n".join(lines)


# A network of one's own begins with its loopback interface down: linux/sockios.h, SIOCSIFFLAGS.
_LOOPBACK_UP = "import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh22x', b'lo', 0x41))"


@functools.cache
def way_here() -> tuple[str, str]:
    """Return the first way that makes a box here, or "", and why the others do not."""
    reasons = []
    for way in WAYS:
        if trouble := _trouble(way):
            reasons.append(f"{way}: {trouble}")
        else:
            return way, "; ".join(reasons)
    return "", "; ".join(reasons)


def _trouble(way: str) -> str:
    if not shutil.which(way):
        return "not installed"
    with Box(way) as box:
        command = box.command([sys.executable, "-c", "import torch, ddp_course"])
        done = subprocess.run(command, env=box.environment(), capture_output=True, text=True, timeout=120)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""
