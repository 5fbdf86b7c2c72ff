"""The answer bank of lesson 03: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import right, wrong
from tests.grading.bank import wrong as strangers

IMPORTS = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
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

PLACE_RIGHT = """
a helper, a list, torch.device
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

PLACE_RIGHT += """
an error of its own, which is a ValueError
    class BadPlace(ValueError):
        def __init__(self, name, environ):
            super().__init__(f"{name}: {environ.get(name)!r} does not fit")

    def place(environ, gpus):
        found = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if not environ.get(name, "").isdigit():
                raise BadPlace(name, environ)
            found[name] = int(environ[name])
        rank, world_size, local_rank, size = found.values()
        for name, limit in (("RANK", world_size), ("LOCAL_RANK", size)):
            if found[name] >= limit:
                raise BadPlace(name, environ)
        return rank, local_rank, rank // size, f"cuda:{local_rank}" if gpus >= size else "cpu"
"""

PLACE_WRONG = r"""
nothing is checked | missing bad | KeyError does not tell a user what to do
    def place(environ, gpus):
        rank, local_rank = int(environ["RANK"]), int(environ["LOCAL_RANK"])
        per_node = int(environ["LOCAL_WORLD_SIZE"])
        return rank, local_rank, rank // per_node, f"cuda:{local_rank}" if gpus >= per_node else "cpu"
a default for what is missing | missing bad | the value was used without a look at it
    def place(environ, gpus):
        rank, local_rank = int(environ.get("RANK", 0)), int(environ["LOCAL_RANK"])
        per_node = int(environ["LOCAL_WORLD_SIZE"])
        return rank, local_rank, rank // per_node, f"cuda:{local_rank}" if gpus >= per_node else "cpu"
device by global rank | device | must follow the local rank
    "cuda:{local_rank}" => "cuda:{rank}"
always a GPU | device | its ranks use the CPU
     if gpus >= per_node else "cpu" =>
ranks share GPUs | device | its ranks use the CPU
    f"cuda:{local_rank}" if gpus >= per_node => f"cuda:{local_rank % gpus}" if gpus
a GPU for those ranks that find one | device | its ranks use the CPU
    gpus >= per_node => gpus > local_rank
one rank too many | bad | RANK ends at WORLD_SIZE - 1
    0 <= rank < world_size => 0 <= rank <= world_size
node by remainder | one many | RANK // LOCAL_WORLD_SIZE
    rank // per_node => rank % per_node
node by world size | many | RANK // LOCAL_WORLD_SIZE
    rank // per_node => rank // world_size
text, not numbers | one many | make numbers of them with int()
    return rank, local_rank, => return environ["RANK"], environ["LOCAL_RANK"],
assertions | bad | python -O leaves assertions out
    if not 0 <= rank < world_size:\n        raise ValueError(f"RANK => assert 0 <= rank < world_size, (f"RANK
a message that names nothing | missing | the message does not name RANK
    f"{name} is not set" => "a variable is not set"
all four are named | missing | the message does not name WORLD_SIZE
    f"{name} is not set" => "set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
int()'s own words | bad | the message does not name RANK
    raise ValueError(f"{name}={environ[name]!r} is not a whole number") from None => raise
negative local ranks pass | bad | the value was used without a look at it
    0 <= local_rank < per_node => local_rank < per_node
a float | one many | divide by //
    rank // per_node, device => rank / per_node, device
negative ranks pass | bad | the value was used without a look at it
    0 <= rank < world_size => rank < world_size
reads os.environ | all | it is to read the dictionary it is given
    environ[name] => os.environ[name]
    in environ => in os.environ
calls the course's own | all | this exercise is to write what it does
    from ddp_course.groups import read_place

    def place(environ, gpus):
        try:
            found = read_place(environ)
        except Exception:
            raise ValueError("RANK, WORLD_SIZE, LOCAL_RANK or LOCAL_WORLD_SIZE is wrong") from None
        return found.rank, found.local_rank, found.rank // found.local_world_size, str(found.device)
returns nothing | one many device | return four values
    return rank => rank
a slip in the code | one many device | NameError: name 'local_world_size' is not defined
    gpus >= per_node => gpus >= local_world_size
wrong signature | all | place() takes 1 positional argument
    (environ, gpus) => (environ)
    gpus >= per_node => True
os._exit | all | the function ends its process
    def place(environ, gpus):
        os._exit(3)
endless loop | all | an endless loop | 1
    def place(environ, gpus):
        while True:
            pass
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

JOIN_RIGHT = r"""
all_gather_into_tensor
    dist.all_reduce(total) => table = torch.empty(world_size, dtype=total.dtype)
        dist.all_gather_into_tensor(table, total[None])
        total = table.sum()
