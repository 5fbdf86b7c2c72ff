"""What does the launcher say when each rank works, but they do not agree on what they say to each other?

Programs with one bug each, as people write them: a call that some rank leaves out or makes once too often, two
groups in opposite order, a message without a receiver, calls that meet and do not match. Some hang and some
return wrong numbers without an error. The marks are those of `faults_on_ranks`.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.launcher.fault_table import fault

BIG = 1 << 22  # elements: far more than any buffer between two ranks holds


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


# --- A call that some rank leaves out, or makes too often -----------------------------------------------


@fault(3, {1}, "all_reduce")
def async_never_entered(rank: int, world_size: int) -> None:
    """Rank 1 never enters what ranks 0 and 2 wait for."""
    gradients = torch.ones(4)
    if rank != 1:  # rank 1 has nothing to train
        work = dist.all_reduce(gradients, async_op=True)
        work.wait()  # fault: async_never_entered


@fault(3, {1}, "all_reduce")
def async_never_entered_nor_waited_for(rank: int, world_size: int) -> float:
    """Rank 1 never enters it, and ranks 0 and 2 return without waiting, with numbers that were never summed."""
    gradients = torch.ones(4)
    if rank != 1:
        dist.all_reduce(gradients, async_op=True)  # fault: async_never_entered_nor_waited_for
    return gradients.sum().item()


@fault(3, {2}, "all_reduce")
def functional_left_out(rank: int, world_size: int) -> float:
    """Rank 2 leaves out a functional all_reduce."""
    loss = scalar(rank)
    if rank != 2:
        loss = functional.all_reduce(loss, "sum", dist.group.WORLD)
        return loss.item()  # fault: functional_left_out
    return loss.item()


@fault(3, {2}, "(?i)monitored_?barrier")
def monitored_barrier_left_out(rank: int, world_size: int) -> None:
    """Rank 2 leaves out the barrier."""
    if rank != 2:
        dist.monitored_barrier()  # fault: monitored_barrier_left_out


@fault(3, {0}, "barrier", cannot_tell=True)
def barrier_on_rank_0(rank: int, world_size: int) -> None:
    """The barrier is inside `if rank == 0`: two of three ranks rightly never come."""
    if rank == 0:
        torch.ones(4).sum()  # saves the checkpoint
        dist.barrier()  # fault: barrier_on_rank_0


@fault(4, {1}, "barrier", code="absent", says=("rank 1 never entered barrier #1 on subgroup",))
def barrier_of_a_subgroup(rank: int, world_size: int) -> None:
    """Rank 1 is a member and leaves the barrier out; 3 is not one."""
    trainers = dist.new_group([0, 1, 2])  # rank 3 evaluates
    if rank in (0, 2):
        dist.barrier(group=trainers)  # fault: barrier_of_a_subgroup


@fault(4, {2}, "all_reduce")
def one_call_too_many(rank: int, world_size: int) -> None:
    """Rank 2's loop has one step more."""
    for _ in range([3, 3, 4, 3][rank]):
        dist.all_reduce(torch.ones(4))  # fault: one_call_too_many


@fault(3, {1}, "all_reduce")
def one_call_too_few(rank: int, world_size: int) -> None:
    """Rank 1's loop has one step fewer."""
    for _ in range([4, 3, 4][rank]):
        dist.all_reduce(torch.ones(4))  # fault: one_call_too_few


@fault(3, {2}, "all_reduce")
def one_call_too_few_then_the_loss(rank: int, world_size: int) -> float:
    """Rank 2's loop is a step short, so its loss meets the gradients of the rest."""
    for _ in range([4, 4, 3][rank]):
        dist.all_reduce(torch.ones(4))
    loss = scalar(rank)
    dist.all_reduce(loss)  # fault: one_call_too_few_then_the_loss
    return loss.item()


@fault(3, {1}, "all_reduce")
def skips_a_bad_batch(rank: int, world_size: int) -> None:
    """Rank 1 catches an error and leaves out that step's call."""
    for step in range(3):
        try:
            batch = torch.ones(2, 3 if (rank, step) == (1, 1) else 4)
            gradients = batch @ torch.ones(4)
        except RuntimeError as error:
            print("skipped a batch:", error)
            continue
        dist.all_reduce(gradients)  # fault: skips_a_bad_batch


