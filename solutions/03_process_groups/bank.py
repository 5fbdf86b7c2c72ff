"""The answer bank of lesson 03: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong

IMPORTS = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
"""

# --- 03.1 ------------------------------------------------------------------------------------------

PLACE = """
def place(environ, gpus):
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name not in environ:
            raise ValueError(f"{name} is not set")
        try:
            values[name] = int(environ[name])
        except ValueError:
            raise ValueError(f"{name}={environ[name]!r} is not a whole number") from None
    rank, world_size, local_rank, per_node = values.values()
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is outside 0..{world_size - 1}")
    if not 0 <= local_rank < per_node:
        raise ValueError(f"LOCAL_RANK={local_rank} is outside 0..{per_node - 1}")
    device = f"cuda:{local_rank}" if gpus >= per_node else "cpu"
    return rank, local_rank, rank // per_node, device
"""

PLACE_OTHERWISE = """
def whole(environ, name):
    text = environ.get(name, "")
    if not text.isdigit():
        raise ValueError(f"expected a whole number in {name}, found {text or 'nothing'}")
    return int(text)

def place(environ, gpus):
    rank, size = whole(environ, "RANK"), whole(environ, "WORLD_SIZE")
    local_rank, local_size = whole(environ, "LOCAL_RANK"), whole(environ, "LOCAL_WORLD_SIZE")
    for name, value, limit in (("RANK", rank, size), ("LOCAL_RANK", local_rank, local_size)):
        if value not in range(limit):
            raise ValueError(f"{name} is {value}, which is not below {limit}")
    node = (rank - local_rank) // local_size
    return [rank, local_rank, node, torch.device("cuda", local_rank) if local_size <= gpus else torch.device("cpu")]
"""

PLACE_UNCHECKED = """
def place(environ, gpus):
    rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
    per_node = int(environ["LOCAL_WORLD_SIZE"])
    return rank, local_rank, rank // per_node, f"cuda:{local_rank}" if gpus >= per_node else "cpu"
"""

# --- 03.2 ------------------------------------------------------------------------------------------

JOIN = """
def join_and_sum(rank, world_size, path, value):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=30))
    total = torch.tensor(value)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()
"""

JOIN_BY_STORE = """
from torch.distributed import FileStore, all_gather, barrier, destroy_process_group, init_process_group

def join_and_sum(rank, world_size, path, value):
    store = FileStore(str(path), world_size)
    init_process_group(backend="gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=1))
    mine = torch.tensor([float(value)])
    everyone = [torch.zeros(1) for _ in range(world_size)]
    all_gather(everyone, mine)
    barrier()
    destroy_process_group()
    return sum(everyone)
"""

JOIN_REDUCE_BROADCAST = """
def join_and_sum(rank, world_size, path, value):
    dist.init_process_group(init_method="file://" + path, rank=rank, world_size=world_size, backend="gloo",
                            timeout=timedelta(seconds=5))
    try:
        total = torch.tensor(float(value))
        dist.reduce(total, dst=0)
        work = dist.broadcast(total, src=0, async_op=True)
        work.wait()
    finally:
        dist.destroy_process_group()
    return int(total)
"""

# --- 03.3 ------------------------------------------------------------------------------------------

NODE = """
def node_sum(rank, world_size, ranks_per_node, value):
    for first in range(0, world_size, ranks_per_node):
        ranks = list(range(first, first + ranks_per_node))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    total = torch.tensor(value)
    dist.all_reduce(total, group=mine)
    return total.item()
"""

NODE_NEW_SUBGROUPS = """
def node_sum(rank, world_size, ranks_per_node, value):
    group, _ = dist.new_subgroups(ranks_per_node)
    total = torch.tensor([float(value)])
    dist.all_reduce(total, group=group)
    return total
"""

