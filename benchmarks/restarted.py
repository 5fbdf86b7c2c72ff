"""A training that a rank's death interrupts, with the moment at which each part of its new start was done.

Run by torchrun (`python -m benchmarks.restarted FOLDER`) or by `launch`. Nothing but the standard library is
imported at the top, so that the time of the imports can be told from the rest. The clock is the system's, the same in
all processes.

Read next: `recovery.py`, what is made of the moments.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

DIES_IN = 5  # the step in which rank 1 ends, in its first life
SAVE_EVERY = 2
EPOCHS = 1


def stamp(folder: Path, what: str) -> None:
    """Note that `what` is done now. A line is one system call, so it outlives a SIGKILL."""
    file = os.open(folder / "moments", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what} {time.monotonic()}\n".encode())
    os.close(file)


def moments(folder: Path) -> dict[str, float]:
    lines = (folder / "moments").read_text().splitlines()
    return {what: float(when) for what, when in map(str.split, lines)}


def life(rank: int, world_size: int, folder: Path, first: bool) -> int:
    """Train; in the first life rank 1 ends in step `DIES_IN`. Return the step from which this life went on.

    Collective: those of `train`, every rank.
    """
    from ddp_course import train as training
    from ddp_course.train.run import Run

    tells = rank == 0 and not first
    stamp(folder, "imported") if tells else None
    original_step, original_resume = Run.after_step, Run.resume

    def after_step(self: Run, *args: object) -> bool:
        if first and rank == 1 and self.step + 1 == DIES_IN:
            stamp(folder, "killed")
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = original_step(self, *args)
        stamp(folder, "step") if tells and self.step == self.first_step + 1 else None
        return outcome

    def resume(self: Run) -> None:
        original_resume(self)
        stamp(folder, "ready") if tells else None

    Run.after_step, Run.resume = after_step, resume
    config = training.Config(
        epochs=EPOCHS, hidden=16, local_batch=64, progress=False,
        checkpoint=str(folder / "run"), save_every=SAVE_EVERY, resume=True,
    )  # fmt: skip
    return training.train(rank, world_size, config).first_step


def launched(rank: int, world_size: int, folder: Path, first: bool) -> int:
    """`life` for `launch`, which has opened the group before this is called. Collective: see `life`."""
    stamp(folder, "met") if rank == 0 and not first else None
    return life(rank, world_size, folder, first)


def main(folder: Path) -> None:
    first, rank = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", int(os.environ["RANK"])
    tells = rank == 0 and not first
    stamp(folder, "started") if tells else None
    import torch  # noqa: F401

    from ddp_course.groups import process_group

    stamp(folder, "torch") if tells else None
    with process_group(backend="gloo") as place:
        stamp(folder, "met") if tells else None
        went_on_at = life(place.rank, place.world_size, folder, first)
    print(f"rank {place.rank} went on at {went_on_at}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
