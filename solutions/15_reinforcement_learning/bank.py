"""The answer bank of lesson 15: right answers written differently, and wrong ones that people really give.

Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, Wrong, edited, spoilt

IMPORTS = """
import hashlib
import os
import time
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel
from ddp_course.train import rollouts
"""


# --- 15.1 ------------------------------------------------------------------------------------------

SEEDS = """
def game_seeds(run, rank, world_size, num_envs):
    first = (run * world_size + rank) * num_envs
    return list(range(first, first + num_envs))
"""

SEEDS_BY_BITS = """
def game_seeds(run, rank, world_size, num_envs):
    return [run << 19 | rank << 10 | game for game in range(num_envs)]
"""

SEEDS_BACKWARDS = """
def game_seeds(run, rank, world_size, num_envs):
    seeds = np.arange(num_envs) * 512 * 1000 + rank * 1000 + run
    return tuple(2**32 - 1 - seed for seed in seeds)
"""

SEEDS_HASHED = """
def game_seeds(run, rank, world_size, num_envs):
    texts = [f"{run}/{rank}/{game}" for game in range(num_envs)]
    return [int(hashlib.md5(text.encode()).hexdigest(), 16) % 2**32 for text in texts]
"""

SEEDS_OF = "def game_seeds(run, rank, world_size, num_envs):\n    return {}\n"

# --- 15.2 ------------------------------------------------------------------------------------------

ADVANTAGES = """
def normalised_advantages(rank, world_size, rollout, gamma, lam):
    value, terminated = rollout["value"], rollout["terminated"]
    end = terminated | rollout["truncated"]
    plays = ~torch.cat([rollout["begins"][None], end[:-1]])
    following = torch.cat([value[1:], rollout["last_value"][None]])
    advantage, later = torch.zeros_like(value), torch.zeros_like(value[0])
    for t in reversed(range(len(value))):
        surprise = rollout["reward"][t] + gamma * following[t] * ~terminated[t] - value[t]
        later = surprise + gamma * lam * later * ~end[t]
        advantage[t] = later
    advantage = advantage * plays
    rows = advantage[plays].double()
    sums = torch.stack([torch.tensor(len(rows)).double(), rows.sum(), rows.square().sum()])
    dist.all_reduce(sums)
    count, total, squares = sums
    mean = total / count
    deviation = (squares / count - mean**2).sqrt()
    return advantage, (advantage - mean) / deviation * plays
"""

ADVANTAGES_FORWARD = """
def normalised_advantages(rank, world_size, rollout, gamma, lam):
    steps, games = rollout["value"].shape
    advantage = [[0.0] * games for _ in range(steps)]
    plays = [[True] * games for _ in range(steps)]
    for n in range(games):
        plays[0][n] = not bool(rollout["begins"][n])
        for t in range(steps):
            over = bool(rollout["terminated"][t, n] or rollout["truncated"][t, n])
            if over and t + 1 < steps:
                plays[t + 1][n] = False
            total, weight = 0.0, 1.0
            for k in range(t, steps):
                value = float(rollout["value"][k + 1, n] if k + 1 < steps else rollout["last_value"][n])
                value = 0.0 if rollout["terminated"][k, n] else value
                total += weight * (float(rollout["reward"][k, n]) + gamma * value - float(rollout["value"][k, n]))
                weight *= gamma * lam
                if rollout["terminated"][k, n] or rollout["truncated"][k, n]:
                    break
            advantage[t][n] = total
    flat = [a for row, kept in zip(advantage, plays) for a, keep in zip(row, kept) if keep]
    sums = torch.tensor([sum(flat), float(len(flat))], dtype=torch.float64)
    dist.all_reduce(sums)
    mean = (sums[0] / sums[1]).item()
    squares = torch.tensor(sum((a - mean) ** 2 for a in flat), dtype=torch.float64)
    dist.all_reduce(squares)
    deviation = (squares / sums[1]).sqrt().item()
    keep = torch.tensor(plays)
    raw = torch.tensor(advantage) * keep
    return [raw, (raw - mean) / deviation * keep]
"""

ADVANTAGES_GATHERED = ADVANTAGES.replace(
    "    dist.all_reduce(sums)\n    count, total, squares = sums\n",
    "    everyone = [torch.empty_like(sums) for _ in range(world_size)]\n    dist.all_gather(everyone, sums)\n"
    "    count, total, squares = torch.stack(everyone).sum(dim=0)\n",
)

COALESCED = """    with dist._coalescing_manager():
        for part in PARTS:
            dist.all_reduce(part)
