"""One program, run several times, each time in a copy of its folder and with eyes on every rank.

Read next: `watch.py`, the eyes; `rehearse.py`, which says what they saw.
"""

from __future__ import annotations

import itertools
import os
import runpy
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.multiprocessing

from ddp_course.launcher import RankError, launch
from ddp_course.launcher.failure import is_talking
from ddp_course.rehearsal import two_runs
from ddp_course.rehearsal.finding import Finding
from ddp_course.rehearsal.notes import Answer, Notes
from ddp_course.rehearsal.parsed import Parsed
from ddp_course.rehearsal.watch import Watch
from ddp_course.rehearsal.watch_certified import CertifiedWatch

MOST_BYTES = 500e6  # of the folder that is copied
DIE_AFTER = 2  # steps after the first save


class Stage:
    """Where one program is run several times, each time in a copy of its folder.

    Attributes:
        resume_with: arguments added to its own when it is started again after a kill.
        certified: whether to see what a certificate needs.
        runs: what `run` has returned, by name.
    """

    def __init__(self, script: Path, arguments: list[str], folder: Path, limit_s: float, wait_s: float,
                 resume_with: Sequence[str] = (), certified: bool = False):  # fmt: skip
        self.script, self.arguments, self.folder = script, arguments, folder
        self.limit_s, self.wait_s = limit_s, wait_s
        self.resume_with, self.certified = resume_with, certified
        self.runs: dict[str, tuple[Notes, str]] = {}
        bytes_ = sum(
            each.stat().st_size for each in script.parent.rglob("*") if each.is_file() and not each.is_symlink()
        )
        if bytes_ > MOST_BYTES:
            raise ValueError(
                f"{script.parent} holds {bytes_ / 1e6:.0f} MB, and a rehearsal copies it; put the script into a folder "
                f"with less than {MOST_BYTES / 1e6:.0f} MB"
            )

    def notes(self, name: str) -> Path:
        return self.folder / f"notes-{name}"

    def run(
        self,
        name: str,
        world_size: int,
        die_after: int | None = None,
        where: str | None = None,
        batches: str | None = None,
        hashes: bool = False,
    ) -> tuple[Notes, str]:
        """Run the program once; returns its notes, and the report if it failed.

        Args:
            hashes: whether each rank is to have a seed of its own for hash(), as under torchrun; that takes longer.
        """
        home = self.folder / (where or name)
        notes = self.notes(name)
        notes.mkdir()
        if not home.exists():
            skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".ipynb_checkpoints")
            shutil.copytree(self.script.parent, home, ignore=skipped, symlinks=True)
        script = str(home / self.script.name)
        failure = ""
        try:
            arguments = [*self.arguments, *(self.resume_with if name == "again" else ())]
            call = (script, arguments, str(notes), self.wait_s, die_after, batches, self.certified)
            launch(_rehearsed, world_size, call, init=False, quiet=True, limit_s=self.limit_s,
                   timeout_s=self.wait_s + 10, start_method="spawn" if hashes else "forkserver")  # fmt: skip
        except RankError as error:
            failure = str(error)
        self.runs[name] = Notes.read(notes, world_size), failure.replace(str(home), ".")
        return self.runs[name]

    def killed_and_resumed(self, whole: Notes) -> Answer:
        size = len(whole.ranks)
        killed, _ = self.run("killed", size, DIE_AFTER, where="resumed")
        if not killed.all("dies"):
            return None  # it was over before
        again, failure = self.run("again", size, where="resumed")
        if failure:
            line = next((fact["line"] for fact in killed.all("saving")), None)
            return Finding("inexact-resume", line, f"after a kill it does not start again: {failure.splitlines()[0]}")
        return two_runs.resumed(whole, killed, again)


def _rehearsed(
    rank: int,
    world_size: int,
    script: str,
    arguments: list[str],
    notes: str,
    wait_s: float,
    die_after: int | None,
    batches: str | None,
    certified: bool,
) -> None:
    """What each rank runs: the learner's program, as `python script.py` would."""
    torch.set_num_threads(1)  # on one rank as on several: sums keep their order, and small programs gain nothing
    os.chdir(os.path.dirname(script))
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    watch = Watch(script, notes, rank, wait_s, die_after, batches)
    if certified:
        CertifiedWatch(watch, f"{notes}/rank{rank}.weights").install()
    watch.install()
    torch.multiprocessing.spawn = _own_ranks(rank, world_size, notes, wait_s)
    error: BaseException | None = None
    try:
        watch.calls.follow()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            error = RuntimeError(f"the program ended with exit status {end.code}")
            raise error from end
    except BaseException as raised:
        error = raised
        raise
    finally:
        lines = (
            [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
            if error
            else []
        )
        if rank == 0:
            Path(notes, "main").touch()
        watch.at_end(error, lines[-1] if lines else None, error is not None and is_talking(error))


def _own_ranks(rank: int, world_size: int, notes: str, wait_s: float):
    """What stands in for `mp.spawn` on ranks that run already: what stands after it is for rank 0 alone.

    A folder that the program makes for its ranks has one name on all of them.
    """
    names = (f"made{number}" for number in itertools.count())

    def mkdtemp(suffix=None, prefix=None, dir=None):
        path = os.path.join(notes, next(names))
        os.makedirs(path, exist_ok=True)
        return path

    def spawn(fn, args=(), nprocs=1, join=True, daemon=False, start_method="spawn"):
        if nprocs != world_size:
            raise RuntimeError(
                f"the program starts {nprocs} ranks by itself, and is rehearsed on {world_size}: rehearse it with "
                f"--ranks {nprocs}, or let it take the number from an argument"
            )
        for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)  # torchrun's; who starts ranks himself has none
        tempfile.mkdtemp = own
        fn(rank, *args)
        Path(notes, f"over{rank}").touch()
        # Rank 0 goes on when all are over; the others leave when it is, too, since leaving may clear a folder away.
        awaited = ["main"] if rank else [f"over{each}" for each in range(world_size)]
        until = time.monotonic() + wait_s
        while not all(Path(notes, each).exists() for each in awaited) and time.monotonic() < until:
            time.sleep(0.01)
        if rank:
            raise SystemExit(0)

    own = tempfile.mkdtemp
    if Parsed(Path(sys.argv[0]).read_text(encoding="utf-8")).named("spawn"):
        tempfile.mkdtemp = mkdtemp
    return spawn
