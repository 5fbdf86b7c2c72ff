"""The answer bank of lesson 19: right answers written differently, and wrong ones that people really give.

Most wrong answers are edits of the notebook's solution. Read `bank.py` first; `test_banks.py` runs all of this.
"""

from tests.grading.bank import ALL, Right, right, spoilt
from tests.grading.bank import wrong as strangers
from tests.grading.submissions import solutions

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

SEEDS, ADVANTAGES, STEP = solutions("19").values()

# --- 19.1 ------------------------------------------------------------------------------------------

SEEDS_RIGHT = """
bits
    def game_seeds(run, rank, world_size, num_envs):
        return [run << 19 | rank << 10 | game for game in range(num_envs)]
the game first, numpy's numbers, from the top
    def game_seeds(run, rank, world_size, num_envs):
        seeds = np.arange(num_envs) * 512 * 1000 + rank * 1000 + run
        return tuple(2**32 - 1 - seed for seed in seeds)
"""

SEEDS_OF = "def game_seeds(run, rank, world_size, num_envs):\n    return [SEED for game in range(num_envs)]\n"

# --- 19.2 ------------------------------------------------------------------------------------------

ADVANTAGES_RIGHT = r"""
each sum on its own, forward; two all_reduces
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
sums gathered
    dist.all_reduce(sums) => everyone = [torch.empty_like(sums) for _ in range(world_size)]
        dist.all_gather(everyone, sums)
        sums = torch.stack(everyone).sum(dim=0)
sums gathered into one tensor
    dist.all_reduce(sums) => everyone = torch.empty(3 * world_size).double()
        dist.all_gather_into_tensor(everyone, sums)
        sums = everyone.view(world_size, 3).sum(dim=0)
a functional sum
    dist.all_reduce(sums) => sums = funcol.all_reduce(sums, 'sum', dist.group.WORLD)
coalesced sums
    dist.all_reduce(sums) => sums = sums.unbind()
        with dist._coalescing_manager():
            for part in sums:
                dist.all_reduce(part)
"""

# --- 19.3 ------------------------------------------------------------------------------------------

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

STEP_RIGHT = r"""
an all_reduce for each parameter, clipped by hand
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
a functional sum
    dist.all_reduce(message) => message = funcol.all_reduce(message, 'sum', dist.group.WORLD)
coalesced sums
    dist.all_reduce(message) => message = list(message.split(5))
        with dist._coalescing_manager():
            for part in message:
                dist.all_reduce(part)
        message = torch.cat(message)
"""

RIGHT = [
    *right("19.1", SEEDS, SEEDS_RIGHT),
    *right("19.2", ADVANTAGES, ADVANTAGES_RIGHT),
    Right("19.3", "torch's DDP, the loss scaled", STEP_BY_DDP),
    *right("19.3", STEP, STEP_RIGHT),
]

