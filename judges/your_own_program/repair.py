"""11.3 `repaired()`: are the four mistakes of a given program gone, also after it has been stopped and started again?

The mistakes: a forward that goes past the replica, an optimizer that begins again, a mean of means, a file that all
ranks write. Read `running.py` first. Read next: `incident.py`.
"""

from __future__ import annotations

import tempfile
from random import Random

from ddp_course.grading.differential import exercise
from ddp_course.grading.vocabulary.rounds import Round, Seen
from judges.your_own_program.running import act, printed, saved, voices, writers

STEPS = 10  # of an epoch


def cases(rng: Random, folder: str) -> list[Round]:
    """An epoch or two on two ranks, then the same program again on three, up to four epochs: so no check asks for the
    second alone.
    """
    first, seed = rng.choice((1, 2)), rng.randint(10, 99)
    return [Round(2, [("begun", (folder, first, seed))]), Round(3, [("again", (folder, 4, seed))])]


def step(seen: Seen) -> list:
    """The weights; and gradients travel in a step's last backward pass alone."""
    n_sent, once = sum(call.in_backward for call in seen["calls"]), STEPS * seen.case[1]
    sent = "at most once" if n_sent <= once else f"{n_sent / once:g} times"
    return [f"gradients sent {sent} in a step", saved("model.")(seen)]


MISTAKES = r"""
past the replica | step resume error
| rank 0 learns from its own rows: each forward goes through the replica, the last one outside of no_sync
    "mse_loss(replica(x), y)" => "mse_loss(model(x), y)"
the optimizer begins again | resume error | the momentum begins again; save and load the optimizer's state, too
    optimizer.load_state_dict(saved["optimizer"]) => pass
an epoch twice | resume error voice writer | the epoch that was saved is done: go on with the next one
    return text => return text.replace('first = saved["epoch"]', 'first = saved["epoch"] - 1')
sent with each micro-batch | step | all micro-batches of a step but the last belong inside replica.no_sync()
    return text => return text.replace("with replica.no_sync():", "if True:")
saved once, at the end | writer | a run may be stopped after any epoch: save after each
    if rank == 0: => if rank == 0 and epoch == epochs - 1:
another name for the epoch | writer | the keys 'model' and 'epoch' stay
    return text => return text.replace('"epoch"', '"done"')
names with module. | step resume | save the plain model's state: replica.module.state_dict(), or model.state_dict()
    "model": model.state_dict(), "optimizer" => "model": replica.state_dict(), "optimizer"
    return text => return text.replace("model.load", "replica.load")
a mean of means | error | the ranks' means count the same, though one has more rows; reduce sums and counts, divide once
    "    dist.all_reduce(sums)\n" => "    sums = sums / sums[1]\n    dist.all_reduce(sums)\n"
the batches' means | error | each batch counts the same, though the last has fewer rows: add up errors and rows
    (model(x) - y).abs().sum(), len(x) => (model(x) - y).abs().mean(), 1
rank 0's error | error | this is the error of one rank's rows; reduce sums and counts
    "    dist.all_reduce(sums)\n" => ""
every rank writes | writer | save on one rank only: if dist.get_rank() == 0
    '''        if rank == 0: => '''        if True:
every rank prints | voice | print on one rank only: if dist.get_rank() == 0
    return text => return text.replace("if rank == 0:\n            print", "if True:\n            print")
rank 0 alone loads | resume error voice writer | every rank must call the same collectives | hangs
    return text => return text.replace('os.path.exists("state.pt")', 'rank == 0 and os.path.exists("state.pt")')
the given program | step resume error writer | each forward goes through the replica | tests
    def repaired():
        return BROKEN
two of four, and the names of the replica | step resume error | save the plain model's state | tests
    def repaired():
        text = BROKEN.replace("mse_loss(model(x)", "mse_loss(replica(x)").replace("torch.save(", "rank or torch.save(")
        return text.replace('"model": model', '"model": replica').replace("model.load", "replica.load")
"""

RIGHT = r"""
the means weighted, the state of the optimizer as "moments"
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
rank 0 reads the state, and sends it as an object
    return text => return text.replace(
        '        saved = torch.load("state.pt", weights_only=True)',
        '        box = [not rank and torch.load("state.pt", weights_only=True)]\n'
        '        dist.broadcast_object_list(box, src=0)\n        saved = box[0]')
"""

REPAIR = exercise(
    *("11.3", "Repair a program", "repaired", 25),
    cases=cases,
    act=act,
    within=tempfile.TemporaryDirectory,
    mistakes=MISTAKES,
    right=RIGHT,
    tolerance=5e-5,
    checks={
        "step": ("two ranks train as one process does", 2, "begun", step,
                 "the two micro-batches of all ranks together make one process's batch, and its mean gradient"),
        "resume": ("a run that was stopped and started again ends with the same weights", 2, "begun again",
                   saved("model."),
                   "everything that the next step depends on is saved, and loaded on every rank"),
        "error": ("each test row counts the same", 1, "begun again", printed("error"),
                  'the sum over all rows of all ranks, divided by their number, as "epoch 0: error 0.123456"'),
        "voice": ("one rank prints, a line for each epoch", 1, "begun again", voices, "one line for each epoch"),
        "writer": ("one rank saves", 1, "begun again", writers("state.pt", "model", "epoch"),
                   "one rank saves state.pt after each epoch, with the keys 'model' and 'epoch'"),
    },
    hints={"absent|disagree|cut-off|limit": "every rank must call the same collectives, also after a new start"},
)  # fmt: skip
