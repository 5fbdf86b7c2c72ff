"""The answer bank of lesson 18: programs converted and repaired in other ways, and the mistakes people make there.

Most wrong answers are edits of the notebook's solution. `tests/grading/test_banks.py` runs all of this.
"""

from ddp_course.rehearsal.exercise_programs import BROKEN, ONE_DEVICE
from tests.grading.bank import right, wrong
from tests.grading.submissions import solutions

IMPORTS = """
import re
from statistics import mean, median
from ddp_course.rehearsal.exercise_programs import BROKEN, ONE_DEVICE
"""

CONVERT, REPAIR, INCIDENT = solutions("18").values()


def as_text(answer: str, name: str) -> str:
    """Return an answer that says its program as one text, so that lines of the program can be edited."""
    given = {"ONE_DEVICE": ONE_DEVICE, "BROKEN": BROKEN}
    exec(answer, given)
    return f'def {name}():\n    return r"""{given[name]()}"""\n'


CONVERTED, REPAIRED = as_text(CONVERT, "program"), as_text(REPAIR, "repaired")

# --- 18.1 ------------------------------------------------------------------------------------------

CONVERT_RIGHT = r"""
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

CONVERT_WRONG = r"""
every epoch has the same order | model loss error | every epoch has the order of the first
    sampler.set_epoch(epoch) => pass
each rank has the whole batch | model loss error | the batch is 2 times as large
    BATCH // world_size => BATCH
all ranks train on all rows | model loss error | every rank trains on all rows
    sampler = DistributedSampler(train) => order = torch.Generator()
    import DataLoader, DistributedSampler, => import RandomSampler, DataLoader,
    sampler=sampler => sampler=RandomSampler(train, generator=order)
    sampler.set_epoch(epoch) => order.manual_seed(epoch)
the forward goes past the replica | model loss error | call the model that DistributedDataParallel has wrapped
    replica(x) => model(x)
the loss of one rank | loss | this is one rank's loss
    total, error = sums.tolist() => error = sums[1].item()
the error of one rank's rows | error | this is the error of one rank's rows
    total, error = sums.tolist() => total, error = sums[0].item(), error * len(test) / len(mine)
