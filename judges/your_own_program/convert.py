"""11.1 `program()`: does the learner's program for several ranks do what the one for one device did?

Read `running.py` and `reference.py` first. Read next: `repair.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from random import Random

import torch

from ddp_course.grading.exercise import Fault
from ddp_course.grading.vocabulary.expect import Expect, Slips, all_of, equals, exercise, first_mistake, nothing, once
from ddp_course.grading.vocabulary.play import Round, Seen
from judges.your_own_program.reference import BATCH, trained
from judges.your_own_program.running import Case, act, last_saved, printed

SAME = 2e-4  # of weights after some epochs in another order of additions
PRINTED = 2e-5


def rounds(rng: Random, folder: str) -> list[Round]:
    """Two and three ranks: 101 test rows divide by neither."""
    seed = rng.randint(10, 99)
    return [Round(size, [(name, Case(f"{folder}/{name}", 3, seed))], init=False, fresh=True)
            for name, size in (("two", 2), ("three", 3))]  # fmt: skip


def reference(seen: Seen, **knobs) -> list:
    return trained(seen.case.epochs, seen.case.seed, **{"world_size": seen.world_size, **knobs})


def told(seen: Seen) -> list:
    """The reference's epochs that this run prints."""
    return reference(seen)[seen.case.first :]


def weights(seen: Seen, **knobs) -> list[float]:
    return reference(seen, **knobs)[-1][0]


def a_text(seen: Seen) -> Fault | None:
    return first_mistake("the text of a program", {"return the program as one text": seen["kind"]})