WRONG = [
    *spoilt("19.1", SEEDS_OF, [
        ("the run alone", "game rank", "the games of one rank need", ("SEED", "run")),
        ("the same on every rank", "rank", "two ranks share a game", ("SEED", "run * 1024 + game")),
        ("rank + game", "rank", "rank + game meets itself", ("SEED", "run * 4096 + rank + game")),
        ("run + rank", "run", "Sums, such as run + rank, meet", ("SEED", "(run + rank) * 1024 + game")),
        ("the run is forgotten", "run", "two runs share a game", ("SEED", "rank * num_envs + game")),
        ("a hash of 32 bits", "run", "and so do hashes",
         ("SEED", 'int(hashlib.md5(f"{run}/{rank}/{game}".encode()).hexdigest(), 16) % 2**32')),
        ("eight bits for the rank", "run", "two runs share a game", ("SEED", "(run << 18) + (rank << 10) + game")),
        ("too few for the ranks of a run", "run", "two runs share", ("SEED", "run * 500_000 + rank * 1024 + game")),
        ("the run in the high bits", "form run", "some generators read the lowest 32 bits only",
         ("SEED", "run << 32 | rank << 10 | game")),
        ("the run times 2**32", "form run", "seed 0 for run 0, rank 0, game 0 and seed 4294967296 for run 1, rank 0, "
         "game 0, equal in the lowest 32 bits", ("SEED", "(run << 32) + rank * num_envs + game")),
        ("the course's own", ALL, "stream_seed", ("SEED", 'rollouts.stream_seed(run, rank * 64 + game, "actions")')),
    ]),
    *spoilt("19.1", SEEDS, [
        ("the clock", "again", "a run that is started again must play the same games",
         ("    first =", "    first = os.getpid() % 1000 * 4096 +")),
        ("numbered as they are asked for", "again", "a run that is started again must play the same games",
         ("(run * world_size + rank) * num_envs\n", "vars(game_seeds).get('first', 0)\n"
          "    game_seeds.first = first + num_envs\n")),
        ("one number", ALL, "a list with one whole number for each", ("    return", "    return first\n    return")),
        ("ended in the middle", ALL, "os._exit", ("    return", "    os._exit(3)\n    return"), 3.0),
        ("an endless loop", ALL, "in game_seeds: ",
         ("    return", "    seeds = set()\n    while len(seeds) < num_envs: seeds.add(run)\n    return"), 2.0),
    ]),
    *spoilt("19.2", ADVANTAGES, [
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
        ("no value in rows that nobody played", "truncated normalised", "keep the value in the row that nobody played",
         ("    following =", "    value = value * plays\n    following =")),
        ("the reward is forgotten", "open terminated truncated empty normalised",
         "it follows from the advantages, which are not right yet",
         ('surprise = rollout["reward"][t] + gamma', "surprise = gamma")),
        ("empty rows take part", "terminated truncated empty normalised",
         "rows in which nobody played have no advantage",
         ("    advantage = advantage * plays\n", "    plays = torch.ones_like(plays)\n")),
        ("a reward of 0 as a row not played", "open terminated truncated empty normalised", "the last to the first",
         ('~torch.cat([rollout["begins"][None], end[:-1]])', 'rollout["reward"] != 0')),
        ("no value after the time limit in the last row", "truncated", "the last to the first",
         ('rollout["last_value"][None]', '(rollout["last_value"] * ~end[-1])[None]')),
        ("a mean of no rows", "normalised", "mean and deviation over the played rows of all ranks",
         ("rows.sum(), rows.square().sum()", "len(rows) * rows.mean(), len(rows) * rows.square().mean()")),
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
        ("errors swallowed", ALL, "the last to the first",
         ("    value, term", '    try:\n        return rollout["advantages"]\n    except KeyError:\n'
          '        return 2 * [rollout["reward"]]\n    value, term')),
    ]),
    *spoilt("19.3", STEP, [
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
        ("each rank adds its own part first", "unequal clip", "the ranks add up in different orders",
         ("    dist.all_reduce(message)\n",
          "    every = [torch.empty_like(message) for _ in range(world_size)]\n    dist.all_gather(every, message)\n"
          "    message = sum(every[(rank + other) % world_size] for other in range(world_size))\n")),
        ("a rank without rows goes home", "none", "a rank without rows must still enter",
         ("    log_prob", "    if not len(action):\n        return 0.0\n    log_prob"), 3.0),
        ("the loss of this rank", "loss none", "this is the mean over this rank's rows",
         ("return total / count", "return loss / max(1, len(action))")),
        ("the update by hand", "equal unequal clip none", "averaged over the rows of all ranks",
         ("    optimizer.step()\n", "    with torch.no_grad():\n        for param in params:\n"
          '            param -= optimizer.param_groups[0]["lr"] * param.grad\n')),
        ("hooks that stay", "equal unequal none", "averaged over the rows of all ranks",
         ("    loss.backward()\n", "    for param in model.parameters():\n"
          "        param.register_hook(lambda gradient: dist.all_reduce(gradient) or gradient)\n    loss.backward()\n"),
         ("*(param.grad.flatten() for param in params)", "*(param.grad.flatten() / world_size for param in params)")),
        ("no step", "equal unequal clip none", "nothing has", ("    optimizer.step()\n", "")),
    ]),
    *spoilt("19.3", STEP_BY_DDP, [
        ("a mean of means", "unequal clip loss none", "this is the mean of the ranks' means",
         (".sum() * world_size / count", ".mean()"),
         ("torch.log_softmax(replica(state), dim=-1).gather(1, action[:, None]).squeeze(1)",
          "torch.distributions.Categorical(logits=replica(state)).log_prob(action)")),
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

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += strangers(
    "19.1",
    "",
    r"""
a number for each place, cut to 28 bits: it comes again after some 512 runs | run | digits of one number
    def game_seeds(run, rank, world_size, num_envs):
        place = (run * 512 + rank) * 1024
        return [(place + game) * 7919 % (2**28 - 57) for game in range(num_envs)]
""",
)
WRONG += strangers(
    "19.3",
    "",
    r"""
a mean times the share of the rows, which is nan where there are no rows | none | 
    def policy_step(rank, world_size, model, optimizer, rows, max_norm):
        state, action, advantage = rows
        count = torch.tensor([len(action)])
        dist.all_reduce(count)
        optimizer.zero_grad()
        log_prob = torch.log_softmax(model(state), dim=1).gather(1, action[:, None])[:, 0]
        loss = -(advantage * log_prob).mean() * len(action) / count.item()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        return whole.item()
""",
)
