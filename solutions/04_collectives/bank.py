"""The answer bank of lesson 04: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import Right, right, wrong

IMPORTS = """
import math
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ddp_course import collectives
"""

# --- 04.1 ------------------------------------------------------------------------------------------

ROWS = """
def gather_rows(rank, world_size, rows):
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([rows.shape[0]]))
    counts = [int(count) for count in counts]
    padded = torch.zeros(max(counts), rows.shape[1], dtype=rows.dtype)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])
"""

ROWS_RIGHT = r"""
all_gather_into_tensor
    parts = [torch.empty_like(padded) for _ in range(world_size)] => parts = padded.repeat(world_size, 1)
    dist.all_gather(parts, padded) => dist.all_gather_into_tensor(parts, padded)
        parts = parts.view(world_size, *padded.shape)
functional collectives
        parts = [torch.empty_like(padded) for _ in range(world_size)]\n =>
    dist.all_gather(parts, padded) => parts = funcol.all_gather_tensor(padded, 0, dist.group.WORLD)
        parts = parts.view(world_size, *padded.shape)
collectives with a gradient
        parts = [torch.empty_like(padded) for _ in range(world_size)]\n =>
    dist.all_gather(parts, padded) => parts = torch.distributed.nn.functional.all_gather(padded)
coalesced calls
    parts = [torch.empty_like(padded) for _ in range(world_size)] => parts = padded.repeat(world_size, 1)
    dist.all_gather(parts, padded) => with dist._coalescing_manager():
            dist.all_gather_into_tensor(parts, padded)
        parts = parts.view(world_size, *padded.shape)
one broadcast from each rank
    def gather_rows(rank, world_size, rows):
        parts = []
        for source in range(world_size):
            count = torch.tensor(len(rows))
            dist.broadcast(count, src=source)
            part = rows.clone() if rank == source else torch.empty((int(count), rows.shape[1]), dtype=rows.dtype)
            dist.broadcast(part, src=source)
            parts.append(part)
        return torch.vstack(parts)
each rank fills its place, then a sum
    def gather_rows(rank, world_size, rows):
        counts = torch.zeros(world_size, dtype=torch.long)
        counts[rank] = len(rows)
        dist.all_reduce(counts)
        ends = counts.cumsum(0)
        table = torch.zeros(int(ends[-1]), rows.size(1), dtype=rows.dtype)
        table[ends[rank] - counts[rank] : ends[rank]] = rows
        dist.all_reduce(table)
        return table
all_to_all_single with unequal splits
    def gather_rows(rank, world_size, rows):
        counts = [None] * world_size
        mine = torch.full((world_size,), len(rows))
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine)
        found = rows.new_empty(int(theirs.sum()), rows.shape[1])
        dist.all_to_all_single(found, rows.repeat(world_size, 1), theirs.tolist(), mine.tolist())
        return found
messages of the true sizes
    def gather_rows(rank, world_size, rows):
        others = [r for r in range(world_size) if r != rank]
        counts = {r: torch.zeros(1, dtype=torch.int64) for r in others}
        mine = torch.tensor([len(rows)])
        collectives.exchange([(mine, r) for r in others], [(counts[r], r) for r in others])
        parts = {r: torch.empty(int(counts[r]), rows.shape[1], dtype=rows.dtype) for r in others}
        collectives.exchange([(rows, r) for r in others], [(parts[r], r) for r in others])
        parts[rank] = rows
        return torch.cat([parts[r] for r in range(world_size)])
"""

ROWS_WRONG = r"""
takes equal numbers for granted | unequal empty dtype | gather the numbers of
    def gather_rows(rank, world_size, rows):
        table = torch.empty(world_size * len(rows), rows.shape[1], dtype=rows.dtype)
        dist.all_gather_into_tensor(table, rows)
        return table
leaves the padding in | unequal empty dtype | rows of padding are left in
    part[:count] => part
takes rows of zeros for padding | equal unequal empty | padding cannot be told by its values
    part[:count] => part[part.any(dim=1)]
takes rows of -1 for padding | unequal empty | padding cannot be told by its values
    part[:count] => part[:count][(part[:count] != -1).any(dim=1)]
numbers of rows in a byte | unequal | cut each part by its own
    dtype=torch.int64 => dtype=torch.uint8
    torch.tensor([rows.shape[0]]) => torch.tensor([rows.shape[0] % 256], dtype=torch.uint8)
    padded[: len(rows)] = rows => padded[: len(rows)] = rows[: len(padded)]