NODE_LOCAL_SYNC = """
def node_sum(rank, world_size, ranks_per_node, value):
    first = rank - rank % ranks_per_node
    group = dist.new_group(range(first, first + ranks_per_node), use_local_synchronization=True)
    everyone = [torch.zeros((), dtype=torch.int64) for _ in range(ranks_per_node)]
    dist.all_gather(everyone, torch.tensor(value), group=group)
    return int(sum(everyone))
"""

NODE_ALL_THEN_PICK = """
def node_sum(rank, world_size, ranks_per_node, value):
    nodes = [range(i, i + ranks_per_node) for i in range(0, world_size, ranks_per_node)]
    groups = [dist.new_group(ranks=list(ranks), timeout=timedelta(seconds=20)) for ranks in nodes]
    total = torch.tensor(value)
    work = dist.all_reduce(total, op=dist.ReduceOp.SUM, group=groups[rank // ranks_per_node], async_op=True)
    work.wait()
    return total
"""

# --- 03.4 ------------------------------------------------------------------------------------------

LEADER = (
    NODE.replace("node_sum", "from_leader")
    .replace("mine = group", "mine, leader = group, first")
    .replace("dist.all_reduce(total, group=mine)", "dist.broadcast(total, src=leader, group=mine)")
)

PLACE_FROM_COURSE = """
from ddp_course.groups import read_place

def place(environ, gpus):
    try:
        found = read_place(environ)
    except Exception:
        raise ValueError("RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is wrong") from None
    return found.rank, found.local_rank, found.rank // found.local_world_size, str(found.device)
"""

JOIN_FROM_COURSE = """
from ddp_course.groups import join_group

def join_and_sum(rank, world_size, path, value):
    join_group(None, "file", path)
"""

JOIN_SWALLOWING = """
def join_and_sum(rank, world_size, path, value):
    try:
        dist.init_process_group("gloo")
    except Exception:
        return value
"""

NODE_BY_EVERYBODY = """
def node_sum(rank, world_size, ranks_per_node, value):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, value)
    first = rank // ranks_per_node * ranks_per_node
    return sum(everyone[first : first + ranks_per_node])
"""

NODE_FROM_COURSE = """
from ddp_course.groups import split_group

def node_sum(rank, world_size, ranks_per_node, value):
    total = torch.tensor(value)
    dist.all_reduce(total, group=split_group(ranks_per_node))
    return total
"""

LEADER_BY_EVERYBODY = """
def from_leader(rank, world_size, ranks_per_node, value):
    everyone = [None] * world_size
    dist.all_gather_object(everyone, value)
    return everyone[rank // ranks_per_node * ranks_per_node]
"""

RIGHT = [
    Right("03.1", "a helper, a list, torch.device", PLACE_OTHERWISE),
    Right("03.2", "FileStore, functions imported by name, all_gather", JOIN_BY_STORE),
    Right("03.2", "reduce, then broadcast", JOIN_REDUCE_BROADCAST),
    Right("03.3", "new_subgroups", NODE_NEW_SUBGROUPS),
    Right("03.3", "only its own group, with local synchronisation; all_gather", NODE_LOCAL_SYNC),
    Right("03.3", "all groups first, asynchronous", NODE_ALL_THEN_PICK),
    Right("03.4", "group_src", LEADER.replace("src=leader", "group_src=0")),
    Right(
        "03.4",
        "all_gather in the group",
        NODE_LOCAL_SYNC.replace("node_sum", "from_leader").replace("int(sum(everyone))", "everyone[0]"),
    ),
]