def weight_slips(seen: Seen) -> Iterator[tuple[str, list[float]]]:
    size = seen.world_size
    yield "every epoch has the order of the first; call sampler.set_epoch(epoch)", weights(seen, one_order=True)
    yield f"the batch is {size} times as large; each rank's is {BATCH} // world_size", weights(seen, batch=BATCH * size)
    yield "every rank trains on all rows; give the loader a DistributedSampler", weights(seen, batch=BATCH // size)
    alone = "this is what rank 0 learns from its own rows; call the model that DistributedDataParallel has wrapped"
    yield alone, weights(seen, of_rank=0)


def saved_form(found) -> str:
    if found is None:
        return 'no rank has called torch.save; the file is called "model.pt"'
    if isinstance(found, str):
        state = "replica.module.state_dict(), or model.state_dict()"
        return f"save the state of the model inside, and nothing around it: {state}"
    return ""


def the_weights(what: str, slips: Slips, otherwise: str, inside: str = "") -> Expect:
    """Expect that the last file has the reference's weights, under names that begin with `inside`."""
    return all_of(a_text, once(equals(
        lambda seen, right: f"{what}, {short(right)}", weights, slips, otherwise,
        of=lambda seen: last_saved(seen, inside), tolerance=SAME, form=saved_form,
        shown=lambda found: short(found) if isinstance(found, list) else found,
    )))  # fmt: skip


the_model = the_weights(
    "the weights of one process",
    weight_slips,
    "the ranks together must compute one process's step: the same global batch, in the same order, its mean",
)


def short(weights: list[float]) -> list[float]:
    return [round(each, 4) for each in weights[:3]]


def loss_slips(seen: Seen) -> Iterator[tuple[str, list[float]]]:
    shards = [shards for _, shards, _ in told(seen)]
    rows = sum(map(len, shards[0]))
    own = "this is one rank's loss; all_reduce the sum over the ranks before you divide and print"
    for rank in range(seen.world_size):
        yield own, [of_ranks[rank].mean().item() for of_ranks in shards]
        yield f"{own}, by the rows of all ranks", [of_ranks[rank].sum().item() / rows for of_ranks in shards]
    every = [torch.cat(of_ranks).mean().item() for of_ranks in shards]
    yield "the sums of all ranks are divided by the rows of one", [each * seen.world_size for each in every]


def error_slips(seen: Seen) -> Iterator[tuple[str, list[float]]]:
    shards = [errors for _, _, errors in told(seen)]
    for rank in range(seen.world_size):
        yield (
            "this is the error of one rank's rows; reduce sums and counts",
            [each[rank].mean().item() for each in shards],
        )
    means = [torch.stack([part.mean() for part in each]).mean().item() for each in shards]
    yield "the ranks' means count the same, though one has more rows; reduce sums and counts, divide once", means
    padded = []
    for each in shards:  # DistributedSampler repeats the first rows
        every = torch.stack([part[k] for k in range(len(each[0])) for part in each if k < len(part)])
        more = -len(every) % seen.world_size
        padded.append(torch.cat([every, every[:more]]).mean().item())
    yield (
        "DistributedSampler repeats rows, so that each rank gets as many; take range(rank, len(test), world_size)",
        padded,
    )
    yield "every row is counted on every rank", [torch.cat(each).mean().item() * seen.world_size for each in shards]


def lines_form(found) -> str:
    if found is None:
        return 'keep the words of the line: "epoch 0: loss 0.123456, error 0.123456"'
    return "" if found else "no rank printed a line for an epoch"


def of_first_voice(word: str) -> Callable[[Seen], list[float] | None]:
    """Its numbers in the first lines; more than one voice is another check's matter."""

    def found(seen: Seen) -> list[float] | None:
        numbers = printed(seen, word)
        return numbers and numbers[: seen.case.epochs - seen.case.first]

    return found


def the_printed(word: str, right, slips: Slips) -> Expect:
    """Expect the reference's numbers after this word, line by line."""
    return once(equals(
        lambda seen, right: f"{word} of one process, {[round(each, 6) for each in right]}",
        right,
        slips,
        f"the {word} is a sum over all rows of all ranks, divided by their number",
        of=of_first_voice(word),
        tolerance=PRINTED,
        form=lines_form,
    ))  # fmt: skip


the_loss = the_printed(
    "loss", lambda seen: [torch.cat(shards).mean().item() for _, shards, _ in told(seen)], loss_slips
)
the_error = the_printed(
    "error", lambda seen: [torch.cat(errors).mean().item() for _, _, errors in told(seen)], error_slips
)


def voices(seen: Seen) -> Fault | None:
    """One rank prints, one line for each epoch."""
    by_rank = [(note.get("said") or "").split("\n") for note in seen.everyone]
    speaking = [rank for rank, said in enumerate(by_rank) if any(said)]
    lines = sum(map(bool, sum(by_rank, [])))
    wanted = seen.case.epochs - seen.case.first
    mistakes = {
        "print on one rank only: if dist.get_rank() == 0": len(speaking) > 1 and f"ranks {speaking} print",
        "no rank printed a line for an epoch": not lines and "silence",
        "one line for each epoch, and no other": lines != wanted and f"{lines} lines",
    }
    return first_mistake(f"one rank that prints {wanted} line{'s' * (wanted > 1)}", mistakes)


def writers(name: str, *keys: str) -> Expect:
    """One rank saves after each epoch, with these keys, and the file has the right name in the end."""

    def expect(seen: Seen) -> Fault | None:
        saves = sum((note.get("saved") or [] for note in seen.everyone), [])
        epochs, found = seen.case.epochs - seen.case.first, {*(saves or [()])[-1]}
        saving = [rank for rank, note in enumerate(seen.everyone) if note.get("saved")]
        there = any(name in (note.get("files") or ()) for note in seen.everyone)
        mistakes = {
            "save on one rank only: if dist.get_rank() == 0": len(saving) > 1 and f"ranks {saving} save",
            "no rank has called torch.save": not saving and "no file",
            f'the file is called "{name}"': not there and "files of other names",
            "a run may be stopped after any epoch: save after each": len(saves) != epochs and f"{len(saves)} saves",
            f"the keys {keys} stay": not {*keys} <= found and ", ".join(sorted(found)),
        }
        return first_mistake(f"one rank that saves {name}", mistakes)

    return once(expect)


no_group = nothing("open", "no group when the program has ended", "call dist.destroy_process_group(), on every rank")

CONVERT = exercise(
    "11.1",
    "Convert a program",
    "program",
    30,
    act=act,
    rounds=rounds,
    within=tempfile.TemporaryDirectory,
    checks={
        "model": ("two and three ranks save the weights of one process", 3, the_model, "two three"),
        "loss": ("the printed losses are those of one process", 1, the_loss, "two three"),
        "error": ("each test row is counted once", 1, the_error, "two three"),
        "voice": ("one rank prints", 1, once(voices), "two three"),
        "writer": ("one rank saves", 1, writers("model.pt"), "two three"),
        "end": ("each rank ends its group", 1, all_of(a_text, no_group), "two three"),
    },
    hints={
        r"Default process group has not been initialized": "call dist.init_process_group() before anything of "
        "torch.distributed",
        r"init_process_group.*twice|initialize the default process group twice": "the ranks run the file from the "
        "top once: call init_process_group once, and destroy_process_group at the end",
    },
)