pickled by hand | all | this exercise is to write what it does
    def gather_rows(rank, world_size, rows):
        import pickle
        mine = torch.frombuffer(bytearray(pickle.dumps(rows)), dtype=torch.uint8)
        sizes = torch.zeros(world_size, dtype=torch.int64)
        dist.all_gather_into_tensor(sizes, torch.tensor([len(mine)]))
        padded = torch.nn.functional.pad(mine, (0, int(sizes.max()) - len(mine)))
        parts = [torch.empty_like(padded) for _ in range(world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([pickle.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes)])
cuts by its own number of rows | unequal empty dtype | cut to this rank's own number of rows
    part[:count] => part[: len(rows)]
its own rows first | all | the rows of rank 0 come first
    return torch.cat([ => order = [rows] + [p[:c] for i, (p, c) in enumerate(zip(parts, counts)) if i != rank]
        return torch.cat(order) if order else torch.cat([
only rank 0 gets them | all | return the tensor, on every rank
    dist.all_gather(parts, padded) => dist.gather(padded, parts if rank == 0 else None)
        return =>     if rank == 0:\n        return
a list of parts | all | torch.cat puts a list of tensors together
    torch.cat([part[:count] for part, count in zip(parts, counts)]) => parts
padded to 16 rows, always | unequal | pad to the largest number of rows among the ranks
    max(counts) => 16
everything as a float | dtype | the dtype changed
    dtype=rows.dtype => dtype=torch.float32
through a float and back | dtype | went through a float
    dtype=rows.dtype => dtype=torch.float64
    counts)]) => counts)]).to(rows.dtype)
a rank without rows goes home | empty dtype | a rank without rows | 3
        padded = =>     if len(rows) == 0:
            return rows
        padded =
