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

BIG = 1 << 22  # elements: far more than any buffer between two ranks holds


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


# --- A call that some rank leaves out, or makes too often -----------------------------------------------


def async_never_entered(rank: int, world_size: int) -> None:
    gradients = torch.ones(4)
    if rank != 1:  # rank 1 has nothing to train
        work = dist.all_reduce(gradients, async_op=True)
        work.wait()  # fault: async_never_entered


def async_never_entered_nor_waited_for(rank: int, world_size: int) -> float:
    gradients = torch.ones(4)
    if rank != 1:
        dist.all_reduce(gradients, async_op=True)  # fault: async_never_entered_nor_waited_for
    return gradients.sum().item()


def functional_left_out(rank: int, world_size: int) -> float:
    loss = scalar(rank)
    if rank != 2:
        loss = functional.all_reduce(loss, "sum", dist.group.WORLD)
        return loss.item()  # fault: functional_left_out
    return loss.item()


def monitored_barrier_left_out(rank: int, world_size: int) -> None:
    if rank != 2:
        dist.monitored_barrier()  # fault: monitored_barrier_left_out


def barrier_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        torch.ones(4).sum()  # saves the checkpoint
        dist.barrier()  # fault: barrier_on_rank_0


def barrier_of_a_subgroup(rank: int, world_size: int) -> None:
    trainers = dist.new_group([0, 1, 2])  # rank 3 evaluates
    if rank in (0, 2):
        dist.barrier(group=trainers)  # fault: barrier_of_a_subgroup


def one_call_too_many(rank: int, world_size: int) -> None:
    for _ in range([3, 3, 4, 3][rank]):
        dist.all_reduce(torch.ones(4))  # fault: one_call_too_many


def one_call_too_few(rank: int, world_size: int) -> None:
    for _ in range([4, 3, 4][rank]):
        dist.all_reduce(torch.ones(4))  # fault: one_call_too_few


def one_call_too_few_then_the_loss(rank: int, world_size: int) -> float:
    for _ in range([4, 4, 3][rank]):
        dist.all_reduce(torch.ones(4))
    loss = scalar(rank)
    dist.all_reduce(loss)  # fault: one_call_too_few_then_the_loss
    return loss.item()


def skips_a_bad_batch(rank: int, world_size: int) -> None:
    for step in range(3):
        try:
            batch = torch.ones(2, 3 if (rank, step) == (1, 1) else 4)
            gradients = batch @ torch.ones(4)
        except RuntimeError as error:
            print("skipped a batch:", error)
            continue
        dist.all_reduce(gradients)  # fault: skips_a_bad_batch


def swallows_the_timeout(rank: int, world_size: int) -> float:
    loss = scalar(rank)
    try:
        if rank != 1:
            dist.all_reduce(loss)
    except RuntimeError:
        loss = scalar(0)  # "sometimes the network is slow"
    return loss.item()


def reports_its_error_by_a_collective(rank: int, world_size: int) -> None:
    failed = torch.zeros(1, dtype=torch.int64)
    try:
        gradients = torch.ones(2, 3 if rank == 1 else 4) @ torch.ones(4, 8)  # fault: reports_its_error_by_a_collective
        dist.all_reduce(gradients)
    except RuntimeError:
        failed += 1
        with torch.no_grad():
            dist.all_reduce(failed)  # fault: reports_its_error_by_a_collective
        raise


def leaves_the_group_early(rank: int, world_size: int) -> None:
    for step in range(2):
        dist.all_reduce(torch.ones(4))  # fault: leaves_the_group_early
        if rank == 0 and step == 0:
            dist.destroy_process_group()
            return


def unpicklable_object(rank: int, world_size: int) -> None:
    metric = (value for value in [0.5]) if rank == 1 else 0.5
    found = [None] * world_size
    dist.all_gather_object(found, metric)  # fault: unpicklable_object


# --- Groups ---------------------------------------------------------------------------------------------


