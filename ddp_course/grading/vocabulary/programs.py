"""A rank runs a learner's program, as torchrun would, and notes what comes out of it.

The ranks stay: their process group is hidden, and becomes the program's when that calls init_process_group. They are
those of two nodes, the second of one rank, so that the local rank is not the rank. A program that does not meet where
torchrun says, or as another rank, is refused: its ranks would wait for each other.
Left out on purpose: the exit. torchrun's ranks are processes that end; these go on, to tell what they saw.
Read next: `judges/your_own_program/running.py`, what a training program leaves behind.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_course.grading.exercise import Fault, FaultFound
from ddp_course.grading.vocabulary.rounds import Note

STORE = {"MASTER_ADDR": "node0", "MASTER_PORT": "41773"}  # where torchrun's would be
ELSEWHERE = (
    "init_process_group takes rank, world size and the store's address from torchrun's variables; a program that sets "
    "them itself, or meets elsewhere, waits for ranks that are not there"
)
HINTS = {
    r"Default process group has not been initialized": "call dist.init_process_group() before anything of "
    "torch.distributed",
    r"init_process_group.*twice|initialize the default process group twice": "the ranks run the file from the "
    "top once: call init_process_group once, and destroy_process_group at the end",
    r"the program ended with exit status": "a program that has done its work ends with status 0, as it does without "
    "sys.exit()",
}


def run(text: Any, argv: list[str], rank: int, world_size: int) -> Note:
    """Run a program on this rank; return the lines that it printed, and whether it has ended its group.

    Args:
        argv: the name of the file and the arguments.
    Raises:
        FaultFound: this is no text, or a program that opens no group, or another one than torchrun's.
        RuntimeError: it ended with an exit status that is not 0.
    """
    if not isinstance(text, str):
        raise FaultFound(Fault("the text of a program", type(text).__name__, cause="return the program as one text"))
    name, said = argv[0], io.StringIO()
    first_node = world_size - 1
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), **STORE}
    local = {"LOCAL_RANK": str(rank % first_node), "LOCAL_WORLD_SIZE": str(first_node if rank < first_node else 1)}
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    with (
        mock.patch.dict(os.environ, place | local),
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(said),
        _group_hidden(place) as opened,
    ):
        try:
            exec(compile(text, name, "exec"), {"__name__": "__main__", "__file__": name})
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"the program ended with exit status {end.code}") from end
        ended = not dist.is_initialized()
    if not opened:
        cause = "call dist.init_process_group() before anything of torch.distributed"
        raise FaultFound(Fault("a program for several ranks", "one that opens no process group", cause=cause))
    return Note(lines=said.getvalue().splitlines(), ended=ended)


@contextlib.contextmanager
def _group_hidden(place: dict[str, str]) -> Iterator[list[str | None]]:
    """Within the block there is no group until the program opens one; yields the backends that it has asked for."""
    group, opened = c10d._get_default_group(), []

    def init(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if dist.is_initialized():
            raise ValueError("trying to initialize the default process group twice!")
        if "gloo" not in (backend or "gloo"):
            raise ValueError(f"these ranks have CPUs, for which the backend is gloo, not {backend}")
        given = {name: str(n) for name, n in (("RANK", rank), ("WORLD_SIZE", world_size)) if n >= 0}
        found = {name: os.environ.get(name, "") for name in place} | given
        method = "a store of its own" if store else init_method or "env://"
        if found != place or method not in ("env://", "tcp://{MASTER_ADDR}:{MASTER_PORT}".format(**place)):
            said = "rank {RANK} of {WORLD_SIZE}, at {MASTER_ADDR}:{MASTER_PORT}"
            raise FaultFound(Fault(said.format(**place), f"{said.format(**found)}, {method}", cause=ELSEWHERE))
        c10d._update_default_pg(group)
        opened.append(backend)

    def destroy(group: dist.ProcessGroup | None = None) -> None:
        if group in (None, c10d.GroupMember.WORLD):
            c10d._update_default_pg(None)

    fakes = {"init_process_group": init, "destroy_process_group": destroy}
    with mock.patch.multiple(dist, **fakes), mock.patch.multiple(c10d, **fakes):
        c10d._update_default_pg(None)
        try:
            yield opened
        finally:
            c10d._update_default_pg(group)