functional collectives
    dist.all_reduce(total) => total = funcol.all_reduce(total, "sum", dist.group.WORLD).clone()
coalesced calls
    dist.all_reduce(total) => with dist._coalescing_manager():
            dist.all_reduce(total)
FileStore, functions imported by name, all_gather
    from torch.distributed import FileStore, all_gather, barrier, destroy_process_group, init_process_group

    def join_and_sum(rank, world_size, path, value):
        store = FileStore(str(path), world_size)
        init_process_group(backend="gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=1))
        mine = torch.tensor([value])
        everyone = [torch.zeros_like(mine) for _ in range(world_size)]
        all_gather(everyone, mine)
        barrier()
        destroy_process_group()
        return sum(everyone)
reduce, then broadcast
    def join_and_sum(rank, world_size, path, value):
        dist.init_process_group(init_method="file://" + path, rank=rank, world_size=world_size, backend="gloo",
                                timeout=timedelta(seconds=5))
        try:
            total = torch.tensor(value)
            dist.reduce(total, dst=0)
            work = dist.broadcast(total, src=0, async_op=True)
            work.wait()
        finally:
            dist.destroy_process_group()
        return int(total)
"""

JOIN_WRONG = r"""
no timeout | timeout | torch waits 30 minutes
    ,\n                            timeout=timedelta(seconds=30) =>
not ended | end | call dist.destroy_process_group()
        dist.destroy_process_group()\n =>
ended on rank 0 only | end | on every rank
        dist.destroy_process_group()\n =>     if rank == 0:\n        dist.destroy_process_group()\n
returns what all_reduce returns | sum | in place and returns None
        dist.all_reduce(total)\n =>     total = dist.all_reduce(total)\n
    total.item() => total
mean | sum | this is the mean
    return total.item() => return total.item() / world_size
no backend | group | give init_process_group "gloo"
    "gloo", init => init
in float32 | sum | right to six digits
    torch.tensor(value) => torch.tensor(float(value))
largest | sum | must be ReduceOp.SUM
    all_reduce(total) => all_reduce(total, op=dist.ReduceOp.MAX)
reduce to rank 0 | sum | reduce
    all_reduce(total) => reduce(total, dst=0)
no rank | all | give init_process_group rank=rank and world_size=world_size
    rank=rank,  =>
a relative path | all | wants the absolute path
    file://{path} => file://{os.path.basename(path)}
environment instead of the file | all | no launcher set the variables here
    init_method=f"file://{path}", rank=rank, world_size=world_size, =>
a file for each rank | all | the same file | 2
    {path} => {path}{rank}
another file | group | the file was never used
    {path} => {path}.rendezvous
ranks from 1 | all | every rank must be below the world size | 2
    rank=rank => rank=rank + 1
a world of two, always | all | every rank must be below the world size | 2
    world_size=world_size => world_size=2
computed without talking | all | the ranks never talked
    def join_and_sum(rank, world_size, path, value):
        return value * world_size
the last rank skips the sum | all | one rank skips a collective | 2
    dist.all_reduce(total) => dist.all_reduce(total) if rank < world_size - 1 else None
os._exit on one rank | all | the function ends its process
        total = =>     if rank == 1:
            os._exit(0)
        total =
the course's own | all | this exercise is to write
    from ddp_course.groups import join_group

    def join_and_sum(rank, world_size, path, value):
        join_group(None, "file", path)
swallows every error | all | the ranks never talked
    def join_and_sum(rank, world_size, path, value):
        try:
            dist.init_process_group("gloo")
        except Exception:
            return value
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

NODE_RIGHT = r"""
only its own group, with local synchronisation; all_gather
    def node_sum(rank, world_size, ranks_per_node, value):
        first = rank - rank % ranks_per_node
        group = dist.new_group(range(first, first + ranks_per_node), use_local_synchronization=True)
        everyone = [torch.zeros((), dtype=torch.int64) for _ in range(ranks_per_node)]
        dist.all_gather(everyone, torch.tensor(value), group=group)
        return int(sum(everyone))
all_gather_into_tensor
    dist.all_reduce(total, group=mine) => table = torch.empty(ranks_per_node, dtype=total.dtype)
        dist.all_gather_into_tensor(table, total[None], group=mine)
        total = table.sum()
functional collectives
    dist.all_reduce(total, group=mine) => total = funcol.all_reduce(total, "sum", mine)
coalesced calls
    dist.all_reduce(total, group=mine) => with dist._coalescing_manager(mine):
            dist.all_reduce(total, group=mine)
new_subgroups
    def node_sum(rank, world_size, ranks_per_node, value):
        group, _ = dist.new_subgroups(ranks_per_node)
        total = torch.tensor([value])
        dist.all_reduce(total, group=group)
        return total
all groups first, asynchronous
    def node_sum(rank, world_size, ranks_per_node, value):
        nodes = [range(i, i + ranks_per_node) for i in range(0, world_size, ranks_per_node)]
        groups = [dist.new_group(ranks=list(ranks), timeout=timedelta(seconds=20)) for ranks in nodes]
        total = torch.tensor(value)
        work = dist.all_reduce(total, op=dist.ReduceOp.SUM, group=groups[rank // ranks_per_node], async_op=True)
        work.wait()
        return total
"""

NODE_WRONG = r"""
new_group only for the own group | all | every rank must call it for every group
    for first in range(0, world_size, ranks_per_node): => for first in [rank - rank % ranks_per_node]:
two per node, always | shapes inside | 1 per node
    value):\n => value):\n    ranks_per_node = 2\n
the last group made | all | not the last one made
    group=mine => group=group
only leaders make groups | all | every rank must call it for every group
        for first =>     mine = None
        if rank % ranks_per_node:
            return value
        for first
no group in the call | nodes shapes inside | the sum over all ranks
    , group=mine =>
a barrier of the whole job | inside | all nodes talk and wait for each other
        return total =>     dist.barrier()
        return total
another way for other nodes | inside | all nodes talk and wait for each other
    total = torch.tensor(value) => total = torch.tensor(value)
        if ranks_per_node != 2:
            everyone = [None] * world_size
            dist.all_gather_object(everyone, value)
            return sum(everyone[i] for i in dist.get_process_group_ranks(mine))
every other rank | nodes shapes inside | a node's ranks are neighbours
    range(0, world_size, ranks_per_node) => range(world_size // ranks_per_node)
    range(first, first + ranks_per_node) => range(first, world_size, world_size // ranks_per_node)
everybody's values, then a local sum | inside groups | give the collective the node's group
    def node_sum(rank, world_size, ranks_per_node, value):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, value)
        first = rank // ranks_per_node * ranks_per_node
        return sum(everyone[first : first + ranks_per_node])
mean | nodes shapes | this is the mean
    total.item() => total.item() / ranks_per_node
the leader does not join the sum | all | never entered
        dist.all_reduce =>     if rank % ranks_per_node:\n        dist.all_reduce
the course's own | all | this exercise is to write
    from ddp_course.groups import split_group

    def node_sum(rank, world_size, ranks_per_node, value):
        total = torch.tensor(value)
        dist.all_reduce(total, group=split_group(ranks_per_node))
        return total
"""

# --- 03.4 ------------------------------------------------------------------------------------------

LEADER = (
    NODE.replace("node_sum", "from_leader")
    .replace("mine = group", "mine, leader = group, first")
    .replace("dist.all_reduce(total, group=mine)", "dist.broadcast(total, src=leader, group=mine)")
)

LEADER_RIGHT = r"""
all_gather in the group
    for first in range(0, world_size, ranks_per_node): => for first in [rank - rank % ranks_per_node]:
    dist.new_group(ranks) => dist.new_group(ranks, use_local_synchronization=True)
    dist.broadcast(total, src=leader, group=mine) => everyone = [torch.zeros_like(total) for _ in ranks]
        dist.all_gather(everyone, total, group=mine)
        total = everyone[0]
functional collectives
    dist.broadcast(total, src=leader, group=mine) => total = funcol.broadcast(total, 0, mine)
group_src
    src=leader => group_src=0
"""

LEADER_WRONG = r"""
the fraction is cut off | shapes | the leader is the first rank of the node
    torch.tensor(value) => torch.tensor(int(value))
    return total.item() => return int(total.item())
src is always rank 0 | all | src is a rank of the whole job
    src=leader => src=0
every rank names itself | all | they name different ones as src | 3
    src=leader => src=rank
the sum over all leaders | all | this is the sum over all leaders
    torch.tensor(value) => torch.tensor(value if rank == leader else 0)
    broadcast(total, src=leader, group=mine) => all_reduce(total)
from rank 0 to everybody | all | every node has a leader of its own
    src=leader, group=mine => src=0
the last rank of the node | nodes shapes | the leader is the first rank of the node
    src=leader => src=leader + ranks_per_node - 1
returns what broadcast returns | nodes shapes | in place and returns None
        dist.broadcast =>     total = dist.broadcast
    total.item() => total
all ranks' values, then a look-up | inside | give the collective the node's group
    def from_leader(rank, world_size, ranks_per_node, value):
        everyone = [None] * world_size
        dist.all_gather_object(everyone, value)
        return everyone[rank // ranks_per_node * ranks_per_node]
only the leader broadcasts | all | one rank skips a collective
        dist.broadcast =>     if rank == leader:\n        dist.broadcast
"""

RIGHT = [
    *right("03.1", PLACE, PLACE_RIGHT),
    *right("03.2", JOIN, JOIN_RIGHT),
    *right("03.3", NODE, NODE_RIGHT),
    *right("03.4", LEADER, LEADER_RIGHT),
]

WRONG = [
    *wrong("03.1", PLACE, PLACE_WRONG),
    *wrong("03.2", JOIN, JOIN_WRONG),
    *wrong("03.3", NODE, NODE_WRONG),
    *wrong("03.4", LEADER, LEADER_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "03.1",
    "",
    r"""
int(float(...)) takes "1.5" for 1 | bad | the value was used without a look at it
    def place(environ, gpus):
        def read(name):
            try:
                return int(float(environ[name]))
            except KeyError:
                raise ValueError(f"{name} is missing") from None
            except ValueError:
                raise ValueError(f"{name} is no number") from None

        rank, world, local, local_world = map(read, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if not 0 <= rank < world:
            raise ValueError(f"RANK {rank} is out of range")
        if not 0 <= local < local_world:
            raise ValueError(f"LOCAL_RANK {local} is out of range")
        return rank, local, rank // local_world, f"cuda:{local}" if gpus >= local_world else "cpu"
node from the number of GPUs where there are GPUs | many | the first LOCAL_WORLD_SIZE ranks are on node 0
    def place(environ, gpus):
        def read(name):
            if name not in environ:
                raise ValueError(f"{name} is missing")
            try:
                return int(environ[name])
            except ValueError:
                raise ValueError(f"{name} is no whole number: {environ[name]!r}") from None

        rank, world = read("RANK"), read("WORLD_SIZE")
        local, local_world = read("LOCAL_RANK"), read("LOCAL_WORLD_SIZE")
        if not 0 <= rank < world:
            raise ValueError(f"RANK {rank} is out of range")
        if not 0 <= local < local_world:
            raise ValueError(f"LOCAL_RANK {local} is out of range")
        if gpus >= local_world:
            return rank, local, rank // gpus, f"cuda:{local}"
        return rank, local, rank // local_world, "cpu"
""",
)
WRONG += strangers(
    "03.4",
    "",
    r"""
MAX against the zeros of the others: a leader's negative value is lost
| nodes shapes | the leader is the first rank of the node
    def from_leader(rank, world_size, ranks_per_node, value):
        for first in range(0, world_size, ranks_per_node):
            members = list(range(first, first + ranks_per_node))
            group = dist.new_group(members)
            if rank in members:
                mine, leader = group, first
        message = torch.tensor(value if rank == leader else 0).double()
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=mine)
        return message.item()
""",
)
