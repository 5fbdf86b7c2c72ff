"""Does a wrapper do in a random program what torch's DistributedDataParallel does? What runs on each rank.

A rank plays the program twice, first with torch's wrapper and then with ours, each time on a net, inputs and random
numbers made from the same seeds. After every operation it keeps gradients, parameters, buffers and outputs, and says in
the end what first differed.
Left out on purpose: how memory lies, such as strides of gradients, and the text of errors.
Read next: `fuzz_player.py`, the operations; `fuzz_search.py`, which draws programs and makes failing ones smaller.
"""

from __future__ import annotations

import gc
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.fuzz_compare import Found, Record, first_difference
from tests.parallel.fuzz_player import Player
from tests.parallel.fuzz_programs import Case


def play(wrapper: type, case: Case, rank: int) -> list[Record]:
    """Carry the program out until its end or its first error, and keep what each operation left behind.

    Collective: those of the program, and one barrier after each backward pass.
    """
    player, records, complete, spoilt = Player(wrapper, case, rank), [], True, False
    for index, op in enumerate(case.program):
        # Between the two halves of a reduction, gradients depend on how buckets are cut; so does what is made of them.
        spoilt |= not complete and op.name not in ("forward", "backward")
        try:
            player.perform(index, op)
            if op.name == "backward":
                dist.group.WORLD.barrier().wait()  # after it, no all_reduce that nobody waited for is still writing
        except Exception as error:
            return [*records, Record(error=f"{type(error).__name__}: {error}")]
        complete = wrapper is not DistributedDataParallel or player.reduction_ended()
        records.append(Record("", complete and not spoilt, player.state()))
    return records


def compare(rank: int, world_size: int, case: Case, ours: type) -> Found:
    """Play `case` with torch's wrapper and with `ours`; say what first differed."""
    torch.set_num_threads(1)  # tensors are tiny
    gc.freeze()  # so that the programs that collect garbage do not look through all of torch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = play(DistributedDataParallel, case, rank)
        mine = play(ours, case, rank)
    kind, text = first_difference(case, theirs, mine)
    compared = sum(record.complete and not record.error for record in theirs)
    return Found(kind, text, theirs[-1].error, len(theirs), compared)


def play_alone(rank: int, world_size: int, case: Case) -> str:
    """Play `case` with torch's wrapper only; its error, if it ended with one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return play(DistributedDataParallel, case, rank)[-1].error
