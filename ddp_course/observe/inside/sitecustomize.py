"""What does a process of `ddp-course run` tell of itself, when it is asked, and when it ends?

Python imports a file of this name as it starts, if one is on its path: `ddp-course run` puts this folder there. A
thread then waits at a socket for a question, which costs nothing, and answers it while the program's own thread may
wait for ever. It uses what the program has imported, and imports neither torch nor the course: the program may run in
an environment that has no course. Its answers are lines of JSON.

Left out on purpose: whatever would have to be switched on beforehand. torch's Flight Recorder notes the last calls
anyway; gloo's messages are not among them, so a message that is under way is read from the stack.
Read next: `observe/watch.py`, which asks.
"""

from __future__ import annotations

import contextlib
import os
import sys

FOLDER = "DDP_COURSE_RUN"  # the variable with the folder of the socket
MOST_CALLS = 400  # that are told of, the newest


class Observer:
    """What watches this process from inside."""

    def __init__(self, folder: str):
        import _thread
        import atexit
        import faulthandler
        import signal
        import socket
        import struct

        self.main, self.lock, self.interrupted = _thread.get_ident(), _thread.allocate_lock(), False
        self.link = socket.socket(socket.AF_UNIX)
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))  # nobody may read
        self.link.connect(f"{folder}/socket")
        self.inode = os.fstat(self.link.fileno()).st_ino
        self.stacks = open(f"{folder}/{os.getpid()}.stack", "w")  # noqa: SIM115  (lives as long as the process)
        if not faulthandler.is_enabled():
            faulthandler.enable(self.stacks)
        if hasattr(signal, "SIGRTMAX"):  # for a thread that does not let go of the interpreter; programs use others
            faulthandler.register(signal.SIGRTMAX - 5, self.stacks)
        self.before, sys.excepthook = sys.excepthook, self.raised
        atexit.register(self.ends)
        self.say("starts")
        _thread.start_new_thread(self.answer, ())

    def answer(self) -> None:
        """Answer all questions, one byte each; the end of the socket is the end of `ddp-course run`."""
        with contextlib.suppress(OSError):
            while self.is_open():
                asked = self.link.recv(1)
                if not asked:
                    return
                self.say("moves" if asked == b"?" else "where", asked == b"L")

    def is_open(self) -> bool:
        """Whether our socket's number is still ours: a daemon closes all files, and opens its own."""
        try:
            return os.fstat(self.link.fileno()).st_ino == self.inode
        except OSError:
            return False

    def say(self, what: str, lines: bool = False, **facts: object) -> None:
        """Send what is known now; of "moves", which is asked often, only what changes when a program goes on.

        Args:
            lines: of the recorded calls as well. The first time that costs torch more than a second.
        """
        import json
        import time

        facts |= {"what": what, "pid": os.getpid(), "parent": os.getppid()}
        try:
            facts |= place()
            if what == "moves":
                facts |= {"stack": [(f[0], f[1]) for f in self.stack()], "calls": progress()}
                facts |= {"seconds": time.process_time()}
            elif what != "starts":
                facts |= {"line": line_of(self.stack())}
                facts |= {"pending": self.pending(), **calls(lines)}
        except Exception as error:  # torch's own parts may be half imported, or half gone
            facts["unknown"] = f"{type(error).__name__}: {error}"
        line = json.dumps(facts, default=str).encode() + b"\n"
        with self.lock, contextlib.suppress(OSError):  # nobody listens any more
            if self.is_open():
                self.link.sendall(line)

    def ends(self) -> None:
        if not self.interrupted:
            self.say("ends")

    def raised(self, kind: type[BaseException], error: BaseException, trace: object) -> None:
        """Tell of the exception that ends this process; then whoever was to be told before us.

        Of Ctrl-C nothing is told: Python forgets it if other code is compiled before the end, and would exit with 1.
        """
        self.interrupted = issubclass(kind, KeyboardInterrupt)
        if self.interrupted:
            return self.before(kind, error, trace)
        import traceback

        try:
            shown = traceback.TracebackException(kind, error, trace)
            frames = [(f.filename, f.lineno, f.name) for f in reversed(shown.stack)]
            self.say(
                "raised",
                kinds=[each.__name__ for each in kind.__mro__],
                text=str(shown),
                frames=[line_of([f]) for f in reversed(own(frames))],
                at=line_of(frames),
                shown="".join(shown.format()),
                child=getattr(error, "error_pid", None),  # torch's spawn tells so of a rank
                index=getattr(error, "error_index", None),
                code=getattr(error, "exit_code", 1),
            )
        finally:
            self.before(kind, error, trace)

    def leave(self) -> None:
        """Let go of everything, in a process that was forked from the one that is watched."""
        import atexit

        if self.is_open():
            self.link.close()  # else its end would not be seen in the parent's
        else:
            self.link.detach()  # its number is another file's, or none's
        atexit.unregister(self.ends)
        if sys.excepthook == self.raised:
            sys.excepthook = self.before

    def stack(self) -> list[tuple[str, int, str]]:
        """File, line and function of the main thread's frames, innermost first."""
        return [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in self.frames()]

    def frames(self) -> list:
        found, frame = [], sys._current_frames().get(self.main)
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return [each for each in found if each.f_code.co_filename != __file__]  # at the end of a process, only ours

    def pending(self) -> dict:
        """The message, or the meeting of the ranks, that the main thread is in, as torch's frames tell."""
        found: dict = {}
        for frame in self.frames():
            if not frame.f_code.co_filename.endswith("distributed_c10d.py"):
                continue
            name, known = frame.f_code.co_name, frame.f_locals
            if name in ("init_process_group", "new_group"):
                found = {"op": name}
            elif name in ("send", "recv"):
                dist, end = sys.modules["torch.distributed"], "dst" if name == "send" else "src"
                peer, inside = known.get(end), known.get(f"group_{end}")
                if peer is None and inside is not None:
                    peer = dist.get_global_rank(known.get("group") or dist.group.WORLD, inside)
                found = {"op": name, "peer": peer, "tag": known.get("tag") or 0}
        return found


