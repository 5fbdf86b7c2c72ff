"""11.1 `program()`: does the learner's program for several ranks do what the one for one device did?

The solution's numbers are those of one process, up to rounding. Read `running.py` first. Read next: `repair.py`.
"""

from __future__ import annotations

import tempfile
from random import Random

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.programs import HINTS
from ddp_course.grading.vocabulary.rounds import Round, Seen
from judges.your_own_program.running import act, printed, saved, voices, writers

STEPS = 10  # of an epoch


def cases(rng: Random, folder: str) -> list[Round]:
    """Two and three ranks: 101 test rows divide by neither."""
    seed = rng.randint(10, 99)
    return [Round(size, [(name, (f"{folder}/{name}", 2, seed))]) for name, size in (("two", 2), ("three", 3))]


def trained(seen: Seen) -> list:
    """The weights that were saved last; and whether the ranks have shared the steps, or each has taken them alone."""
    often = "in each step" if len(seen["calls"]) >= STEPS * seen.case[1] else "less often than once a step"
    return [f"the ranks communicate {often}", saved()(seen)]


MISTAKES = r"""
one order for all epochs | model loss error | every epoch has the order of the first; call sampler.set_epoch(epoch)
    sampler.set_epoch(epoch) => pass
the whole batch on each rank | model loss error
| the batch is too large by the world size; a rank's is BATCH // world_size
    BATCH // world_size => BATCH
all rows on all ranks | model loss error | every rank trains on all rows; give the loader a DistributedSampler
    DistributedSampler(train) => DistributedSampler(train, 1, 0)
past the replica | model loss error
| rank 0 learns from its own rows; call the model that DistributedDataParallel has wrapped
    replica(x) => model(x)
one rank's loss by all rows | loss | this is one rank's sum; all_reduce it before you divide by the number of all rows
    total, error = sums.tolist() => error = sums[1].item()
one rank's error | error | this is the error of one rank's rows; reduce sums and counts
    total, error = sums.tolist() => total, error = sums[0].item(), error * len(test) / len(mine)
a mean of means | error | the ranks' means count the same, though one has more rows; reduce sums and counts, divide once
    torch.tensor([total, error], => torch.tensor([total, error / len(mine) * len(test) / world_size],
all test rows on all ranks | error | every row is counted on every rank
    DataLoader(mine, 20) => DataLoader(test, 20)
every rank prints and saves | voice writer | print on one rank only: if dist.get_rank() == 0
    if rank: => if False:
every rank saves | writer | save on one rank only: if dist.get_rank() == 0
    if rank: => if False:
    return text => return text.replace("print(f", "rank or print(f")
the rank on its node | error voice writer
| LOCAL_RANK is the rank on its node, and counts from 0 on each: dist.get_rank()
    dist.get_rank(), => int(os.environ["LOCAL_RANK"]),
    import torch.distributed => import os, torch.distributed
saved once, at the end | writer | a run may be stopped after any epoch: save after each
    return text => return text.replace("torch.save(", "epoch < epochs - 1 or torch.save(")
a dictionary around the state | model | save the state of the model inside, and nothing around it: model.state_dict()
    return text => return text.replace("torch.save(model.state_dict()", "torch.save({'model': model.state_dict()}")
names with module. | model | save the state of the model inside: replica.module.state_dict(), or model.state_dict()
    return text => return text.replace("torch.save(model.", "torch.save(replica.")
rank 0 ends its group | end | call dist.destroy_process_group(), on every rank
    dist.destroy => rank or dist.destroy
the group is never made | all | call dist.init_process_group() before anything
    dist.init_process_group("gloo") => pass
rank 0 alone reduces | all | every rank must call the same collectives | hangs
    dist.all_reduce(sums) => rank or dist.all_reduce(sums)
each rank for itself | model | the ranks share no work: each has all rows, and no gradient travels
    def program():
        text = ONE_DEVICE.replace("import torch\n", "import torch\nimport torch.distributed as dist\n", 1)
        text = text.replace("    train, test =", "    dist.init_process_group('gloo')\n    train, test =")
        for call in ("print(f", "torch.save("):
            text = text.replace(call, "dist.get_rank() or " + call)
        return text + "\n    dist.destroy_process_group()\n"
lines | all | return the program as one text | tests
    def program():
        return ONE_DEVICE.splitlines()
the given program | all | call dist.init_process_group() before anything | tests
    def program():
        return ONE_DEVICE
"""

RIGHT = r"""
rows by slices of one permutation, the last rank speaks, another name for the file at first
    def program():
        top, _, _ = ONE_DEVICE.partition("def main")
        lines = [
            "import os",
            "import torch.distributed as td",
            "def own(rows):",
            "    return rows[td.get_rank() :: td.get_world_size()]",
            "td.init_process_group(backend='gloo')",
            "n, chief = td.get_world_size(), td.get_rank() == td.get_world_size() - 1",
            "epochs, seed = map(int, sys.argv[1:])",
            "train, test, net = make_data(480, seed), make_data(101, seed + 1), make_model(seed)",
            "ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)",
            "sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)",
            "for epoch in range(epochs):",
            "    order = own(torch.randperm(480, generator=torch.Generator().manual_seed(epoch)))",
            "    losses = []",
            "    for rows in order.split(BATCH // n):",
            "        x, y = train[rows]",
            "        losses.append((ddp(x) - y).pow(2).mean())",
            "        sgd.zero_grad()",
            "        losses[-1].backward()",
            "        sgd.step()",
            "    mean = torch.stack(losses).detach().mean() / n",
            "    td.all_reduce(mean)",
            "    x, y = test[own(torch.arange(101))]",
            "    wrong = (net(x) - y).detach().abs().sum()",
            "    td.reduce(wrong, n - 1)",
            "    if chief:",
            "        print(f'epoch {epoch}: loss {mean:.6f}, error {wrong / 101:.6f}', flush=True)",
            "        state = {name.removeprefix('module.'): value for name, value in ddp.state_dict().items()}",
            "        torch.save(state, 'model.pt.part')",
            "        os.replace('model.pt.part', 'model.pt')",
            "td.barrier()",
            "td.destroy_process_group()",
        ]
        return top + "\n".join(lines)
"""

CONVERT = exercise(
    *("11.1", "Convert a program", "program", 30),
    cases=cases,
    act=act,
    within=tempfile.TemporaryDirectory,
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=5e-5,
    checks={
        "model": ("two and three ranks save the weights of one process", 3, "two three", trained,
                  "the ranks together compute one process's step: the same global batch, in the same order, its mean"),
        "loss": ("the printed losses are those of one process", 1, "two three", printed("loss"),
                 'the sum over all rows of all ranks, divided by their number, as "epoch 0: loss 0.123456, ..."'),
        "error": ("each test row is counted once", 1, "two three", printed("error"),
                  'the sum over all rows of all ranks, divided by their number, as "epoch 0: ..., error 0.123456"'),
        "voice": ("one rank prints", 1, "two three", voices, "one line for each epoch, and no other, from one rank"),
        "writer": ("one rank saves", 1, "two three", writers("model.pt"), 'one rank saves "model.pt" after each epoch'),
        "end": ("each rank ends its group", 1, "two three", lambda seen: f"ended: {seen['ended']}",
                "call dist.destroy_process_group(), on every rank, when the program ends"),
    },
    hints=HINTS,
)  # fmt: skip
