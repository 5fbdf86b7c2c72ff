"""What is a fault of this catalogue, and how is one watched while it happens?

A `Fault` is a page of a field guide that runs: what you see, why it happens, how it is fixed, and two programs
of a few lines, the broken one and the fixed one. Both run on real ranks within seconds. What comes back is a
`Diagnosis`, made by a tool that sees only what happened and is not told which fault it was.

Left out on purpose: the tools themselves. `diagnose/recognise.py` reads reports of failures, and
`rehearsal/rehearse.py` runs a training program that fails in silence.
Read next: `collectives.py`, three faults to begin with; `catalogue.py` has them all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_course.diagnose.recognise import Diagnosis, recognise
from ddp_course.launcher import RankError, RankPool

__all__ = ["Diagnosis", "Fault", "started", "watch"]

TIMEOUT_S = 2.0  # the patience of ranks here: torch's own is 30 minutes, 10 under NCCL


@dataclass(frozen=True)
class Fault:
    """One way in which distributed training goes wrong.

    Attributes:
        name: a word for the terminal, such as "skipped-collective".
        title: one line.
        symptom: what a person sees first.
        cause: why it happens.
        cure: what to change.
        met_at: where people meet it: a thread, or a page of torch's documentation.
        provoke: runs the broken program; its diagnosis names this fault.
        fix: runs the fixed one; its diagnosis names none.
    """

    name: str
    title: str
    symptom: str
    cause: str
    cure: str
    met_at: str
    provoke: Callable[[], Diagnosis]
    fix: Callable[[], Diagnosis]


def watch(
    program: Callable,
    world_size: int,
    args: tuple = (),
    *,
    init: bool = True,
    limit_s: float = 30.0,
    check: Callable[[list], Diagnosis] | None = None,
) -> Diagnosis:
    """Run `program(rank, world_size, *args)` on fresh ranks, and say what its failure looks like.

    Args:
        program, world_size, args, init, limit_s: as in `launch`.
        check: looks at what the ranks returned, by rank; for faults that make no rank fail.
    Returns:
        What `recognise` reads from the report, or a diagnosis without a fault when every rank returned. `seconds`
        counts from the moment at which the ranks, all of them up, were told to run the program.
    Raises:
        RankError: a rank could not start.
    """
    how = {"backend": "gloo", "start_method": "forkserver", "quiet": True}  # the programs' tensors are on the CPU
    ranks = RankPool(world_size, init=init, timeout_s=TIMEOUT_S, **how)
    # The program travels once before the clock starts: for what it imports, a busy machine may need seconds.
    ranks.run(lambda rank, world_size, program: None, (program,))
    begin = time.monotonic()
    try:
        with ranks:
            results = ranks.run(program, args, limit_s=limit_s)
            returned = "the rank returned" if world_size == 1 else f"all {world_size} ranks returned"
            found = check(results) if check else Diagnosis(None, None, returned)
    except RankError as error:
        found = recognise(error)
    return replace(found, seconds=time.monotonic() - begin)


def started(
    program: str, ranks: int = 1, *, module: str = "torch.distributed.run", limit_s: float = 120
) -> tuple[int, list[str]]:
    """Run the text of a program as torchrun does, on CPUs, in a temporary folder under the name train.py.

    Args:
        module: the launcher, to be run by `python -m`.
        limit_s: after so long the launcher is told to end its ranks; imports included.
    Returns:
        The launcher's exit status, and what each rank printed, on its output and then on its error stream.
    Raises:
        TimeoutError: the ranks did not end.
        RuntimeError: no rank was started; has the launcher's words.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
        script, logs = Path(folder, "train.py"), Path(folder, "logs")
        script.write_text(program, "utf-8")
        options = ["--standalone", "--nproc-per-node", str(ranks), "--log-dir", str(logs), "--redirects", "3"]
        # One thread a rank: so says torchrun, too, but with a warning.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        call = [sys.executable, "-m", module, *options, str(script)]
        with subprocess.Popen(call, env=environment, stdout=-1, stderr=-2, text=True) as launcher:
            try:
                words, _ = launcher.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                launcher.terminate()  # not kill, which would leave the ranks behind
                with suppress(subprocess.TimeoutExpired):
                    launcher.wait(60)
                launcher.kill()
                raise TimeoutError(f"the {ranks} ranks did not end within {limit_s:.0f} s") from None
        said = []
        for rank in range(ranks):
            files = [path for name in ("stdout", "stderr") for path in logs.glob(f"*/attempt_0/{rank}/{name}.log")]
            said.append("".join(path.read_text("utf-8") for path in files).replace(f"{folder}{os.sep}", ""))
            if not files:
                raise RuntimeError(f"no rank {rank} was started: {words}")
    return launcher.returncode, said