def place() -> dict:
    """Which rank is this, and of how many? As the group says; else torchrun's variables; else torch's spawn."""
    dist, work = sys.modules.get("torch.distributed"), sys.modules.get("multiprocessing.process")
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    opened = bool(dist and getattr(dist, "is_initialized", bool)())
    if opened:
        rank, world = dist.get_rank(), dist.get_world_size()
    given = getattr(work.current_process(), "_args", ()) if work and rank is None else ()
    if len(given) == 4 and getattr(getattr(work.current_process(), "_target", None), "__name__", "") == "_wrap":
        rank = given[1]
    if not opened and "torch.distributed.run" in sys.modules:
        rank = None  # torchrun itself, where a scheduler has set the variables
    size = {"world": int(world)} if world is not None else {}
    return ({"rank": int(rank)} if rank is not None else {}) | size | {"attempt": _attempt()}


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


# --- torch's Flight Recorder ---------------------------------------------------------------------------


def progress() -> list[str]:
    """How many calls have been made and completed: gloo's, and NCCL's."""
    return [dump(False, False).decode() for dump in dumps("_json")]


def dumps(kind: str = "") -> list:
    """torch's functions that hand out what was recorded; older ones have fewer."""
    recorder = sys.modules.get("torch._C._distributed_c10d")
    found = (getattr(recorder, f"_dump_{name}_trace{kind}", None) for name in ("fr", "nccl"))
    return [each for each in found if each]


def calls(lines: bool) -> dict:
    """The last calls, oldest first, each with the line that asked for it; and the ranks of each group by its name."""
    import pickle

    made = [call for dump in dumps() for call in pickle.loads(dump(True, lines, False))["entries"]]  # its own memory
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    named = [(name, world.pg_group_ranks.get(group, {})) for group, name in world.pg_names.items()] if world else []
    groups = {name: sorted(ranks, key=ranks.get) for name, ranks in named}
    made = sorted(made, key=lambda call: call["time_created_ns"])[-MOST_CALLS:]
    for call in made:
        call["at"] = line_of([(f["filename"], f["line"], f["name"]) for f in call.pop("frames", [])])
    return {"made": made, "groups": groups, "recorder": bool(dumps()) or world is None}


# --- Lines -----------------------------------------------------------------------------------------------


def own(frames: list[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Those of the program; if there are none, as where it is an installed module, all but torch's and Python's."""
    import sysconfig

    python = sysconfig.get_paths()["stdlib"]
    torch = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or python)
    others = [f for f in frames if not f[0].startswith((python, torch, "<")) and f[0] != __file__]
    return [f for f in others if "site-packages" not in f[0] and "dist-packages" not in f[0]] or others


def line_of(frames: list[tuple[str, int, str]]) -> list | None:
    """The innermost of the program's own lines, with its text; `frames` innermost first."""
    import linecache

    found = own(frames) or [f for f in frames if not f[0].startswith("<frozen")]
    return [*found[0], linecache.getline(found[0][0], found[0][1]).strip()] if found else None


# --- The start -------------------------------------------------------------------------------------------


def start(folder: str) -> None:
    """Watch this process; one that it forks, too, unless this is a rank, whose workers are none."""
    watching = [Observer(folder)]  # none or one

    def forked() -> None:
        for observer in watching:
            observer.leave()
        watching.clear()
        dist = sys.modules.get("torch.distributed")
        if "RANK" not in os.environ and not (dist and getattr(dist, "is_initialized", bool)()):
            with contextlib.suppress(Exception):  # as at the start
                watching.append(Observer(folder))

    os.register_at_fork(after_in_child=forked)


def step_aside() -> None:
    """Leave the path, and of a rank its variables, as they are without us; import the file that we stand before."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    if "RANK" in os.environ:  # its own children are workers
        entries = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
        rest = os.pathsep.join(entry for entry in entries if os.path.abspath(entry or ".") != here)
        del os.environ[FOLDER]
        if rest:
            os.environ["PYTHONPATH"] = rest
    ours = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = ours


if __name__ == "sitecustomize" and FOLDER in os.environ:
    try:
        if sys.version_info >= (3, 9):  # noqa: UP036  (an older one may run beside the ranks, and is left alone)
            with contextlib.suppress(Exception):  # no program is to suffer from us, as where `ddp-course run` has ended
                start(os.environ[FOLDER])
    finally:
        step_aside()
