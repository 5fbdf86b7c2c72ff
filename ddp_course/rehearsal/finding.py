"""What is said of a learner's program: which fault, on which line, how it is known, and what to do.

Read next: `lint.py`, which finds it in the text; `rehearse.py`, which finds it by running the program.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass

# Fault -> (what it is, what to do). `lint` and `rehearse` name the same things by the same words.
FAULTS = {
    "same-rows": (
        "all ranks train on the same rows, so more ranks bring nothing",
        "give the DataLoader a DistributedSampler, or let each rank take rows rank, rank + world_size, …",
    ),
    "missing-set-epoch": (
        "the sampler shuffles every epoch into the same order",
        "call sampler.set_epoch(epoch) at the beginning of each epoch",
    ),
    "different-start": (
        "the ranks start from different weights",
        "wrap the model in DistributedDataParallel, which sends rank 0's weights, or broadcast them",
    ),
    "drift": (
        "the ranks' weights are equal at the start and differ later",
        "call the wrapped model, not the module inside it, and change weights on all ranks in the same way",
    ),
    "not-averaged": (
        "the gradients are not averaged over the ranks",
        "wrap the model in DistributedDataParallel and call the wrapped model",
    ),
    "averaged-twice": (
        "the gradients are divided by the number of ranks twice",
        "DistributedDataParallel returns the mean: drop your own all_reduce and division",
    ),
    "summed": (
        "the gradients are summed over the ranks and not divided",
        "divide by world_size after the all_reduce, or wrap the model in DistributedDataParallel",
    ),
    "mean-of-means": (
        "means over different numbers of rows are averaged as if they counted the same",
        "reduce the sum and the count, then divide once",
    ),
    "padded-evaluation": (
        "DistributedSampler repeats rows to give each rank as many, and the evaluation counts them twice",
        "let each rank evaluate rows rank, rank + world_size, … and reduce sums and counts",
    ),
    "prints-by-every-rank": ("every rank prints the same line", "print on rank 0 only: if rank == 0"),
    "file-by-every-rank": ("every rank writes the same file", "write on rank 0 only: if rank == 0"),
    "unguarded-save": (
        "every rank saves to the same file, so that one may write into another's",
        "save on rank 0 only, to a temporary name that is then renamed; the others wait at a barrier",
    ),
    "early-load": (
        "a rank may load the checkpoint before rank 0 has finished writing it",
        "call dist.barrier() after the save, on every rank",
    ),
    "module-prefix": (
        "names with and without `module.` do not meet, and strict=False hides that nothing is loaded",
        "save replica.module.state_dict() and load it with strict=True",
    ),
    "local-batchnorm": (
        "each rank normalises its few rows by their own mean and variance",
        "call SyncBatchNorm.convert_sync_batchnorm(model) before wrapping it",
    ),
    "same-augmentation": (
        "ranks or workers draw the same random numbers, so that they augment alike",
        "seed each rank with 1000 * seed + rank, and numpy in worker_init_fn from torch.initial_seed()",
    ),
    "lr-not-scaled": (
        "more ranks make the global batch larger, and the learning rate does not know it",
        "divide the batch by world_size, or scale the learning rate with a warm-up",
    ),
    "inexact-resume": (
        "a run that is killed and resumed does not train as one that was not",
        "save and load the model, optimizer, schedule, epoch and generators",
    ),
    "slow-loading": (
        "the ranks spend more time waiting for rows than training",
        "use num_workers, or make __getitem__ cheaper; ranks × workers should not exceed the cores",
    ),
    "collective-under-rank-0": (
        "one rank makes a call in which all must join: it waits for the others in vain",
        "make the call on every rank, and use its result on rank 0",
    ),
    "no-main-guard": (
        "a process started by spawn imports this file and comes to the same line again",
        'put it under if __name__ == "__main__":',
    ),
    "local-rank-argument": (
        "torchrun passes no --local_rank; older launchers did",
        'read int(os.environ["LOCAL_RANK"])',
    ),
    "find-unused-without-need": (
        "find_unused_parameters=True walks through the graph in every step, and no parameter is ever unused",
        "leave it out",
    ),
    "forward-outside-no-sync": (
        "the forward decides whether gradients are sent, and it runs outside no_sync()",
        "put the forward and the backward into the with block",
    ),
    "cuda-without-device": (
        "without a number every rank uses GPU 0",
        "call torch.cuda.set_device(local_rank) first, or use .to(local_rank)",
    ),
    "loss-not-reduced": (
        "what is logged is the loss of one rank's rows",
        "all_reduce the sum and the count before you print it",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One fault of a program.

    Attributes:
        fault: a word of `FAULTS`.
        line: of the program; None when no line shows it.
        evidence: what was seen.
        note: whether it is worth a look, and may be meant so.
    """

    fault: str
    line: int | None
    evidence: str = ""
    note: bool = False

    def show(self, name: str) -> str:
        """Return the finding in lines of at most 100 characters, as a compiler would show it."""
        what, cure = FAULTS[self.fault]
        place = name if self.line is None else f"{name}:{self.line}"
        said = ["look at" if self.note else "wrong", f"{self.fault}: {what}"]
        text = [f"{place}: {' '.join(said)}", f"seen: {self.evidence}" if self.evidence else "", f"cure: {cure}"]
        return "\n".join(
            textwrap.fill(line, 100, initial_indent=" " * indent, subsequent_indent=" " * (indent or 4))
            for line, indent in zip(text, (0, 4, 4), strict=True)
            if line
        )

    def as_json(self) -> dict:
        return asdict(self) | {"means": FAULTS[self.fault][0], "cure": FAULTS[self.fault][1]}
