"""A `python` that costs 20 ms: it has the server fork a Python which has imported torch already, and stands for it.

It takes Python's words, environment, folder and open files over to the fork, its signals too, and ends as that ends.
What a fork cannot do as a fresh interpreter would (an option, a variable that is read while Python or torch starts), it
leaves to the real Python. It runs with `-IS` and imports nothing that takes time.
"""

import array
import marshal
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

HERE = os.path.dirname(sys.argv[0])
READ_AT_START = ("PYTHON", "TORCH_", "OMP_", "MKL_", "LD_", "MALLOC_", "CUDA_")
# The agent of torchrun sets these for its ranks; all are read later, and the threads can still be set.
READ_LATER = ("TORCH_NCCL_", "OMP_NUM_THREADS", "PYTHON_EXEC")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def words() -> list[str]:
    """Return Python's words; a command such as `torchrun` stands for a function."""
    name = os.path.basename(sys.argv[0])
    with open(f"{HERE}/commands", "rb") as file:
        module = marshal.load(file).get(name)
    if not module:
        return sys.argv[1:]
    call = f"import sys; sys.argv[0] = {name!r}; from {module} import main; sys.exit(main())"
    return ["-c", call, *sys.argv[1:]]


def at_start(environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that a fork would read too late."""
    return {k: v for k, v in environ.items() if k.startswith(READ_AT_START) and not k.startswith(READ_LATER)}


def can_fork(command: list[str], environ: dict[str, str]) -> bool:
    while command and command[0] in ("-u", "-Xfrozen_modules=off"):
        command = command[1:]
    with open(f"{HERE}/environment", "rb") as file:
        same = at_start(environ) == marshal.load(file)
    return same and bool(command) and (command[0] in ("-c", "-m") or os.path.isfile(command[0]))


def inherited() -> list[int]:
    """Return the descriptors that a program started here would have."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the one with which the folder was read
            if os.get_inheritable(number):
                found.append(number)
    return found


def main() -> None:
    command, environ = words(), dict(os.environ)
    if not can_fork(command, environ):
        real = os.readlink(f"{HERE}/real")
        os.execv(real, [real, *command])
    server = socket.socket(socket.AF_UNIX)
    for _ in range(600):  # while it still imports
        try:
            server.connect(f"{HERE}/socket")
            break
        except FileNotFoundError:
            time.sleep(0.1)
    numbers = inherited()
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, FORWARDED)  # until the fork is known
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    asked = marshal.dumps((command, os.getcwd(), environ, numbers, [*map(int, blocked)], ignored))
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
    server.sendmsg([len(asked).to_bytes(4, "big")], files)
    server.sendall(asked)
    fork = int.from_bytes(server.recv(4), "big")

    def forward(number: int, frame: object) -> None:
        # Ctrl-C, and what is sent to a group of which this is the head, is meant for all that the program started.
        send = os.killpg if number == signal.SIGINT or os.getpgrp() == os.getpid() else os.kill
        with suppress(ProcessLookupError):
            send(fork, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    wake, woken = socket.socketpair()  # a signal that comes just before a wait must end it, too
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in numbers:
        os.close(number)  # whoever reads from the program sees it end
    waiting = select.poll()
    for source in (server, wake):
        waiting.register(source, select.POLLIN)
    while server.fileno() not in dict(waiting.poll()):
        wake.recv(4096)
    answer = server.recv(4)
    status = int.from_bytes(answer, "big", signed=True) if answer else 1
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
