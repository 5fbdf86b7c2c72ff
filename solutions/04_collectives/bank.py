"""The answer bank of lesson 04: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import math
import os
import torch
import torch.distributed as dist
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

ROWS_BY_BROADCASTS = """
def gather_rows(rank, world_size, rows):
    parts = []
    for source in range(world_size):
        count = torch.tensor(len(rows))
        dist.broadcast(count, src=source)
        part = rows.clone() if rank == source else torch.empty((int(count), rows.shape[1]), dtype=rows.dtype)
        dist.broadcast(part, src=source)
        parts.append(part)
    return torch.vstack(parts)
"""

ROWS_BY_SUM = """
def gather_rows(rank, world_size, rows):
    counts = torch.zeros(world_size, dtype=torch.long)
    counts[rank] = len(rows)
    dist.all_reduce(counts)
    ends = counts.cumsum(0)
    table = torch.zeros(int(ends[-1]), rows.size(1), dtype=rows.dtype)
    table[ends[rank] - counts[rank] : ends[rank]] = rows
    dist.all_reduce(table)
    return table
"""

ROWS_ALL_TO_ALL = """
def gather_rows(rank, world_size, rows):
    counts = [None] * world_size
    mine = torch.full((world_size,), len(rows))
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine)
    found = rows.new_empty(int(theirs.sum()), rows.shape[1])
    dist.all_to_all_single(found, rows.repeat(world_size, 1), theirs.tolist(), mine.tolist())
    return found
"""

ROWS_MESSAGES = """
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

ROWS_OBJECT = """
def gather_rows(rank, world_size, rows):
    parts = [None] * world_size
    dist.all_gather_object(parts, rows)
    return torch.cat(parts)
"""

ROWS_EQUAL = """
def gather_rows(rank, world_size, rows):
    table = torch.empty(world_size * len(rows), rows.shape[1], dtype=rows.dtype)
    dist.all_gather_into_tensor(table, rows)
    return table
"""

ROWS_SWALLOWING = """
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

RING_ORDERED = """
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
"""

RING_LEFTWARDS = """
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

RING_POSTED = """
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
"""

RING_WHOLE = """
def ring_all_reduce(rank, world_size, tensor):
    passing = tensor.clone().contiguous()
    for _ in range(world_size - 1):
        arrived = torch.empty_like(passing)
        collectives.exchange([(passing, (rank + 1) % world_size)], [(arrived, (rank - 1) % world_size)])
        tensor += arrived
        passing = arrived
"""

RING_STAR = """
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
"""

RING_CHAIN = """
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
"""

RING_SPLIT = RING.replace("flat.tensor_split(world_size)", "flat.split(max(1, flat.numel() // world_size))")

RING_BLOCKING = RING.replace(
    "collectives.exchange([(mine, right)], [(arrived, left)])",
    "dist.send(mine, dst=right)\n        dist.recv(arrived, src=left)",
)

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

COST_FROM_COURSE = """
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

GROUPS = NODES.partition("    part =")[0]

NODES_REDUCED_IN_NODE = (
    GROUPS
    + """
    dist.all_reduce(tensor, group=node)
    parts = tensor.tensor_split(ranks_per_node)
    mine = parts[rank % ranks_per_node]
    dist.all_reduce(mine, group=peers)
    for local_rank, part in enumerate(parts):
        dist.broadcast(part, group_src=local_rank, group=node)