@fault(3, {1}, "all_reduce")
def swallows_the_timeout(rank: int, world_size: int) -> float:
    """Rank 1 leaves the call out, and the ranks that time out catch the error and return a made-up loss."""
    loss = scalar(rank)
    try:
        if rank != 1:
            dist.all_reduce(loss)
    except RuntimeError:
        loss = scalar(0)  # "sometimes the network is slow"
    return loss.item()


@fault(3, {1}, "all_reduce")
def reports_its_error_by_a_collective(rank: int, world_size: int) -> None:
    """Rank 1's except clause calls a collective that the rest, without an error, never call. Where rank 1 comes
    first, the rest are told of the disagreement, an error too; all report it, and what rank 1 raises is its own.
    """
    failed = torch.zeros(1, dtype=torch.int64)
    try:
        gradients = torch.ones(2, 3 if rank == 1 else 4) @ torch.ones(4, 8)  # fault: reports_its_error_by_a_collective
        dist.all_reduce(gradients)
    except RuntimeError:
        failed += 1
        with torch.no_grad():
            dist.all_reduce(failed)  # fault: reports_its_error_by_a_collective
        raise


@fault(
    3,
    {0},
    "all_reduce",
    code="absent",
    says=("ended a process group: faults_talking_on_ranks.py, line", "call dist.barrier() before it, on every rank"),
)
def leaves_the_group_early(rank: int, world_size: int) -> None:
    """Rank 0 destroys its group after the first of two steps."""
    for step in range(2):
        dist.all_reduce(torch.ones(4))  # fault: leaves_the_group_early
        if rank == 0 and step == 0:
            dist.destroy_process_group()
            return


@fault(3, {1}, "pickle")
def unpicklable_object(rank: int, world_size: int) -> None:
    """Rank 1 gathers a generator, which cannot be pickled."""
    metric = (value for value in [0.5]) if rank == 1 else 0.5
    found = [None] * world_size
    dist.all_gather_object(found, metric)  # fault: unpicklable_object


# --- Groups ---------------------------------------------------------------------------------------------


@fault(4, {3}, "all_reduce", cannot_tell=True)
def wrong_subgroup(rank: int, world_size: int) -> None:
    """Rank 3 uses its column for its row, so it waits for rank 1, which rightly never comes, and 2 waits for 3."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row = columns[rank % 2] if rank == 3 else rows[rank // 2]
    dist.all_reduce(torch.ones(4), group=row)  # fault: wrong_subgroup


@fault(3, {2}, "all_reduce")
def not_a_member(rank: int, world_size: int) -> float:
    """Rank 2 is not in the group, so its call does nothing."""
    trainers = dist.new_group([0, 1])
    loss = scalar(rank)
    dist.all_reduce(loss, group=trainers)  # fault: not_a_member
    return loss.item()


@fault(4, {3}, "barrier|new_group", cannot_tell=True)
def groups_made_in_another_order(rank: int, world_size: int) -> None:
    """Rank 3 makes the groups in another order, so its left is the right of the rest."""
    layout = {"left": [0, 1, 3], "right": [1, 2, 3]}
    names = sorted(layout, reverse=rank == 3)
    groups = {name: dist.new_group(layout[name]) for name in names}  # fault: groups_made_in_another_order
    for name in sorted(layout):
        if rank in layout[name]:
            dist.barrier(group=groups[name])


@fault(3, {2}, "new_group|all_reduce", cannot_tell=True)
def group_made_by_its_members(rank: int, world_size: int) -> None:
    """Rank 2 leaves out a new_group that every rank must call, so later groups do not meet."""
    if rank < 2:
        dist.new_group([0, 1])
    everyone = dist.new_group([0, 1, 2])  # fault: group_made_by_its_members
    dist.all_reduce(torch.ones(4), group=everyone)


@fault(2, set(), "all_reduce", cannot_tell=True)
def two_groups_in_opposite_order(rank: int, world_size: int) -> None:
    """Each rank waits for the other in another group; either order would do."""
    gradients, norms = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (gradients, norms) if rank == 0 else (norms, gradients):
        dist.all_reduce(torch.ones(4), group=group)  # fault: two_groups_in_opposite_order


@fault(3, set(), "all_reduce", cannot_tell=True)
def three_groups_in_a_ring(rank: int, world_size: int) -> None:
    """Each rank waits for the next, all round the ring."""
    edges = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for edge in (edges[rank], edges[rank - 1]):  # each begins with the edge to its right
        dist.all_reduce(torch.ones(4), group=edge)  # fault: three_groups_in_a_ring


@fault(2, set(), "all_reduce", cannot_tell=True)
def threads_that_race(rank: int, world_size: int) -> None:
    """Two threads of each rank use one group in whatever order they come."""
    gradients, metrics = torch.ones(8), torch.ones(2)
    first, second = (gradients, metrics) if rank == 0 else (metrics, gradients)
    background = threading.Thread(target=dist.all_reduce, args=(first,), daemon=True)
    background.start()
    background.join(0.5)  # the scheduler's choice, made certain: this thread came first
    dist.all_reduce(second)  # fault: threads_that_race


# --- The store --------------------------------------------------------------------------------------------


@fault(3, set(), "(?i)store", cannot_tell=True)
def key_nobody_sets(rank: int, world_size: int) -> None:
    """Every rank waits for a key that none sets."""
    store = dist.distributed_c10d._get_default_store()
    store.wait(["warmed_up"])  # fault: key_nobody_sets


@fault(3, {1}, "(?i)store")
def key_one_rank_waits_for(rank: int, world_size: int) -> None:
    """Rank 1 alone reads a key that none sets."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("best_step")  # fault: key_one_rank_waits_for
    dist.barrier()


