"""What is said of a learner's program: which fault, on which line, how it is known, and what to do.

Read next: `lint.py`, which finds it in the text; `rehearse.py`, which finds it by running the program.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass

# How sure, and how bad. Only WRONG makes a command end with status 1: the result differs from that of one process, or
# the program hangs or dies, and the run has shown it or the text leaves no other way.
GRADES = WRONG, LOOK, NOTE = "wrong", "look at", "note"

# Fault -> (what it is, what to do). `lint` and `rehearse` name the same things by the same words.
FAULTS = {
    # --- samples ---
    "same-rows": (
        "ranks train on the same samples, so more ranks bring nothing",
        "give the DataLoader a DistributedSampler, or let each rank take samples rank, rank + world_size, …",
    ),
    "same-draws": (
        "a random sampler draws the same samples on every rank",
        "give the sampler a generator of its own, seeded by seed + rank: generator=torch.Generator().manual_seed(…)",
    ),
    "sampler-differs": (
        "the ranks' DistributedSamplers do not belong together, so their shares overlap and leave samples out",
        "the same seed and num_replicas on every rank, and each rank's own number as rank",
    ),
    "missing-set-epoch": (
        "the samples come in the same order in each epoch",
        "call sampler.set_epoch(epoch) at the beginning of each epoch",
    ),
    "stale-workers": (
        "workers that stay hold a copy of the data set from before the first epoch: they never see set_epoch",
        "persistent_workers=False, or count epochs inside __iter__, or keep the epoch in a shared tensor",
    ),
    "split-leak": (
        "the ranks split the data in different ways, so one trains on what another evaluates",
        "give the split one generator with the same seed on every rank",
    ),
    "same-augmentation": (
        "ranks or workers draw the same random numbers, so that they augment alike",
        "seed each rank differently after the model is made, and numpy in worker_init_fn from torch.initial_seed()",
    ),
    "mean-of-means": (
        "means over different numbers are averaged as if they counted the same",
        "reduce the sum and the count, then divide once",
    ),
    "loss-of-unequal-counts": (
        "each rank divides its loss by a count of its own, and the average of the gradients weighs ranks alike",
        "divide the sum by the count of all ranks: all_reduce the count, loss_sum * world_size / count",
    ),
    "loss-of-whole-batch": (
        "the gradient is not the mean of the ranks' gradients: something looks at the whole batch of a rank",
        "gather what is compared (SyncBatchNorm; all_gather with gradient), or accept the difference",
    ),
    "padded-evaluation": (
        "DistributedSampler repeats samples to give each rank as many, and the evaluation counts them twice",
        "let each rank evaluate samples rank, rank + world_size, … and reduce sums and counts",
    ),
    "slow-loading": (
        "the ranks spend more time waiting for samples than training",
        "use num_workers, or make __getitem__ cheaper; ranks × workers should not exceed the cores",
    ),
    "unread-samples": (
        "several ranks leave out samples that one process reads",
        "divide once, either the files or the samples; places in a rank's share are not those in the whole data",
    ),
    "unordered-names": (
        "numbers are given in the order of a set, which for texts differs from process to process",
        "sorted(set(…))",
    ),
    "empty-group": (
        "an optimizer's group has no parameters: what it is meant for has another rate, or none",
        "inside a wrapped model all names begin with `module.`: build the groups from model.module",
    ),
    "losses-differ": (
        "the ranks train with different losses: a weight in it comes from a rank's own samples",
        "all_reduce the counts that the weights are made of",
    ),
    "reseeded": (
        "a seed is set again in each epoch, so that each epoch draws the same random numbers",
        "draw what is to repeat from a torch.Generator of its own, or inside torch.random.fork_rng()",
    ),
    "low-precision-counts": (
        "counts are added up in half precision, which knows no whole numbers above 256 or 2048",
        "count in int64, float32 or float64",
    ),
    "reduced-again": (
        "a running sum is reduced in place and then added to, so the next reduce counts the first part again",
        "reduce a clone of the running sum, or set it to zero after each reduce",
    ),
    # --- calls that do not meet ---
    "uneven-inputs": (
        "one rank has more batches than another, and the others are gone when it asks for their gradients",
        "the same number of batches on every rank, `with model.join():`, or a stop that all ranks decide together",
    ),
    "decided-by-one-rank": (
        "ranks decide differently here, and from then on make different calls",
        "decide together: all_reduce what is tested (MAX of a flag, mean of a loss), then test it on every rank",
    ),
    "collective-under-rank-0": (
        "one rank makes a call in which all must join: it waits for the others in vain",
        "make the call on every rank, and use its result on rank 0",
    ),
    "forward-on-one-rank": (
        "one rank alone calls the wrapped model, whose forward broadcasts the buffers",
        "call model.module there, or evaluate on every rank",
    ),
    "collective-order": (
        "ranks make different collective calls",
        "every rank must make the same calls, in the same order, with tensors of the same size and dtype",
    ),
    "set-order": (
        "a set's order differs from process to process, so ranks reduce different things with each other",
        "loop over sorted(…)",
    ),
    "lost-broadcast": (
        "a broadcast writes into a list that nothing keeps, so every rank goes on with its own value",
        "box = [value]; dist.broadcast_object_list(box, src=0); value = box[0]",
    ),
    "unwaited": (
        "an asynchronous call may not be over where its result is used",
        "keep every handle, and call wait() on each before the result is used",
    ),
    "collective-under-join": (
        "a collective of the program's own stands inside join(), which stands in for DDP's calls only",
        "move it out of the with block, or give the ranks equally many batches",
    ),
    "hang": (
        "ranks wait for each other in vain",
        "every call in a group needs all its members, in one order; each send needs its recv",
    ),
    "crash": ("the program raises on several ranks", "the report below has its traceback"),
    # --- weights and gradients ---
    "different-start": (
        "the ranks start from different weights",
        "wrap the model in DistributedDataParallel, which sends rank 0's weights, or broadcast them",
    ),
    "not-averaged": (
        "the gradients are not averaged over the ranks",
        "wrap the model in DistributedDataParallel and call the wrapped model",
    ),
    "past-the-replica": (
        "a training forward goes past DistributedDataParallel, so its gradients stay on the rank",
        "call the wrapped model, not the module inside it",
    ),
    "changed-after-wrapping": (
        "parameters were replaced or converted after wrapping, and DistributedDataParallel looks after the old ones",
        "change the model first and wrap it afterwards, wrap it again, or convert a copy",
    ),
    "thawed-after-wrapping": (
        "parameters that were frozen when the model was wrapped are in no bucket, so nothing averages their gradients",
        "wrap the model again after thawing, or thaw before wrapping and freeze by the optimizer",
    ),
    "outside-the-replica": (
        "parameters are trained that belong to no replica, so nothing averages their gradients",
        "make them part of the module that is wrapped, or wrap them, too",
    ),
    "clipped-before-sync": (
        "gradients are clipped while they are still the rank's own, by another factor on each rank",
        "clip once, after the backward that sends them and before the step",
    ),
    "local-buffers": (
        "a buffer is computed from one rank's samples; rank 0's is then sent to all, and the others' are lost",
        "all_reduce what the buffer is computed from",
    ),
    "models-differ": (
        "ranks run different weights where they evaluate or teach",
        "change, load and copy that model in the same way on every rank",
    ),
    "step-without-sync": (
        "the optimizer steps on gradients of backward passes under no_sync(), which are the rank's own",
        "run the last backward before each step outside no_sync(), also at the end of an epoch",
    ),
    "forward-outside-no-sync": (
        "the forward decides whether gradients are sent, and it runs outside no_sync()",
        "put the forward and the backward into the with block",
    ),
    "averaged-twice": (
        "the gradients are divided by the number of ranks twice",
        "DistributedDataParallel returns the mean: drop your own all_reduce and division",
    ),
    "summed": (
        "the gradients are summed over the ranks and not divided",
        "divide by world_size after the all_reduce, or wrap the model in DistributedDataParallel",
    ),
    "rates-differ": (
        "the ranks' learning rates differ",
        "feed the schedule the same number on every rank: all_reduce the metric before scheduler.step(metric)",
    ),
    "drift": (
        "the ranks' weights are equal at the start and differ at the end",
        "change weights, buffers and the optimizer's state in the same way on all ranks",
    ),
    "schedule-length": (
        "the learning-rate schedule counts more steps than a rank takes, so it does not come to its end",
        "count the batches of a rank: steps = len(loader) * epochs",
    ),
    "local-batchnorm": (
        "each rank normalises its few samples by their own mean and variance",
        "call SyncBatchNorm.convert_sync_batchnorm(model) before wrapping it",
    ),
    "lr-not-scaled": (
        "more ranks make the global batch larger, and the learning rate does not know it",
        "divide the batch by world_size, or scale the learning rate with a warm-up",
    ),
    "find-unused-without-need": (
        "find_unused_parameters=True walks through the graph in every step, and no parameter is ever unused",
        "leave it out",
    ),
    # --- files and prints ---
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
    "inexact-resume": (
        "a run that is killed and resumed does not train as one that was not",
        "save and load the model, optimizer, schedule, epoch and generators",
    ),
    "file-by-every-rank": ("every rank writes the same file", "write on rank 0 only: if rank == 0"),
    "prints-by-every-rank": ("every rank prints the same line", "print on rank 0 only: if rank == 0"),
    "loss-not-reduced": (
        "what is logged is the loss of one rank's samples",
        "all_reduce the sum and the count before you print it",
    ),
    # --- starting ---
    "fixed-address": (
        "the program overwrites the address that torchrun gave it, and no store answers at its own",
        "leave MASTER_ADDR and MASTER_PORT to torchrun, or use os.environ.setdefault",
    ),
    "no-main-guard": (
        "a process started by spawn imports this file and comes to the same line again",
        'put it under if __name__ == "__main__":',
    ),
    "local-rank-argument": (
        "torchrun passes no --local_rank; older launchers did",
        'read int(os.environ["LOCAL_RANK"])',
    ),
    "cuda-without-device": (
        "without a number every rank uses GPU 0",
        "call torch.cuda.set_device(local_rank) first, or use .to(local_rank)",
    ),
}
# Worth knowing, and never an error by themselves.
NOTES = {
    *("lr-not-scaled", "prints-by-every-rank", "local-batchnorm", "slow-loading", "loss-not-reduced"),
    "find-unused-without-need",
}


@dataclass(frozen=True)
class Finding:
    """One fault of a program.

    Attributes:
        fault: a word of `FAULTS`.
        line: of the program; None when no line shows it.
        evidence: what was seen.
        grade: WRONG, LOOK (worth a look: it may be meant so) or NOTE.
        cure: what to do here; "" for what `FAULTS` says.
    """

    fault: str
    line: int | None
    evidence: str = ""
    grade: str = ""
    cure: str = ""

    def __post_init__(self) -> None:
        if not self.grade:
            object.__setattr__(self, "grade", NOTE if self.fault in NOTES else WRONG)

    def show(self, name: str) -> str:
        """Return the finding in lines of at most 100 characters, as a compiler would show it."""
        what, cure = FAULTS[self.fault]
        place = name if self.line is None else f"{name}:{self.line}"
        seen = f"seen: {self.evidence}" if self.evidence else ""
        text = [f"{place}: {self.grade} {self.fault}: {what}", seen, f"cure: {self.cure or cure}"]
        return "\n".join(
            textwrap.fill(line, 100, initial_indent=" " * indent, subsequent_indent=" " * (indent or 4))
            for line, indent in zip(text, (0, 4, 4), strict=True)
            if line
        )

    def as_json(self) -> dict:
        what, cure = FAULTS[self.fault]
        return asdict(self) | {"means": what, "cure": self.cure or cure}