"""
)

NODES_GATHERED = (
    GROUPS
    + """
    box = [torch.zeros_like(tensor) for _ in range(ranks_per_node)]
    dist.all_gather(box, tensor, group=node)
    part = sum(box).tensor_split(ranks_per_node)[dist.get_rank(node)].clone()
    theirs = [torch.zeros_like(part) for _ in range(world_size // ranks_per_node)]
    dist.all_gather(theirs, part, group=peers)
    dist.all_gather_into_tensor(tensor, torch.stack(theirs).sum(0), group=node)
    return tensor
"""
)

NODES_SHARED_ACROSS = (
    GROUPS
    + """
    n_nodes = world_size // ranks_per_node
    part = tensor.new_empty(len(tensor) // ranks_per_node)
    dist.reduce_scatter_tensor(part, tensor, group=node)
    padded = torch.nn.functional.pad(part, (0, -len(part) % n_nodes))
    share = padded.new_empty(len(padded) // n_nodes)
    dist.reduce_scatter_tensor(share, padded, group=peers)
    dist.all_gather_into_tensor(padded, share, group=peers)
    dist.all_gather_into_tensor(tensor, padded[: len(part)].contiguous(), group=node)
"""
)

NODES_WHOLE = GROUPS + "    dist.all_reduce(tensor, group=node)\n    dist.all_reduce(tensor, group=peers)\n"

NODES_LEADERS = (
    GROUPS
    + """
    dist.reduce(tensor, group_dst=0, group=node)
    if rank % ranks_per_node == 0:
        dist.all_reduce(tensor, group=peers)
    dist.broadcast(tensor, group_src=0, group=node)
"""
)

RIGHT = [
    Right("04.1", "lists of tensors", ROWS),
    Right("04.1", "one broadcast from each rank", ROWS_BY_BROADCASTS),
    Right("04.1", "each rank fills its place, then a sum", ROWS_BY_SUM),
    Right("04.1", "all_to_all_single with unequal splits", ROWS_ALL_TO_ALL),
    Right("04.1", "messages of the true sizes", ROWS_MESSAGES),
    Right("04.2", "two loops, the course's exchange", RING),
    Right("04.2", "isend and irecv, no empty messages, one inbox", RING_POSTED),
    Right("04.2", "padded chunks, send and recv in order", RING_ORDERED),
    Right("04.2", "leftwards, batched, chunks cut by hand", RING_LEFTWARDS),
    Right("04.3", "the lesson's formulas", COST),
    Right("04.3", "rounds counted, crossover searched", COST_BY_COUNTING),
    Right("04.4", "a group kept while it is made", NODES),
    Right("04.4", "all-reduce in the node, then a part", NODES_REDUCED_IN_NODE),
    Right("04.4", "gathers and local sums", NODES_GATHERED),
    Right("04.4", "the sum over the nodes in two halves", NODES_SHARED_ACROSS),
]

WRONG = [
    # 04.1
    Wrong(
        "04.1", "takes equal numbers for granted", ROWS_EQUAL, ("unequal", "empty", "dtype"), "gather the numbers of"
    ),
    Wrong(
        "04.1",
        "leaves the padding in",
        ROWS.replace("part[:count]", "part"),
        ("unequal", "empty", "dtype"),
        "rows of padding are left in",
    ),
    Wrong(
        "04.1",
        "takes rows of zeros for padding",
        ROWS.replace("part[:count]", "part[part.any(dim=1)]"),
        ("equal", "unequal", "empty"),
        "padding cannot be told by its values",
    ),
    Wrong(
        "04.1",
        "cuts by its own number of rows",
        ROWS.replace("part[:count]", "part[: len(rows)]"),
        ("unequal", "empty", "dtype"),
        "cut to this rank's own number of rows",
    ),
    Wrong(
        "04.1",
        "its own rows first",
        ROWS.replace(
            "return torch.cat([",
            "order = [rows] + [p[:c] for i, (p, c) in enumerate(zip(parts, counts)) if i != rank]"
            "\n    return torch.cat(order) if order else torch.cat([",
        ),
        ALL,
        "the rows of rank 0 come first",
    ),
    Wrong(
        "04.1",
        "only rank 0 gets them",
        ROWS.replace("dist.all_gather(parts, padded)", "dist.gather(padded, parts if rank == 0 else None)").replace(
            "    return", "    if rank == 0:\n        return"
        ),
        ALL,
        "return the tensor, on every rank",
    ),
    Wrong(
        "04.1",
        "a list of parts",
        ROWS.replace("torch.cat([part[:count] for part, count in zip(parts, counts)])", "parts"),
        ALL,
        "torch.cat puts a list of tensors together",
    ),
    Wrong(
        "04.1",
        "padded to 16 rows, always",
        ROWS.replace("max(counts)", "16"),
        ("unequal", "empty", "dtype"),
        "pad to the largest number of rows among the ranks",
    ),
    Wrong(
        "04.1",
        "everything as a float",
        ROWS.replace("dtype=rows.dtype", "dtype=torch.float32"),
        ("dtype",),
        "the dtype changed",
    ),
    Wrong(
        "04.1",
        "through a float and back",
        ROWS.replace("dtype=rows.dtype", "dtype=torch.float64").replace("counts)])", "counts)]).to(rows.dtype)"),
        ("dtype",),
        "went through a float",
    ),
    Wrong(
        "04.1",
        "a rank without rows goes home",
        ROWS.replace("    padded =", "    if len(rows) == 0:\n        return rows\n    padded ="),
        ("empty", "dtype"),
        "a rank without rows",
        limit_s=3.0,
    ),
    Wrong(
        "04.1",
        "the last rank does not gather",
        ROWS.replace("    dist.all_gather(parts", "    if rank < world_size - 1:\n        dist.all_gather(parts"),
        ALL,
        "each must call the same collectives",
        limit_s=2.0,
    ),
    Wrong("04.1", "pickled", ROWS_OBJECT, ALL, "this exercise is to write what it does"),
    Wrong("04.1", "swallows every error", ROWS_SWALLOWING, ALL, "the rank's own rows"),
    # 04.2
    Wrong("04.2", "whole tensors go round", RING_WHOLE, ("bytes", "bits"), "whole tensors go round"),
    Wrong("04.2", "a star", RING_STAR, ("neighbours", "bytes"), "where all talk with rank 0, it is a star"),
    Wrong("04.2", "a chain there and back", RING_CHAIN, ("bytes",), "some ranks hand out whole tensors"),
    Wrong("04.2", "everybody sends first", RING_BLOCKING, ALL, "every rank waits in send", limit_s=2.0),
    Wrong(
        "04.2",
        "everybody receives first",
        RING_BLOCKING.replace(
            "dist.send(mine, dst=right)\n        dist.recv(arrived, src=left)",
            "dist.recv(arrived, src=left)\n        dist.send(mine, dst=right)",
        ),
        ALL,
        "if all receive first, none gets to send",
        limit_s=2.0,
    ),
    Wrong(
        "04.2",
        "the first half only",
        RING.partition("    for step in range(world_size - 1)")[0] + "    tensor.copy_(flat.view_as(tensor))\n",
        ("sum", "bits", "sizes", "shapes"),
        "each rank has completed its own",
    ),
    Wrong(
        "04.2",
        "the second half adds, too",
        RING.replace(
            "collectives.exchange([(mine, right)], [(theirs, left)])",
            "arrived = torch.empty_like(theirs)\n        collectives.exchange([(mine, right)], [(arrived, left)])\n"
            "        theirs += arrived",
        ),
        ("sum", "bits", "sizes", "shapes"),
        "a sum that was complete was added again",
    ),
    Wrong(
        "04.2",
        "a step too few",
        RING.replace("range(1, world_size)", "range(1, world_size - 1)"),
        ("sum", "sizes", "shapes"),
        "each chunk must go round in W-1 steps",
    ),
    Wrong(
        "04.2",
        "sends what it receives into",
        RING.replace("[(mine, right)], [(arrived", "[(theirs, right)], [(arrived"),
        ("sum", "sizes", "shapes"),
        "both sides must mean the same chunk",
    ),
    Wrong(
        "04.2",
        "only sizes that divide",
        RING_SPLIT,
        ("sizes",),
        "may give fewer chunks than ranks",
    ),
    Wrong(
        "04.2",
        "slices of n // W",
        RING.replace(
            "chunks = flat.tensor_split(world_size)",
            "size = flat.numel() // world_size\n"
            "    chunks = [flat[i * size : (i + 1) * size] for i in range(world_size)]",
        ),
        ("sizes",),
        "these elements are in no chunk",
    ),
    Wrong(
        "04.2",
        "chunk() for tensor_split()",
        RING.replace("tensor_split", "chunk"),
        ("sizes",),
        "may give fewer chunks than ranks",
    ),
    Wrong(
        "04.2",
        "view of a transposed tensor",
        RING.replace("tensor.contiguous().view(-1)", "tensor.view(-1)"),
        ("shapes",),
        "view refuses it",
    ),
    Wrong(
        "04.2",
        "reshape, and nothing copied back",
        RING.replace("tensor.contiguous().view(-1)", "tensor.reshape(-1)").replace(
            "    tensor.copy_(flat.view_as(tensor))\n", ""
        ),
        ("shapes",),
        "give a copy of it, not a view",
    ),
    Wrong(
        "04.2",
        "returns the sum",
        RING.replace("tensor.contiguous()", "tensor.clone().contiguous()").replace(
            "tensor.copy_(flat.view_as(tensor))", "return flat.view_as(tensor)"
        ),
        ("sum", "bits", "sizes", "shapes"),
        "the sum is in what the function returns",
    ),
    Wrong(
        "04.2",
        "inboxes of float32",
        RING.replace("torch.empty_like(theirs)", "torch.empty(theirs.shape)"),
        ("shapes",),
        "in the tensor's own dtype",
    ),
    Wrong(
        "04.2",
        "sums in float32",
        RING.replace("tensor.contiguous()", "tensor.float().contiguous()"),
        ("shapes",),
        "rounded on the way",
    ),
    Wrong(
        "04.2",
        "the mean",
        RING.replace("tensor.copy_(flat.view_as(tensor))", "tensor.copy_(flat.view_as(tensor) / world_size)"),
        ("sum", "sizes", "shapes"),
        "this is the mean",
    ),
    Wrong(
        "04.2",
        "torch's all_reduce",
        "def ring_all_reduce(rank, world_size, tensor):\n    dist.all_reduce(tensor)\n",
        ALL,
        "this exercise is to write what it does",
    ),
    Wrong(
        "04.2",
        "the group's own method",
        "def ring_all_reduce(rank, world_size, tensor):\n    flat = tensor.contiguous()\n"
        "    dist.group.WORLD.allreduce([flat]).wait()\n    tensor.copy_(flat)\n",
        ALL,
        "to be written from single messages",
    ),
    Wrong(
        "04.2",
        "the course's own",
        "def ring_all_reduce(rank, world_size, tensor):\n    collectives.ring_all_reduce(tensor)\n",
        ALL,
        "this exercise is to write what it does",
    ),
    Wrong(
        "04.2",
        "computed without talking",
        "def ring_all_reduce(rank, world_size, tensor):\n    tensor *= world_size\n",
        ("sum", "neighbours", "bytes", "bits", "sizes", "shapes"),
        "the ranks never talked",
    ),
    Wrong(
        "04.2",
        "the last rank skips a barrier",
        RING.replace("    tensor.copy_", "    if rank < world_size - 1:\n        dist.barrier()\n    tensor.copy_"),
        ALL,
        "one rank skips a barrier",
        limit_s=2.0,
    ),
    Wrong(
        "04.2",
        "the last rank ends a step early",
        RING.replace(
            "for step in range(world_size - 1):", "for step in range(world_size - 1 - (rank == world_size - 1)):"
        ),
        ALL,
        "must take 2(W-1) steps",
        limit_s=2.0,
    ),
    Wrong(
        "04.2",
        "os._exit on the last rank",
        RING.replace("    flat =", "    if rank == world_size - 1:\n        os._exit(0)\n    flat ="),
        ALL,
        "the function ends its process",
    ),
    # 04.3
    Wrong("04.3", "half a ring", COST.replace("ring = 2 *", "ring ="), ("ring", "few"), "this is half of the ring"),
    Wrong(
        "04.3",
        "a ring of whole tensors",
        COST.replace("n_bytes / world_size / bytes_per_s", "n_bytes / bytes_per_s"),
        ("ring", "few"),
        "this ring sends whole tensors",
    ),
    Wrong("04.3", "only up", COST.replace("tree = 2 *", "tree ="), ("tree", "rounds", "few"), "the way up only"),
    Wrong(
        "04.3",
        "a part of a round",
        COST.replace("math.ceil(math.log2(world_size))", "math.log2(world_size)"),
        ("rounds", "crossover", "few"),
        "there is no part of a round",
    ),
    Wrong(
        "04.3",
        "rounds rounded down",
        COST.replace("math.ceil(math.log2(world_size))", "int(math.log2(world_size))"),
        ("rounds", "crossover", "few"),
        "rounded down",
    ),
    Wrong(
        "04.3",
        "log(W, 2)",
        COST.replace("math.log2(world_size)", "math.log(world_size, 2)"),
        ("tree", "crossover"),
        "math.log(W, 2) is not exact",
    ),
    Wrong(
        "04.3",
        "rounds of the doubled logarithm",
        COST.replace("tree = 2 * rounds", "tree = math.ceil(2 * math.log2(world_size))"),
        ("rounds",),
        "before you double it",
    ),
    Wrong(
        "04.3",
        "the crossover in seconds",
        COST.replace("equal = latency_s * bytes_per_s", "equal = latency_s"),
        ("crossover",),
        "these are seconds",
    ),
    Wrong(
        "04.3",
        "one rank divides by zero",
        COST.replace("if world_size == 1:", "if world_size == 0:"),
        ("few",),
        "one rank has nothing to send",
    ),
    Wrong(
        "04.3",
        "the numbers that the visible check expects first",
        "def all_reduce_seconds(*given):\n    return 0.03252236890243903, 0.08669031707317074, 9840.0\n",
        ALL,
        "64 ranks",
    ),
    Wrong("04.3", "two values", COST.replace("tree, equal", "tree"), ALL, "return three numbers"),
    Wrong("04.3", "the course's own", COST_FROM_COURSE, ALL, "this exercise is to write what it does"),
    Wrong(
        "04.3",
        "counts rounds for ever",
        COST_BY_COUNTING.replace("reached * 2", "reached * 1"),
        ALL,
        "an endless loop",
        limit_s=1.0,
    ),
    # 04.4
    Wrong("04.4", "whole tensors cross", NODES_WHOLE, ("between", "shapes"), "whole tensors cross"),
    Wrong(
        "04.4",
        "one all-reduce over all",
        "def sum_over_nodes(rank, world_size, ranks_per_node, tensor):\n    dist.all_reduce(tensor)\n",
        ("between", "inside", "shapes"),
        "carries the whole tensor between the nodes",
    ),
    Wrong(
        "04.4",
        "leaders carry everything",
        NODES_LEADERS,
        ("between", "shapes"),
        "whole tensors cross",
    ),
    Wrong(
        "04.4",
        "the node alone",
        NODES.replace("    dist.all_reduce(part, group=peers)\n", ""),
        ("sum", "between", "shapes"),
        "this is the sum of the node alone",
    ),
    Wrong(
        "04.4",
        "nothing gathered",
        NODES.replace(
            "dist.all_gather_into_tensor(tensor, part, group=node)", "tensor.copy_(part.repeat(ranks_per_node))"
        ),
        ("sum", "shapes"),
        "only this rank's part is right",
    ),
    Wrong(
        "04.4",
        "a copy of the tensor",
        NODES.replace(
            "dist.all_gather_into_tensor(tensor",
            "found = torch.empty_like(tensor)\n    dist.all_gather_into_tensor(found",
        )
        + "    return found\n",
        ("sum", "shapes"),
        "the sum is in what the function returns",
    ),
    Wrong(
        "04.4",
        "makes its own groups only",
        NODES.replace(
            "        group = dist.new_group(range(first, first + ranks_per_node))\n        if rank //",
            "        if rank // ranks_per_node * ranks_per_node == first:\n"
            "            group = dist.new_group(range(first, first + ranks_per_node))\n        if rank //",
        ),
        ALL,
        "every rank must call it for every group",
    ),
    Wrong(
        "04.4",
        "two per node, always",
        NODES.replace("tensor):\n", "tensor):\n    ranks_per_node = 2\n", 1),
        ("shapes",),
        "take ranks_per_node as it is given",
    ),
    Wrong(
        "04.4",
        "the last rank does not gather",
        NODES.replace("    dist.all_gather", "    if rank < world_size - 1:\n        dist.all_gather"),
        ALL,
        "in a collective that another one skips",
        limit_s=2.0,
    ),
]