a mean of the ranks' means | error | the ranks' means count the same
    sums = torch.tensor([total, error], => sums = torch.tensor([total, error / len(mine) * len(test) / world_size],
the sampler of the test repeats rows | error | DistributedSampler repeats rows
    range(rank, len(test), world_size) => list(DistributedSampler(test, shuffle=False))
    total, error = sums.tolist() => total, error = sums.tolist()
            error *= len(test) / (len(mine) * world_size)
every rank evaluates all rows | error | every row is counted on every rank
    DataLoader(mine, 20) => DataLoader(test, 20)
every rank prints and saves | voice writer | print on one rank only
            if rank:\n            continue\n =>
every rank saves | writer | save on one rank only
            if rank:\n            continue\n =>
    print(f => rank or print(f
the rank on its node | error voice writer | print on one rank only
    rank, world_size = dist.get_rank() => rank, world_size = int(os.environ["LOCAL_RANK"])
    import sys => import os, sys
saved once, at the end | writer | save after each
    torch.save( => epoch < epochs - 1 or torch.save(
only rank 0 ends its group | end | on every rank
    dist.destroy => rank or dist.destroy
each rank says that it begins | voice | print on one rank only
    sampler = DistributedSampler(train) => sampler = DistributedSampler(train)
        print("rank", rank, "begins")
a dictionary around the state | model | and nothing around it
    torch.save(model.state_dict() => torch.save({"model": model.state_dict()}
names with module. | model | save the state of the model inside
    torch.save(model.state_dict() => torch.save(replica.state_dict()
another file | writer | the file is called "model.pt"
    "model.pt" => "last.pt"
nothing is averaged twice, but the sum is divided by nothing | loss error | the sums of all ranks are divided
    total / len(train) => total / len(sampler)
    error / len(test) => error / len(mine)
the group is never made | all | call dist.init_process_group() before anything
    dist.init_process_group("gloo") => pass
lines of a program | all | return the program as one text
    def program():
        return ONE_DEVICE.splitlines()
"""

# --- 18.2 ------------------------------------------------------------------------------------------

REPAIR_RIGHT = r"""
one forward for both parts, the means weighted, an early name for the state
    def repaired():
        return (
            BROKEN.replace("(nn.functional.mse_loss(model(x), y)", "(nn.functional.mse_loss(replica.forward(x), y)")
            .replace('{"model": ', '{"moments": optimizer.state_dict(), "model": ')
            .replace("        torch.save(", "        rank or torch.save(")
            .replace("        first =", "        optimizer.load_state_dict(saved['moments'])\n        first =")
            .replace("errors.append((model(x) - y).abs().mean())", "errors.append((model(x) - y).abs().flatten())")
            .replace("torch.stack(errors).mean()", "torch.cat(errors).sum()")
            .replace("error.item() / world_size", "error.item() / len(test)")
        )
"""

# Pickle sends a tensor by torch.save, into memory.
REPAIR_BY_ONE = r"""
rank 0 reads the state, and sends it as an object
    saved = torch.load("state.pt", weights_only=True) => box = [not rank and torch.load("state.pt", weights_only=True)]
            dist.broadcast_object_list(box, src=0)
            saved = box[0]
"""

REPAIR_WRONG = r"""
the forward past the replica stays | step resume error | look at each forward
    replica(x), y) / PARTS).backward()\n                optimizer => model(x), y) / PARTS).backward()
                    optimizer
every micro-batch under no_sync | step resume error | look at each forward
                else:\n =>             else:
                    replica.require_backward_grad_sync = False\n
the optimizer begins again | resume error | save and load the optimizer's state
    optimizer.load_state_dict(saved["optimizer"]) => pass
every micro-batch is sent | step | but the last belong inside replica.no_sync()
    with replica.no_sync(): => if True:
saved once, at the end | writer | save after each
    if rank == 0:\n            torch.save => if rank == 0 and epoch == epochs - 1:
                torch.save
another name for the epoch | writer | the keys ('model', 'epoch') stay
    "epoch" => "done"
a mean of the ranks' means | error | the ranks' means count the same
    dist.all_reduce(sums) => sums = sums[:1] / sums[1]
        dist.all_reduce(sums)
    (sums[0] / sums[1]).item() => sums.item() / world_size
the error of rank 0 alone | error | this is the error of one rank's rows
    dist.all_reduce(sums) => pass
every rank writes | writer | save on one rank only
    if rank == 0:\n            torch.save => if True:
                torch.save
every rank prints | voice | print on one rank only
    if rank == 0:\n            print => if True:
                print
the given program | step resume error writer | look at each forward
    def repaired():
        return BROKEN
"""

# --- 18.3 ------------------------------------------------------------------------------------------

INCIDENT_RIGHT = r"""
columns by position, means without the first step
    def faults_of(logs):
        table = [[line.split() for line in text.splitlines() if line.startswith("step")] for text in logs]
        answer = {}
        rows = lambda rank, epoch: [line[5] for line in table[rank] if line[3] == str(epoch)]
        if rows(0, 0) == rows(2, 0):
            answer["same-rows"] = None
        if "same-rows" not in answer and rows(1, 0) == rows(1, 2):
            answer["missing-set-epoch"] = None
        last = [of_rank[-1][9] for of_rank in table]
        odd = [rank for rank in range(3) if last.count(last[rank]) == 1]
        if odd:
            answer.update({"not-averaged": None} if len(odd) == 3 else {"drift": odd[0]})
        slow = [mean(float(line[11]) for line in of_rank[1:]) for of_rank in table]
        return answer | {"straggler": max(range(3), key=slow.__getitem__)}
"""

INCIDENT_WRONG = r"""
the rows are never compared between ranks | rows whole | all ranks have the same rows
    if rows[0] == rows[1]: => if False:
the rows of an epoch are never compared between epochs | rows whole | in the same order in every epoch
    elif rows[0][0] == rows[0][1]: => elif False:
a drift is blamed on rank 0 | weights whole | the rank is another one
    weights.count(each) == 1) => True)
a rank drifts that has other weights than rank 0 | weights whole | the rank is another one
    next(rank for rank, each in enumerate(weights) if weights.count(each) == 1) => 1 if weights[0] != weights[1] else 2
weights that are nearly the same count as the same | weights whole | from some step on the third has others
    weights = [step[2] for step in here] => weights = [round(float(step[2]) / 4) for step in here]
any difference is a drift | weights whole | no two ranks have the same weights
    if len(set(weights)) == 3: => if len(set(weights)) == 4:
    if len(set(weights)) == 2: => if len(set(weights)) > 1:
the fast rank is the straggler | time whole | the rank is another one
    own.index(max(own)) => own.index(min(own))
no time is looked at | time whole | compare `own` of the ranks
    if max(own) > 3 * median(own): => if False:
a list of names | all | return a dictionary from fault to rank
    return found => return sorted(found)
names of its own | all | no fault is called
    "straggler" => "slow"
"""

RIGHT = [
    *right("18.1", CONVERT, CONVERT_RIGHT),
    *right("18.2", REPAIR, REPAIR_RIGHT),
    *right("18.2", REPAIRED, REPAIR_BY_ONE),
    *right("18.3", INCIDENT, INCIDENT_RIGHT),
]
WRONG = [
    *wrong("18.1", CONVERTED, CONVERT_WRONG),
    *wrong("18.2", REPAIRED, REPAIR_WRONG),
    *wrong("18.3", INCIDENT, INCIDENT_WRONG),
]

# --- From strangers, who had seen the texts alone -------------------------------------------------

WRONG += wrong(
    "18.3",
    "",
    r"""
the slowest step of each rank decides, which is the first one | time whole | straggler is right
    def faults_of(logs):
        line = re.compile(r"step (\d+) epoch (\d+) rows (\S+) loss \S+ weights (\S+) own (\S+) ms")
        steps = [line.findall(text) for text in logs]
        faults = {}
        orders = [{e: [s[2] for s in mine if s[1] == e] for e in "01"} for mine in steps]
        if orders[0]["0"] == orders[1]["0"]:
            faults["same-rows"] = None
        elif orders[0]["0"] == orders[0]["1"]:
            faults["missing-set-epoch"] = None
        for here in zip(*steps):
            sums = [s[3] for s in here]
            if len(set(sums)) == 3:
                faults["not-averaged"] = None
                break
            if len(set(sums)) == 2:
                faults["drift"] = [sums.count(each) for each in sums].index(1)
                break
        own = [max(float(s[4]) for s in mine) for mine in steps]
        faults["straggler"] = own.index(max(own))
        return faults
""",
)