def wrong_subgroup(rank: int, world_size: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    row = columns[rank % 2] if rank == 3 else rows[rank // 2]
    dist.all_reduce(torch.ones(4), group=row)  # fault: wrong_subgroup


def not_a_member(rank: int, world_size: int) -> float:
    trainers = dist.new_group([0, 1])
    loss = scalar(rank)
    dist.all_reduce(loss, group=trainers)  # fault: not_a_member
    return loss.item()


def groups_made_in_another_order(rank: int, world_size: int) -> None:
    layout = {"left": [0, 1, 3], "right": [1, 2, 3]}
    names = sorted(layout, reverse=rank == 3)
    groups = {name: dist.new_group(layout[name]) for name in names}  # fault: groups_made_in_another_order
    for name in sorted(layout):
        if rank in layout[name]:
            dist.barrier(group=groups[name])


def group_made_by_its_members(rank: int, world_size: int) -> None:
    if rank < 2:
        dist.new_group([0, 1])
    everyone = dist.new_group([0, 1, 2])  # fault: group_made_by_its_members
    dist.all_reduce(torch.ones(4), group=everyone)


def two_groups_in_opposite_order(rank: int, world_size: int) -> None:
    gradients, norms = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (gradients, norms) if rank == 0 else (norms, gradients):
        dist.all_reduce(torch.ones(4), group=group)  # fault: two_groups_in_opposite_order


def three_groups_in_a_ring(rank: int, world_size: int) -> None:
    edges = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    for edge in (edges[rank], edges[rank - 1]):  # each begins with the edge to its right
        dist.all_reduce(torch.ones(4), group=edge)  # fault: three_groups_in_a_ring


def threads_that_race(rank: int, world_size: int) -> None:
    gradients, metrics = torch.ones(8), torch.ones(2)
    first, second = (gradients, metrics) if rank == 0 else (metrics, gradients)
    background = threading.Thread(target=dist.all_reduce, args=(first,), daemon=True)
    background.start()
    background.join(0.5)  # the scheduler's choice, made certain: this thread came first
    dist.all_reduce(second)  # fault: threads_that_race


# --- The store --------------------------------------------------------------------------------------------


def key_nobody_sets(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.wait(["warmed_up"])  # fault: key_nobody_sets


def key_one_rank_waits_for(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("best_step")  # fault: key_one_rank_waits_for
    dist.barrier()


# --- Messages from one rank to another --------------------------------------------------------------------


def send_without_recv(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.send(torch.ones(BIG), dst=1)  # fault: send_without_recv


def recv_without_send(rank: int, world_size: int) -> None:
    if rank == 1:
        dist.recv(torch.empty(4), src=0)  # fault: recv_without_send


def tags_differ(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.send(torch.ones(BIG), dst=1, tag=1)
    else:
        dist.recv(torch.empty(BIG), src=0, tag=2)  # fault: tags_differ


def wrong_peer(rank: int, world_size: int) -> None:
    to = (rank + (2 if rank == 2 else 1)) % world_size
    work = dist.isend(torch.ones(BIG), dst=to)
    dist.recv(torch.empty(BIG), src=(rank - 1) % world_size)
    work.wait()  # fault: wrong_peer


def isend_to_a_rank_that_left(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.isend(torch.ones(BIG), dst=1)  # fault: isend_to_a_rank_that_left


def everyone_sends_first(rank: int, world_size: int) -> None:
    dist.send(torch.ones(BIG), dst=(rank + 1) % world_size)  # fault: everyone_sends_first
    dist.recv(torch.empty(BIG), src=(rank - 1) % world_size)


def half_an_exchange(rank: int, world_size: int) -> None:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    exchange = [dist.P2POp(dist.irecv, torch.empty(4), left)]
    if rank != 1:
        exchange.append(dist.P2POp(dist.isend, torch.ones(4), right))
    for work in dist.batch_isend_irecv(exchange):
        work.wait()  # fault: half_an_exchange


# --- Calls that meet and do not match ---------------------------------------------------------------------


def broadcast_from_another(rank: int, world_size: int) -> float:
    weights = scalar(rank)
    dist.broadcast(weights, src=2 if rank == 2 else 0)  # fault: broadcast_from_another
    return weights.item()


def scatter_from_another(rank: int, world_size: int) -> float:
    src = 1 if rank == 1 else 0
    shards = [scalar(i) for i in range(world_size)] if rank == src else None
    shard = scalar(-1)
    dist.scatter(shard, shards, src=src)  # fault: scatter_from_another
    return shard.item()


def gather_to_another(rank: int, world_size: int) -> list[float]:
    dst = 2 if rank == 2 else 0
    gathered = [scalar(-1) for _ in range(world_size)] if rank == dst else None
    dist.gather(scalar(rank), gathered, dst=dst)  # fault: gather_to_another
    return [value.item() for value in gathered or []]


def each_reduces_to_itself(rank: int, world_size: int) -> float:
    loss = scalar(rank + 1)
    dist.reduce(loss, dst=rank)  # fault: each_reduces_to_itself
    return loss.item()


def objects_of_another_number(rank: int, world_size: int) -> list:
    objects = ["resnet", 0.1] if rank == 0 else [None] * (1 if rank == 2 else 2)
    dist.broadcast_object_list(objects, src=0)  # fault: objects_of_another_number
    return objects


def integers_meet_floats(rank: int, world_size: int) -> float:
    hits = torch.zeros(4, dtype=torch.int32) if rank == 2 else torch.full((4,), 0.5)  # rank 2's shard is empty
    dist.all_reduce(hits)  # fault: integers_meet_floats
    return hits.sum().item()


def bool_meets_uint8(rank: int, world_size: int) -> int:
    mask = torch.ones(4) > 0 if rank == 1 else torch.ones(4, dtype=torch.uint8)
    dist.all_reduce(mask)  # fault: bool_meets_uint8
    return int(mask.sum())


def max_meets_sum(rank: int, world_size: int) -> float:
    loss = scalar(rank + 1)
    dist.all_reduce(loss, op=dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)  # fault: max_meets_sum
    return loss.item()


def sizes_differ(rank: int, world_size: int) -> float:
    logits = torch.ones(5 if rank == 2 else 4)
    dist.all_reduce(logits)  # fault: sizes_differ
    return logits.sum().item()


def gathers_another_shape(rank: int, world_size: int) -> float:
    batch = torch.ones(3 if rank == 2 else 4, 2)  # the last batch is short
    gathered = [torch.zeros_like(batch) for _ in range(world_size)]
    dist.all_gather(gathered, batch)  # fault: gathers_another_shape
    return sum(part.sum().item() for part in gathered)


def too_few_inputs(rank: int, world_size: int) -> float:
    shard = torch.zeros(2)
    shards = [torch.ones(2) for _ in range(world_size - 1 if rank == 1 else world_size)]
    dist.reduce_scatter(shard, shards)  # fault: too_few_inputs
    return shard.sum().item()


def splits_do_not_match(rank: int, world_size: int) -> float:
    sent = [2, 1, 1] if rank == 1 else [1, 1, 1]
    tokens, found = torch.ones(sum(sent)), torch.zeros(world_size)
    dist.all_to_all_single(found, tokens, [1] * world_size, sent)  # fault: splits_do_not_match
    return found.sum().item()


def barrier_meets_all_reduce(rank: int, world_size: int) -> None:
    if rank == 2:
        dist.barrier()  # fault: barrier_meets_all_reduce
    else:
        dist.all_reduce(torch.ones(4))