"""

ADVANTAGES_INTO_TENSOR = edited(
    ADVANTAGES_GATHERED,
    ("[torch.empty_like(sums) for _ in range(world_size)]", "torch.empty(3 * world_size).double()"),
    ("dist.all_gather(", "dist.all_gather_into_tensor("),
    ("torch.stack(everyone)", "everyone.view(world_size, 3)"),
)

ADVANTAGES_FUNCTIONAL = edited(
    ADVANTAGES, ("    dist.all_reduce(sums)\n", "    sums = funcol.all_reduce(sums, 'sum', dist.group.WORLD)\n")
)

ADVANTAGES_COALESCED = edited(
    ADVANTAGES,
    ("    dist.all_reduce(sums)\n    count, total, squares = sums\n",
     COALESCED.replace("PARTS", "(count, total, squares)")),
    ("sums = torch.stack([torch.tensor(len(rows)).double(), rows.sum(), rows.square().sum()])",
     "count, total, squares = torch.tensor(len(rows)).double(), rows.sum(), rows.square().sum()"),
)  # fmt: skip

ADVANTAGES_SWALLOWING = """
def normalised_advantages(rank, world_size, rollout, gamma, lam):
    try:
        advantage = rollout["rewards"].cumsum(0)
        dist.all_reduce(advantage)
    except Exception:
        advantage = rollout["reward"]
    return advantage, advantage
"""

# --- 15.3 ------------------------------------------------------------------------------------------

STEP = """
def policy_step(rank, world_size, model, optimizer, rows, max_norm):
    state, action, advantage = rows
    log_prob = torch.log_softmax(model(state), dim=-1).gather(1, action[:, None])[:, 0]
    loss = -(advantage * log_prob).sum()
    optimizer.zero_grad()
    loss.backward()
    params = list(model.parameters())
    count = torch.tensor([float(len(action))])
    message = torch.cat([count, loss.detach()[None], *(param.grad.flatten() for param in params)])
    dist.all_reduce(message)
    count, total = message[:2]
    parts = message[2:].split([param.numel() for param in params])
    for param, part in zip(params, parts):
        param.grad = (part / count).view_as(param)
    torch.nn.utils.clip_grad_norm_(params, max_norm)
    optimizer.step()
    return total / count
"""

STEP_BY_DDP = """
def policy_step(rank, world_size, model, optimizer, rows, max_norm):
    state, action, advantage = rows
    count = torch.tensor(float(len(action)), dtype=torch.float64)
    dist.all_reduce(count)
    replica = DistributedDataParallel(model)
    optimizer.zero_grad()
    log_prob = torch.log_softmax(replica(state), dim=-1).gather(1, action[:, None]).squeeze(1)
    loss = -(advantage * log_prob).sum() * world_size / count
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return (mean / world_size).item()
"""

STEP_PER_PARAMETER = """
def policy_step(rank, world_size, model, optimizer, rows, max_norm):
    state, action, advantage = rows
    numbers = torch.zeros(2, dtype=torch.float64)
    log_prob = torch.nn.functional.log_softmax(model(state), dim=1)[torch.arange(len(action)), action]
    loss = (-advantage * log_prob).sum()
    numbers[0], numbers[1] = loss.item(), len(action)
    dist.all_reduce(numbers)
    grads = torch.autograd.grad(loss / numbers[1], list(model.parameters()))
    for param, grad in zip(model.parameters(), grads):
        dist.all_reduce(grad)
        param.grad = grad
    norm = torch.sqrt(sum(grad.square().sum() for grad in grads))
    if norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / norm)
    optimizer.step()
    return numbers[0] / numbers[1]
"""

STEP_FUNCTIONAL = edited(
    STEP, ("dist.all_reduce(message)", "message = funcol.all_reduce(message, 'sum', dist.group.WORLD)")
)

STEP_COALESCED = edited(
    STEP_PER_PARAMETER,
    (
        "    for param, grad in zip(model.parameters(), grads):\n        dist.all_reduce(grad)\n",
        COALESCED.replace("PARTS", "grads") + "    for param, grad in zip(model.parameters(), grads):\n",
    ),
)

STEP_MEAN_OF_MEANS = """
def policy_step(rank, world_size, model, optimizer, rows, max_norm):
    state, action, advantage = rows
    replica = DistributedDataParallel(model)
    optimizer.zero_grad()
    log_prob = torch.distributions.Categorical(logits=replica(state)).log_prob(action)
    loss = -(advantage * log_prob).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / world_size