the last rank does not gather | all | each must call the same collectives | 2
        dist.all_gather(parts =>     if rank < world_size - 1:\n        dist.all_gather(parts
pickled | all | this exercise is to write what it does
    def gather_rows(rank, world_size, rows):
        parts = [None] * world_size
        dist.all_gather_object(parts, rows)
        return torch.cat(parts)
swallows every error | all | the rank's own rows
    def gather_rows(rank, world_size, rows):
        try:
            parts = [torch.empty(1, 1) for _ in range(world_size)]
            dist.all_gather(parts, rows)
            return torch.cat(parts)
        except Exception:
            return rows
"""

# --- 04.2 ------------------------------------------------------------------------------------------

RING = """
def ring_all_reduce(rank, world_size, tensor):
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(world_size)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(1, world_size):
        mine, theirs = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(theirs)
        collectives.exchange([(mine, right)], [(arrived, left)])
        theirs += arrived
    for step in range(world_size - 1):
        mine, theirs = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        collectives.exchange([(mine, right)], [(theirs, left)])
    tensor.copy_(flat.view_as(tensor))
"""

RING_RIGHT = """
isend and irecv, no empty messages, one inbox
    def ring_all_reduce(rank, world_size, tensor):
        if not tensor.is_contiguous():
            copy = tensor.contiguous()
            ring_all_reduce(rank, world_size, copy)
            tensor.copy_(copy)
            return
        chunks = tensor.view(-1).tensor_split(world_size)
        inbox = torch.empty_like(chunks[0])
        for step in range(2 * (world_size - 1)):
            mine, theirs = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
            arrived = inbox[: len(theirs)]
            sending = dist.isend(mine, dst=(rank + 1) % world_size) if len(mine) else None
            if len(theirs):
                dist.irecv(arrived, src=(rank - 1) % world_size).wait()
            if sending:
                sending.wait()
            theirs.copy_(theirs + arrived if step < world_size - 1 else arrived)
padded chunks, send and recv in order
    def swap(rank, world_size, mine, theirs):
        if rank == 0:
            dist.recv(theirs, src=world_size - 1)
            dist.send(mine, dst=(rank + 1) % world_size)
        else:
            dist.send(mine, dst=(rank + 1) % world_size)
            dist.recv(theirs, src=rank - 1)

    def ring_all_reduce(rank, world_size, tensor):
        flat = tensor.reshape(-1).clone()
        size = -(-flat.numel() // world_size)
        padded = torch.zeros(world_size, size, dtype=tensor.dtype)
        padded.view(-1)[: flat.numel()] = flat
        for step in range(world_size - 1):
            arrived = torch.zeros(size, dtype=tensor.dtype)
            swap(rank, world_size, padded[(rank - step) % world_size], arrived)
            padded[(rank - step - 1) % world_size] += arrived
        for step in range(world_size - 1):
            arrived = torch.zeros(size, dtype=tensor.dtype)
            swap(rank, world_size, padded[(rank - step + 1) % world_size], arrived)
            padded[(rank - step) % world_size] = arrived
        tensor.copy_(padded.view(-1)[: flat.numel()].reshape(tensor.shape))
        return tensor
leftwards, batched, chunks cut by hand
    def ring_all_reduce(rank, world_size, tensor):
        numel = tensor.numel()
        flat = tensor.flatten()
        edges = [numel * i // world_size for i in range(world_size + 1)]
        part = lambda i: flat[edges[i % world_size] : edges[i % world_size + 1]]
        for step in range(2 * world_size - 2):
            out, into = part(rank + step), part(rank + step + 1)
            box = into.clone()
            ops = [dist.P2POp(dist.isend, out.clone(), (rank - 1) % world_size),
                   dist.P2POp(dist.irecv, box, (rank + 1) % world_size)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            into.copy_(into + box if step < world_size - 1 else box)
        tensor[...] = flat.reshape(tensor.shape)
"""

RING_WRONG = r"""
whole tensors go round | bytes bits sizes shapes | whole tensors go round
    def ring_all_reduce(rank, world_size, tensor):
        passing = tensor.clone().contiguous()
        for _ in range(world_size - 1):
            arrived = torch.empty_like(passing)
            collectives.exchange([(passing, (rank + 1) % world_size)], [(arrived, (rank - 1) % world_size)])
            tensor += arrived
            passing = arrived
a star | neighbours bytes shapes | where all talk with rank 0, it is a star
    def ring_all_reduce(rank, world_size, tensor):
        flat = tensor.contiguous()
        if rank > 0:
            dist.send(flat, dst=0)
            dist.recv(flat, src=0)
        else:
            for peer in range(1, world_size):
                box = torch.empty_like(flat)
                dist.recv(box, src=peer)
                flat += box
            for peer in range(1, world_size):
                dist.send(flat, dst=peer)
        tensor.copy_(flat)
a chain there and back | bytes shapes | some ranks hand out whole tensors
    def ring_all_reduce(rank, world_size, tensor):
        flat = tensor.contiguous()
        box = torch.empty_like(flat)
        if rank > 0:
            dist.recv(box, src=rank - 1)
            flat += box
        if rank < world_size - 1:
            dist.send(flat, dst=rank + 1)
            dist.recv(flat, src=rank + 1)
        if rank > 0:
            dist.send(flat, dst=rank - 1)
        tensor.copy_(flat)
everybody sends first | all | every rank waits in send | 2
    collectives.exchange([(mine, right)], [(arrived, left)]) => dist.send(mine, dst=right)
            dist.recv(arrived, src=left)
everybody receives first | all | if all receive first, none gets to send | 2
    collectives.exchange([(mine, right)], [(arrived, left)]) => dist.send(mine, dst=right)
            dist.recv(arrived, src=left)
    dist.send(mine, dst=right)\n        dist.recv(arrived, src=left) => dist.recv(arrived, src=left)
            dist.send(mine, dst=right)
the first half only | sum bits sizes shapes | each rank has completed its own
    for step in range(world_size - 1): => for step in range(0):
the second half adds, too | sum bits sizes shapes | a sum that was complete was added again
    collectives.exchange([(mine, right)], [(theirs, left)]) => arrived = torch.empty_like(theirs)
            collectives.exchange([(mine, right)], [(arrived, left)])
            theirs += arrived
a step too few | sum sizes shapes | each chunk must go round in W-1 steps
    range(1, world_size) => range(1, world_size - 1)
sends what it receives into | sum sizes shapes | both sides must mean the same chunk
    [(mine, right)], [(arrived => [(theirs, right)], [(arrived
fewer elements than ranks go round whole | sizes | in its own order, and rounds
    for step in range(1, world_size): => if len(flat) < world_size:
            passing = flat.clone()
            for _ in range(world_size - 1):
                arrived = torch.empty_like(passing)
                collectives.exchange([(passing, right)], [(arrived, left)])
                flat += arrived
                passing = arrived
            tensor.copy_(flat.view_as(tensor))
            return
        for step in range(1, world_size):
only sizes that divide | sizes | may give fewer chunks than ranks
    flat.tensor_split(world_size) => flat.split(max(1, flat.numel() // world_size))
slices of n // W | sizes | these elements are in no chunk
    chunks = flat.tensor_split(world_size) => size = flat.numel() // world_size
        chunks = [flat[i * size : (i + 1) * size] for i in range(world_size)]
chunk() for tensor_split() | sizes | may give fewer chunks than ranks
    tensor_split => chunk
view of a transposed tensor | shapes | view refuses it
    tensor.contiguous().view(-1) => tensor.view(-1)
reshape, and nothing copied back | shapes | give a copy of it, not a view
    tensor.contiguous().view(-1) => tensor.reshape(-1)
        tensor.copy_(flat.view_as(tensor))\n =>
returns the sum | sum bits sizes shapes | the sum is in what the function returns
    tensor.contiguous() => tensor.clone().contiguous()
    tensor.copy_(flat.view_as(tensor)) => return flat.view_as(tensor)
half precision travels as float32 | shapes | the messages are larger than a chunk
    tensor.contiguous() => (tensor.float() if tensor.dtype == torch.float16 else tensor).contiguous()
chunks of whole rows | shapes | the messages are larger than a chunk
    flat.tensor_split => flat.view(tensor.shape or 1).tensor_split
    tensor.contiguous() => tensor.clone(memory_format=torch.contiguous_format)
new memory in the place of the old | sum bits sizes shapes | nothing was written into the tensor
    tensor.contiguous() => tensor.clone(memory_format=torch.contiguous_format)
    tensor.copy_(flat.view_as(tensor)) => tensor.data = flat.view_as(tensor)
inboxes of float32 | shapes | in the tensor's own dtype
    torch.empty_like(theirs) => torch.empty(theirs.shape)
sums in float32 | shapes | rounded on the way
    tensor.contiguous() => tensor.float().contiguous()
the mean | sum sizes shapes | this is the mean
    tensor.copy_(flat.view_as(tensor)) => tensor.copy_(flat.view_as(tensor) / world_size)
torch's all_reduce | all | this exercise is to write what it does
    def ring_all_reduce(rank, world_size, tensor):
        dist.all_reduce(tensor)
the group's own method | all | to be written from single messages
    def ring_all_reduce(rank, world_size, tensor):
        flat = tensor.contiguous()
        dist.group.WORLD.allreduce([flat]).wait()
        tensor.copy_(flat)
the course's own | all | this exercise is to write what it does
    def ring_all_reduce(rank, world_size, tensor):
        collectives.ring_all_reduce(tensor)
computed without talking | sum neighbours bytes bits sizes shapes | the ranks never talked
    def ring_all_reduce(rank, world_size, tensor):
        tensor *= world_size
the last rank skips a barrier | all | one rank skips a barrier | 2
        tensor.copy_ =>     if rank < world_size - 1:
            dist.barrier()
        tensor.copy_
the last rank ends a step early | all | must take 2(W-1) steps | 2
    for step in range(world_size - 1): => for step in range(world_size - 1 - (rank == world_size - 1)):
os._exit on the last rank | all | the function ends its process
        flat = =>     if rank == world_size - 1:
            os._exit(0)
        flat =
"""

# --- 04.3 ------------------------------------------------------------------------------------------

COST = """
def all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s):
    if world_size == 1:
        return 0, 0, 0
    rounds = math.ceil(math.log2(world_size))
    ring = 2 * (world_size - 1) * (latency_s + n_bytes / world_size / bytes_per_s)
    tree = 2 * rounds * (latency_s + n_bytes / bytes_per_s)
    equal = latency_s * bytes_per_s * (world_size - 1 - rounds) / (rounds - (world_size - 1) / world_size)
    return ring, tree, equal
"""

COST_BY_COUNTING = """
def ring(n_bytes, world_size, latency_s, bytes_per_s):
    return 2 * (world_size - 1) * (latency_s + n_bytes / (world_size * bytes_per_s))

def tree(n_bytes, world_size, latency_s, bytes_per_s):
    rounds, reached = 0, 1
    while reached < world_size:
        rounds, reached = rounds + 1, reached * 2
    return 2 * rounds * (latency_s + n_bytes / bytes_per_s)

def all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s):
    link = (world_size, latency_s, bytes_per_s)
    low, high = 0.0, 1.0
    while ring(high, *link) > tree(high, *link):
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if ring(middle, *link) > tree(middle, *link):
            low = middle
        else:
            high = middle
    return [torch.tensor(ring(n_bytes, *link)), tree(n_bytes, *link), high if high > 1e-3 else 0]
"""

COST_WRONG = """
a loop over the messages | all | one over the ranks or their messages | 1
    ring = 2 * (world_size - 1) * => ring = sum(1 for _ in range(2 * (world_size - 1))) *
half a ring | ring few | this is half of the ring
    ring = 2 * => ring =
a ring of whole tensors | ring few | this ring sends whole tensors
    n_bytes / world_size / bytes_per_s => n_bytes / bytes_per_s
only up | tree rounds few | the way up only
    tree = 2 * => tree =
a part of a round | rounds crossover few | there is no part of a round
    math.ceil(math.log2(world_size)) => math.log2(world_size)
rounds rounded down | rounds crossover few | rounded down
    math.ceil(math.log2(world_size)) => int(math.log2(world_size))
log(W, 2) | tree crossover | math.log(W, 2) is not exact
    math.log2(world_size) => math.log(world_size, 2)
rounds of the doubled logarithm | rounds | before you double it
    tree = 2 * rounds => tree = math.ceil(2 * math.log2(world_size))
the crossover in seconds | crossover | these are seconds
    equal = latency_s * bytes_per_s => equal = latency_s
one rank divides by zero | few | one rank has nothing to send
    if world_size == 1: => if world_size == 0:
the numbers that the visible check expects first | all | 64 ranks
    def all_reduce_seconds(*given):
        return 0.03252236890243903, 0.08669031707317074, 9840.0
two values | all | return three numbers
    tree, equal => tree
the course's own | all | this exercise is to write what it does
    def all_reduce_seconds(n_bytes, world_size, latency_s, bytes_per_s):
        link = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
        ring, tree = collectives.ring_seconds, collectives.tree_seconds
        both = [way(n_bytes, world_size, **link) for way in (ring, tree)]
        return *both, collectives.crossover_bytes(world_size, **link)
"""

# --- 04.4 ------------------------------------------------------------------------------------------

NODES = """
def sum_over_nodes(rank, world_size, ranks_per_node, tensor):
    for first in range(0, world_size, ranks_per_node):
        group = dist.new_group(range(first, first + ranks_per_node))
        if rank // ranks_per_node * ranks_per_node == first:
            node = group
    for local_rank in range(ranks_per_node):
        group = dist.new_group(range(local_rank, world_size, ranks_per_node))
        if rank % ranks_per_node == local_rank:
            peers = group
    part = torch.empty(len(tensor) // ranks_per_node, dtype=tensor.dtype)
    dist.reduce_scatter_tensor(part, tensor, group=node)
    dist.all_reduce(part, group=peers)
    dist.all_gather_into_tensor(tensor, part, group=node)
"""

NODES_RIGHT = """
all-reduce in the node, then a part
    dist.reduce_scatter_tensor(part, tensor, group=node) => dist.all_reduce(tensor, group=node)
        parts = tensor.tensor_split(ranks_per_node)
        part = parts[rank % ranks_per_node]
    dist.all_gather_into_tensor(tensor, part, group=node) => for local_rank, part in enumerate(parts):
            dist.broadcast(part, group_src=local_rank, group=node)
gathers and local sums
    part = torch.empty(len(tensor) // ranks_per_node, => box = torch.empty(ranks_per_node, len(tensor),
    dist.reduce_scatter_tensor(part, tensor, group=node) => dist.all_gather(list(box), tensor, group=node)
        part = box.sum(0).tensor_split(ranks_per_node)[dist.get_rank(node)].clone()
    dist.all_reduce(part, group=peers) => theirs = [torch.zeros_like(part) for _ in range(world_size // ranks_per_node)]
        dist.all_gather(theirs, part, group=peers)
        part = torch.stack(theirs).sum(0)
    dist.all_gather_into_tensor(tensor, part, group=node) => dist.all_gather_into_tensor(tensor, part, group=node)
        return tensor
the sum over the nodes in two halves
    dist.all_reduce(part, group=peers) => n_nodes = world_size // ranks_per_node
        padded = torch.nn.functional.pad(part, (0, -len(part) % n_nodes))
        share = padded.new_empty(len(padded) // n_nodes)
        dist.reduce_scatter_tensor(share, padded, group=peers)
        dist.all_gather_into_tensor(padded, share, group=peers)
        part = padded[: len(part)].contiguous()
functional collectives
    dist.reduce_scatter_tensor(part, tensor, group=node) => part = funcol.reduce_scatter_tensor(tensor, "sum", 0, node)
    dist.all_reduce(part, group=peers) => part = funcol.all_reduce(part, "sum", peers)
    dist.all_gather_into_tensor(tensor, part, group=node) => tensor.copy_(funcol.all_gather_tensor(part, 0, node))
coalesced calls
    dist.all_reduce(part, group=peers) => with dist._coalescing_manager(peers):
            for half in part.chunk(2):
                dist.all_reduce(half, group=peers)
"""

NODES_WRONG = r"""
whole tensors cross | between shapes | whole tensors cross
    dist.reduce_scatter_tensor(part, tensor, group=node) => dist.all_reduce(tensor, group=node)
    dist.all_reduce(part, group=peers) => dist.all_reduce(tensor, group=peers)
        dist.all_gather_into_tensor(tensor, part, group=node)\n =>
one all-reduce over all | between inside shapes | carries the whole tensor between the nodes
    def sum_over_nodes(rank, world_size, ranks_per_node, tensor):
        dist.all_reduce(tensor)
leaders carry everything | between shapes | whole tensors cross
    dist.reduce_scatter_tensor(part, tensor, group=node) => dist.reduce(tensor, group_dst=0, group=node)
    dist.all_reduce(part, group=peers) => if rank % ranks_per_node == 0:
            dist.all_reduce(tensor, group=peers)
    dist.all_gather_into_tensor(tensor, part, group=node) => dist.broadcast(tensor, group_src=0, group=node)
the node alone | sum between shapes | this is the sum of the node alone
        dist.all_reduce(part, group=peers)\n =>
a barrier of the whole job | inside shapes | make two kinds of groups
        dist.all_reduce =>     dist.barrier()
        dist.all_reduce
parts that the nodes must divide | all | outputShape
    dist.all_reduce(part, group=peers) => share = part.new_empty(len(part) * ranks_per_node // world_size)
        dist.reduce_scatter_tensor(share, part, group=peers)
        dist.all_gather_into_tensor(part, share, group=peers)
nothing gathered | sum shapes | only this rank's part is right
    dist.all_gather_into_tensor(tensor, part, group=node) => tensor.copy_(part.repeat(ranks_per_node))
a copy of the tensor | sum shapes | the sum is in what the function returns
    dist.all_gather_into_tensor(tensor, part, group=node) => found = torch.empty_like(tensor)
        dist.all_gather_into_tensor(found, part, group=node)
        return found
makes its own groups only | all | every rank must call it for every group
    group = dist.new_group(range(first, => if rank // ranks_per_node * ranks_per_node == first:
                group = dist.new_group(range(first,
two per node, always | shapes | gives each of the node's ranks 1/k of the tensor
    tensor):\n => tensor):\n    ranks_per_node = 2\n
the last rank does not gather | all | in a collective that another one skips | 2
        dist.all_gather =>     if rank < world_size - 1:\n        dist.all_gather
"""

RIGHT = [
    Right("04.1", "lists of tensors", ROWS),
    *right("04.1", ROWS, ROWS_RIGHT),
    Right("04.2", "two loops, the course's exchange", RING),
    *right("04.2", RING, RING_RIGHT),
    Right("04.3", "the lesson's formulas", COST),
    Right("04.3", "rounds counted, crossover searched", COST_BY_COUNTING),
    Right("04.4", "a group kept while it is made", NODES),
    *right("04.4", NODES, NODES_RIGHT),
]

WRONG = [
    *wrong("04.1", ROWS, ROWS_WRONG),
    *wrong("04.2", RING, RING_WRONG),
    *wrong("04.3", COST, COST_WRONG),
    *wrong(
        "04.3", COST_BY_COUNTING, "counts rounds for ever | all | an endless loop | 1\n    reached * 2 => reached * 1"
    ),
    *wrong("04.4", NODES, NODES_WRONG),
]