# --- Messages from one rank to another --------------------------------------------------------------------


@fault(3, {0, 1}, "send", cannot_tell=True)
def send_without_recv(rank: int, world_size: int) -> None:
    """Rank 0 sends and rank 1 does not receive: one call too many or one too few."""
    if rank == 0:
        dist.send(torch.ones(BIG), dst=1)  # fault: send_without_recv


@fault(3, {0, 1}, "recv", cannot_tell=True)
def recv_without_send(rank: int, world_size: int) -> None:
    """Rank 1 receives and rank 0 does not send: one call too many or one too few."""
    if rank == 1:
        dist.recv(torch.empty(4), src=0)  # fault: recv_without_send


@fault(2, {0, 1}, "recv|tag", cannot_tell=True)
def tags_differ(rank: int, world_size: int) -> None:
    """One sends with tag 1, one receives with tag 2."""
    if rank == 0:
        dist.send(torch.ones(BIG), dst=1, tag=1)
    else:
        dist.recv(torch.empty(BIG), src=0, tag=2)  # fault: tags_differ


@fault(4, {2}, "send|recv")
def wrong_peer(rank: int, world_size: int) -> None:
    """Rank 2 sends to rank 0, and rank 3 waits for its message."""
    to = (rank + (2 if rank == 2 else 1)) % world_size
    work = dist.isend(torch.ones(BIG), dst=to)
    dist.recv(torch.empty(BIG), src=(rank - 1) % world_size)
    work.wait()  # fault: wrong_peer


@fault(3, {0, 1}, "send", cannot_tell=True)
def isend_to_a_rank_that_left(rank: int, world_size: int) -> None:
    """Rank 0 does not wait for its send, and rank 1 never receives it: the message is lost."""
    if rank == 0:
        dist.isend(torch.ones(BIG), dst=1)  # fault: isend_to_a_rank_that_left


@fault(3, set(), "send", cannot_tell=True)
def everyone_sends_first(rank: int, world_size: int) -> None:
    """A send returns once it is received, and every rank would receive after its send."""
    dist.send(torch.ones(BIG), dst=(rank + 1) % world_size)  # fault: everyone_sends_first
    dist.recv(torch.empty(BIG), src=(rank - 1) % world_size)