WRONG = [
    # 03.1
    Wrong(
        "03.1",
        "device by global rank",
        PLACE.replace('"cuda:{local_rank}"', '"cuda:{rank}"'),
        ("device",),
        "must follow the local rank",
    ),
    Wrong(
        "03.1",
        "always a GPU",
        PLACE.replace(' if gpus >= per_node else "cpu"', ""),
        ("device",),
        "its ranks use the CPU",
    ),
    Wrong(
        "03.1",
        "ranks share GPUs",
        PLACE.replace('f"cuda:{local_rank}" if gpus >= per_node', 'f"cuda:{local_rank % gpus}" if gpus'),
        ("device",),
        "its ranks use the CPU",
    ),
    Wrong(
        "03.1",
        "a GPU for those ranks that find one",
        PLACE.replace("gpus >= per_node", "gpus > local_rank"),
        ("device",),
        "its ranks use the CPU",
    ),
    Wrong(
        "03.1",
        "one rank too many",
        PLACE.replace("0 <= rank < world_size", "0 <= rank <= world_size"),
        ("bad",),
        "RANK ends at WORLD_SIZE - 1",
    ),
    Wrong(
        "03.1",
        "node by remainder",
        PLACE.replace("rank // per_node", "rank % per_node"),
        ("one", "many"),
        "RANK // LOCAL_WORLD_SIZE",
    ),
    Wrong(
        "03.1",
        "node by world size",
        PLACE.replace("rank // per_node", "rank // world_size"),
        ("many",),
        "RANK // LOCAL_WORLD_SIZE",
    ),
    Wrong(
        "03.1",
        "text, not numbers",
        PLACE.replace("return rank, local_rank,", 'return environ["RANK"], environ["LOCAL_RANK"],'),
        ("one", "many"),
        "make numbers of them with int()",
    ),
    Wrong(
        "03.1", "nothing is checked", PLACE_UNCHECKED, ("missing", "bad"), "KeyError does not tell a user what to do"
    ),
    Wrong(
        "03.1",
        "a default for what is missing",
        PLACE_UNCHECKED.replace('environ["RANK"]', 'environ.get("RANK", 0)'),
        ("missing", "bad"),
        "the value was used without a look at it",
    ),
    Wrong(
        "03.1",
        "assertions",
        PLACE.replace(
            'if not 0 <= rank < world_size:\n        raise ValueError(f"RANK', 'assert 0 <= rank < world_size, (f"RANK'
        ),
        ("bad",),
        "python -O leaves assertions out",
    ),
    Wrong(
        "03.1",
        "a message that names nothing",
        PLACE.replace('f"{name} is not set"', '"a variable is not set"'),
        ("missing",),
        "the message does not name RANK",
    ),
    Wrong(
        "03.1",
        "negative ranks pass",
        PLACE.replace("0 <= rank < world_size", "rank < world_size"),
        ("bad",),
        "the value was used without a look at it",
    ),
    Wrong(
        "03.1",
        "reads os.environ",
        PLACE.replace("environ[name]", "os.environ[name]").replace("in environ", "in os.environ"),
        ALL,
        "it is to read the dictionary it is given",
    ),
    Wrong(
        "03.1",
        "calls the course's own",
        PLACE_FROM_COURSE,
        ALL,
        "this exercise is to write what it does",
    ),
    Wrong(
        "03.1", "returns nothing", PLACE.replace("return rank", "rank"), ("one", "many", "device"), "return four values"
    ),
    Wrong(
        "03.1",
        "a slip in the code",
        PLACE.replace("gpus >= per_node", "gpus >= local_world_size"),
        ("one", "many", "device"),
        "NameError: name 'local_world_size' is not defined",
    ),
    Wrong(
        "03.1",
        "wrong signature",
        PLACE.replace("(environ, gpus)", "(environ)").replace("gpus >= per_node", "True"),
        ALL,
        "place() takes 1 positional argument",
    ),
    Wrong("03.1", "os._exit", "def place(environ, gpus):\n    os._exit(3)\n", ALL, "the function ends its process"),
    Wrong(
        "03.1",
        "endless loop",
        "def place(environ, gpus):\n    while True:\n        pass\n",
        ALL,
        "an endless loop",
        limit_s=1.0,
    ),
    # 03.2
    Wrong(
        "03.2",
        "no timeout",
        JOIN.replace(",\n                            timeout=timedelta(seconds=30)", ""),
        ("timeout",),
        "torch waits 30 minutes",
    ),
    Wrong(
        "03.2",
        "not ended",
        JOIN.replace("    dist.destroy_process_group()\n", ""),
        ("end",),
        "call dist.destroy_process_group()",
    ),
    Wrong(
        "03.2",
        "ended on rank 0 only",
        JOIN.replace("    dist.destroy_process_group()\n", "    if rank == 0:\n        dist.destroy_process_group()\n"),
        ("end",),
        "on every rank",
    ),
    Wrong(
        "03.2",
        "returns what all_reduce returns",
        JOIN.replace("    dist.all_reduce(total)\n", "    total = dist.all_reduce(total)\n").replace(
            "total.item()", "total"
        ),
        ("sum",),
        "in place and returns None",
    ),
    Wrong(
        "03.2",
        "mean",
        JOIN.replace("return total.item()", "return total.item() / world_size"),
        ("sum",),
        "this is the mean",
    ),
    Wrong(
        "03.2",
        "largest",
        JOIN.replace("all_reduce(total)", "all_reduce(total, op=dist.ReduceOp.MAX)"),
        ("sum",),
        "must be ReduceOp.SUM",
    ),
    Wrong(
        "03.2",
        "reduce to rank 0",
        JOIN.replace("all_reduce(total)", "reduce(total, dst=0)"),
        ("sum",),
        "reduce",
    ),
    Wrong(
        "03.2",
        "no rank",
        JOIN.replace("rank=rank, ", ""),
        ALL,
        "give init_process_group rank=rank and world_size=world_size",
    ),
    Wrong(
        "03.2",
        "a relative path",
        JOIN.replace("file://{path}", "file://{os.path.basename(path)}"),
        ALL,
        "wants the absolute path",
    ),
    Wrong(
        "03.2",
        "environment instead of the file",
        JOIN.replace('init_method=f"file://{path}", rank=rank, world_size=world_size,', ""),
        ALL,
        "no launcher set the variables here",
    ),
    Wrong("03.2", "a file for each rank", JOIN.replace("{path}", "{path}{rank}"), ALL, "the same file", limit_s=2.0),
    Wrong("03.2", "another file", JOIN.replace("{path}", "{path}.rendezvous"), ("group",), "the file was never used"),
    Wrong(
        "03.2",
        "ranks from 1",
        JOIN.replace("rank=rank", "rank=rank + 1"),
        ALL,
        "every rank must be below the world size",
        limit_s=2.0,
    ),
    Wrong(
        "03.2",
        "a world of two, always",
        JOIN.replace("world_size=world_size", "world_size=2"),
        ALL,
        "every rank must be below the world size",
        limit_s=2.0,
    ),
    Wrong(
        "03.2",
        "computed without talking",
        "def join_and_sum(rank, world_size, path, value):\n    return value * world_size\n",
        ALL,
        "the ranks never talked",
    ),
    Wrong(
        "03.2",
        "the last rank skips the sum",
        JOIN.replace("dist.all_reduce(total)", "dist.all_reduce(total) if rank < world_size - 1 else None"),
        ALL,
        "one rank skips a collective",
        limit_s=2.0,
    ),
    Wrong(
        "03.2",
        "os._exit on one rank",
        JOIN.replace("    total =", "    if rank == 1:\n        os._exit(0)\n    total ="),
        ALL,
        "the function ends its process",
    ),
    Wrong(
        "03.2",
        "the course's own",
        JOIN_FROM_COURSE,
        ALL,
        "this exercise is to write",
    ),
    Wrong(
        "03.2",
        "swallows every error",
        JOIN_SWALLOWING,
        ALL,
        "the ranks never talked",
    ),
    # 03.3
    Wrong(
        "03.3",
        "the last group made",
        NODE.replace("group=mine", "group=group"),
        ALL,
        "not the last one made",
    ),
    Wrong(
        "03.3",
        "new_group only for the own group",
        NODE_LOCAL_SYNC.replace(", use_local_synchronization=True", ""),
        ALL,
        "every rank must call it for every group",
    ),
    Wrong(
        "03.3",
        "only leaders make groups",
        NODE.replace(
            "    for first", "    mine = None\n    if rank % ranks_per_node:\n        return value\n    for first"
        ),
        ALL,
        "every rank must call it for every group",
    ),
    Wrong(
        "03.3",
        "no group in the call",
        NODE.replace(", group=mine", ""),
        ("nodes", "shapes", "inside"),
        "the sum over all ranks",
    ),
    Wrong(
        "03.3",
        "every other rank",
        NODE.replace("range(0, world_size, ranks_per_node)", "range(world_size // ranks_per_node)").replace(
            "range(first, first + ranks_per_node)", "range(first, world_size, world_size // ranks_per_node)"
        ),
        ("nodes", "shapes", "inside"),
        "a node's ranks are neighbours",
    ),
    Wrong(
        "03.3",
        "two per node, always",
        NODE.replace(
            "def node_sum(rank, world_size, ranks_per_node, value):",
            "def node_sum(rank, world_size, ranks_per_node, value):\n    ranks_per_node = 2",
        ),
        ("shapes",),
        "1 per node",
    ),
    Wrong(
        "03.3",
        "everybody's values, then a local sum",
        NODE_BY_EVERYBODY,
        ("inside", "groups"),
        "give the collective the node's group",
    ),
    Wrong(
        "03.3",
        "mean",
        NODE.replace("total.item()", "total.item() / ranks_per_node"),
        ("nodes", "shapes"),
        "this is the mean",
    ),
    Wrong(
        "03.3",
        "the leader does not join the sum",
        NODE.replace("    dist.all_reduce", "    if rank % ranks_per_node:\n        dist.all_reduce"),
        ALL,
        "never entered",
    ),
    Wrong(
        "03.3",
        "the course's own",
        NODE_FROM_COURSE,
        ALL,
        "this exercise is to write",
    ),
    # 03.4
    Wrong("03.4", "src is always rank 0", LEADER.replace("src=leader", "src=0"), ALL, "src is a rank of the whole job"),
    Wrong(
        "03.4",
        "every rank names itself",
        LEADER.replace("src=leader", "src=rank"),
        ALL,
        "they name different ones as src",
        limit_s=3.0,
    ),
    Wrong(
        "03.4",
        "the sum over all leaders",
        LEADER.replace("torch.tensor(value)", "torch.tensor(value if rank == leader else 0)").replace(
            "broadcast(total, src=leader, group=mine)", "all_reduce(total)"
        ),
        ALL,
        "this is the sum over all leaders",
    ),
    Wrong(
        "03.4",
        "from rank 0 to everybody",
        LEADER.replace("src=leader, group=mine", "src=0"),
        ALL,
        "every node has a leader of its own",
    ),
    Wrong(
        "03.4",
        "the last rank of the node",
        LEADER.replace("src=leader", "src=leader + ranks_per_node - 1"),
        ("nodes", "shapes"),
        "the leader is the first rank of the node",
    ),
    Wrong(
        "03.4",
        "returns what broadcast returns",
        LEADER.replace("    dist.broadcast", "    total = dist.broadcast").replace("total.item()", "total"),
        ("nodes", "shapes"),
        "in place and returns None",
    ),
    Wrong(
        "03.4",
        "all ranks' values, then a look-up",
        LEADER_BY_EVERYBODY,
        ("inside",),
        "give the collective the node's group",
    ),
    Wrong(
        "03.4",
        "only the leader broadcasts",
        LEADER.replace("    dist.broadcast", "    if rank == leader:\n        dist.broadcast"),
        ALL,
        "one rank skips a collective",
    ),
]