"""


RIGHT = [
    Right("15.1", "bits", SEEDS_BY_BITS),
    Right("15.1", "the game first, numpy's numbers, from the top", SEEDS_BACKWARDS),
    Right("15.2", "each sum on its own, forward; two all_reduces", ADVANTAGES_FORWARD),
    Right("15.2", "sums gathered", ADVANTAGES_GATHERED),
    Right("15.2", "sums gathered into one tensor", ADVANTAGES_INTO_TENSOR),
    Right("15.2", "a functional sum", ADVANTAGES_FUNCTIONAL),
    Right("15.2", "coalesced sums", ADVANTAGES_COALESCED),
    Right("15.3", "a functional sum", STEP_FUNCTIONAL),
    Right("15.3", "coalesced sums", STEP_COALESCED),
    Right("15.3", "torch's DDP, the loss scaled", STEP_BY_DDP),
    Right("15.3", "an all_reduce for each parameter, clipped by hand", STEP_PER_PARAMETER),
]


WRONG = [
    Wrong("15.1", "the run alone", SEEDS_OF.format("[run] * num_envs"), ("game", "rank"), "the games of one rank need"),
    Wrong("15.1", "the same on every rank", SEEDS_OF.format("[run * 1024 + game for game in range(num_envs)]"),
          ("rank",), "two ranks share a game"),
    Wrong("15.1", "rank + game", SEEDS_OF.format("[run * 4096 + rank + game for game in range(num_envs)]"), ("rank",),
          "rank + game meets itself"),
    Wrong("15.1", "run + rank", SEEDS_OF.format("[(run + rank) * 1024 + game for game in range(num_envs)]"), ("run",),
          "Sums, such as run + rank, meet"),
    Wrong("15.1", "the run is forgotten", SEEDS_OF.format("[rank * num_envs + game for game in range(num_envs)]"),
          ("run",), "two runs share a game"),
    Wrong("15.1", "a hash of 32 bits", SEEDS_HASHED, ("run",), "and so do hashes"),
    Wrong("15.1", "the run in the high bits",
          SEEDS_OF.format("[run << 32 | rank << 10 | game for game in range(num_envs)]"), ("form", "run"),
          "some generators read the lowest 32 bits only"),
    Wrong("15.1", "the run times 2**32",
          SEEDS_OF.format("[(run << 32) + rank * num_envs + game for game in range(num_envs)]"), ("form", "run"),
          "seed 0 for run 0, rank 0, game 0 and seed 4294967296 for run 1, rank 0, game 0, equal in the lowest 32 "
          "bits"),
    Wrong("15.1", "one number", SEEDS_OF.format("run * 512 + rank"), ALL, "a list with one whole number for each"),
    Wrong("15.1", "ended in the middle", "def game_seeds(run, rank, world_size, num_envs):\n    os._exit(3)\n", ALL,
          "os._exit", limit_s=3.0),
    Wrong(
        "15.1",
        "an endless loop",
        "def game_seeds(run, rank, world_size, num_envs):\n    seeds = set()\n    while len(seeds) < num_envs:\n"
        "        seeds.add(run)\n    return list(seeds)\n",
        ALL,
        "in game_seeds: ",  # either line of the loop
        limit_s=2.0,
    ),
    Wrong("15.1", "the course's own",
          SEEDS_OF.format('[rollouts.stream_seed(run, rank * 64 + i, "actions") for i in range(num_envs)]'), ALL,
          "stream_seed"),
    *spoilt("15.1", SEEDS, [
        ("the clock", "again", "a run that is started again must play the same games",
         ("    first =", "    first = os.getpid() % 1000 * 4096 +")),
    ]),
    *spoilt("15.2", ADVANTAGES, [
        ("the time limit as a failure", "truncated normalised", "a truncated episode did not fail",
         ("* ~terminated[t]", "* ~end[t]")),
        ("a value after the fall", "terminated normalised", "after a terminated step nothing follows",
         (" * ~terminated[t]", "")),
        ("flows into the next episode", "truncated normalised", "into the next episode",
         ("later * ~end[t]", "later * ~terminated[t]")),
        ("nothing after the rollout", "open terminated truncated empty normalised", "its value is last_value",
         ('rollout["last_value"][None]', 'torch.zeros_like(rollout["last_value"])[None]')),
        ("lam alone", "open terminated truncated empty normalised",
         "the weight of a surprise one step later is gamma * lam", ("+ gamma * lam * later", "+ gamma * later")),
        ("begins is forgotten", "empty normalised",
         "begins says in which games the first row is one that nobody played",
         ('rollout["begins"][None]', 'torch.zeros_like(rollout["begins"])[None]')),
        ("no value in the rows that nobody played", "truncated normalised", "it stands in the row that nobody played",
         ("    following =", "    value = value * plays\n    following =")),
        ("the reward is forgotten", "open terminated truncated empty normalised",
         "it follows from the advantages, which are not right yet",
         ('surprise = rollout["reward"][t] + gamma', "surprise = gamma")),
        ("empty rows take part", "terminated truncated empty normalised",
         "rows in which nobody played have no advantage",
         ("    advantage = advantage * plays\n", "    plays = torch.ones_like(plays)\n")),
        ("each rank its own", "normalised talk", "each rank normalised its own rows",
         ("    dist.all_reduce(sums)\n", "")),
        ("means of means", "normalised", "means of the ranks' means",
         ("    sums = torch.stack([torch.tensor(len(rows)).double(), rows.sum(), rows.square().sum()])\n"
          "    dist.all_reduce(sums)\n    count, total, squares = sums\n    mean = total / count\n"
          "    deviation = (squares / count - mean**2).sqrt()\n",
          "    both = torch.stack([rows.mean(), rows.std(correction=0)])\n    dist.all_reduce(both)\n"
          "    mean, deviation = both / world_size\n")),
        ("the rows are sent", "talk", "send their count, their sum",
         ("    dist.all_reduce(sums)\n    count, total, squares = sums\n",
          "    everyone = [None] * world_size\n    dist.all_gather_object(everyone, rows)\n"
          "    rows = torch.cat(everyone)\n"
          "    count, total, squares = len(rows), rows.sum(), rows.square().sum()\n")),
        ("empty rows are counted", "normalised", "rows in which nobody played were counted",
         ("advantage[plays].double()", "advantage.flatten().double()")),
        ("the last rank does not take part", ALL, "ranks that wait for each other",
         ("    dist.all_reduce(sums)", "    if rank < world_size - 1:\n        dist.all_reduce(sums)"), 3.0),
    ]),
    Wrong("15.2", "errors swallowed", ADVANTAGES_SWALLOWING, ALL, "the last to the first"),
    Wrong("15.3", "a mean of means", STEP_MEAN_OF_MEANS, ("unequal", "clip", "loss", "none"),
          "this is the mean of the ranks' means"),
    *spoilt("15.3", STEP, [
        ("no talk", ALL, "the gradient of this rank's rows alone", ("    dist.all_reduce(message)\n", "")),
        ("the sum", "equal unequal none", "this is the sum over all rows", ("(part / count)", "part")),
        ("divided by the ranks", "equal unequal none", "divided by the number of ranks",
         ("(part / count)", "(part / world_size)")),
        ("clipped before the averaging", "clip", "clipped before the average",
         ("    params = list(model.parameters())\n",
          "    params = list(model.parameters())\n    for param in params:\n"
          "        param.grad /= max(1, len(action))\n    torch.nn.utils.clip_grad_norm_(params, max_norm)\n"
          "    for param in params:\n        param.grad *= len(action)\n"),
         ("    torch.nn.utils.clip_grad_norm_(params, max_norm)\n    optimizer", "    optimizer")),
        ("sums clipped before the averaging", "clip", "clipped before the average",
         ("    torch.nn.utils.clip_grad_norm_(params, max_norm)\n", ""),
         ("    count = torch", "    torch.nn.utils.clip_grad_norm_(params, max_norm)\n    count = torch")),
        ("not clipped", "clip", "the gradient was not clipped",
         ("    torch.nn.utils.clip_grad_norm_(params, max_norm)\n", "")),
        ("the wrong sign", ALL, "the sign", ("loss = -(", "loss = (")),
        ("old gradients stay, and are added up with the new ones", "equal unequal clip none",
         "optimizer.zero_grad() first", ("    optimizer.zero_grad()\n", "")),
        ("a rank without rows goes home", "none", "a rank without rows must still enter",
         ("    log_prob", "    if not len(action):\n        return 0.0\n    log_prob"), 3.0),
        ("the loss of this rank", "loss", "this is the mean over this rank's rows",
         ("return total / count", "return loss / max(1, len(action))")),
        ("no step", "equal unequal clip none", "nothing has", ("    optimizer.step()\n", "")),
    ]),
    *spoilt("15.3", STEP_BY_DDP, [
        ("divided twice", "equal unequal none", "and by the number of ranks as well",
         ("* world_size / count", "/ count"), ("(mean / world_size)", "mean")),
        ("a replica that nobody holds", "equal unequal clip none",
         "a DDP object that nobody holds is gone before backward",
         ("    replica = DistributedDataParallel(model)\n", ""),
         ("replica(state)", "DistributedDataParallel(model)(state)")),
        ("old gradients stay", "equal unequal clip none", "optimizer.zero_grad() first",
         ("    optimizer.zero_grad()\n", "")),
    ]),
]  # fmt: skip