@fault(3, {1}, r"recv|\.wait\(")
def half_an_exchange(rank: int, world_size: int) -> None:
    """Rank 1 receives and does not send, so rank 2 waits for it."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    exchange = [dist.P2POp(dist.irecv, torch.empty(4), left)]
    if rank != 1:
        exchange.append(dist.P2POp(dist.isend, torch.ones(4), right))
    for work in dist.batch_isend_irecv(exchange):
        work.wait()  # fault: half_an_exchange


# --- Calls that meet and do not match ---------------------------------------------------------------------


@fault(3, {2}, "broadcast")
def broadcast_from_another(rank: int, world_size: int) -> float:
    """Rank 2 names itself as the source."""
    weights = scalar(rank)
    dist.broadcast(weights, src=2 if rank == 2 else 0)  # fault: broadcast_from_another
    return weights.item()


@fault(3, {1}, "scatter")
def scatter_from_another(rank: int, world_size: int) -> float:
    """Rank 1 names itself as the source."""
    src = 1 if rank == 1 else 0
    shards = [scalar(i) for i in range(world_size)] if rank == src else None
    shard = scalar(-1)
    dist.scatter(shard, shards, src=src)  # fault: scatter_from_another
    return shard.item()


@fault(3, {2}, "gather")
def gather_to_another(rank: int, world_size: int) -> list[float]:
    """Rank 2 names itself as the destination."""
    dst = 2 if rank == 2 else 0
    gathered = [scalar(-1) for _ in range(world_size)] if rank == dst else None
    dist.gather(scalar(rank), gathered, dst=dst)  # fault: gather_to_another
    return [value.item() for value in gathered or []]


@fault(2, {0, 1}, "reduce", cannot_tell=True)
def each_reduces_to_itself(rank: int, world_size: int) -> float:
    """Each rank names itself as the destination."""
    loss = scalar(rank + 1)
    dist.reduce(loss, dst=rank)  # fault: each_reduces_to_itself
    return loss.item()


@fault(3, {2}, "broadcast")
def objects_of_another_number(rank: int, world_size: int) -> list:
    """Rank 2 expects one object of two."""
    objects = ["resnet", 0.1] if rank == 0 else [None] * (1 if rank == 2 else 2)
    dist.broadcast_object_list(objects, src=0)  # fault: objects_of_another_number
    return objects


@fault(3, {2}, "all_reduce")
def integers_meet_floats(rank: int, world_size: int) -> float:
    """Rank 2's counts are int32, whose bits are added as floats."""
    hits = torch.zeros(4, dtype=torch.int32) if rank == 2 else torch.full((4,), 0.5)  # rank 2's shard is empty
    dist.all_reduce(hits)  # fault: integers_meet_floats
    return hits.sum().item()


@fault(3, {1}, "all_reduce|(?i:bool|scalar type)")
def bool_meets_uint8(rank: int, world_size: int) -> int:
    """Rank 1's mask is bool, not uint8."""
    mask = torch.ones(4) > 0 if rank == 1 else torch.ones(4, dtype=torch.uint8)
    dist.all_reduce(mask)  # fault: bool_meets_uint8
    return int(mask.sum())


@fault(3, {2}, "all_reduce")
def max_meets_sum(rank: int, world_size: int) -> float:
    """Rank 2 takes the largest loss, the rest the sum."""
    loss = scalar(rank + 1)
    dist.all_reduce(loss, op=dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)  # fault: max_meets_sum
    return loss.item()


@fault(
    3,
    {2},
    "all_reduce",
    says=("rank 1 called all_reduce #1 (float32 [4], 16 B)", "rank 2 called all_reduce #1 (float32 [5], 20 B)"),
)
def sizes_differ(rank: int, world_size: int) -> float:
    """Rank 2's tensor has one element more."""
    logits = torch.ones(5 if rank == 2 else 4)
    dist.all_reduce(logits)  # fault: sizes_differ
    return logits.sum().item()


@fault(3, {2}, "all_gather")
def gathers_another_shape(rank: int, world_size: int) -> float:
    """Rank 2's last batch is short."""
    batch = torch.ones(3 if rank == 2 else 4, 2)  # the last batch is short
    gathered = [torch.zeros_like(batch) for _ in range(world_size)]
    dist.all_gather(gathered, batch)  # fault: gathers_another_shape
    return sum(part.sum().item() for part in gathered)


@fault(3, {1}, "reduce_scatter|input")
def too_few_inputs(rank: int, world_size: int) -> float:
    """Rank 1 has a shard too few."""
    shard = torch.zeros(2)
    shards = [torch.ones(2) for _ in range(world_size - 1 if rank == 1 else world_size)]
    dist.reduce_scatter(shard, shards)  # fault: too_few_inputs
    return shard.sum().item()


@fault(3, {1}, "(?i)all_?to_?all")
def splits_do_not_match(rank: int, world_size: int) -> float:
    """Rank 1 sends two tokens where one is expected."""
    sent = [2, 1, 1] if rank == 1 else [1, 1, 1]
    tokens, found = torch.ones(sum(sent)), torch.zeros(world_size)
    dist.all_to_all_single(found, tokens, [1] * world_size, sent)  # fault: splits_do_not_match
    return found.sum().item()


@fault(3, {2}, "all_reduce", says=("ranks disagree about collective #1: rank 0 called all_reduce #1",))
def barrier_meets_all_reduce(rank: int, world_size: int) -> None:
    """Rank 2 is in a barrier, the rest in an all_reduce."""
    if rank == 2:
        dist.barrier()  # fault: barrier_meets_all_reduce
    else:
        dist.all_reduce(torch.ones(4))
