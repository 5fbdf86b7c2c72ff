"""Programs are run as they are: a right one, one with many silent faults, one that hangs and one that cannot run."""

import json
import shutil
from pathlib import Path

import pytest

from ddp_course.commands import rehearse as command
from ddp_course.rehearsal.rehearse import rehearse

PROGRAMS = Path(__file__).parents[2] / "programs"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def rehearsed(folder: Path, *edits: tuple[str, str], arguments: tuple = ("--epochs", "3"), program: str = "ddp.py"):
    for path in PROGRAMS.glob("*.py"):
        shutil.copy(path, folder)
    text = (folder / program).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / program).write_text(text)
    before = sorted(folder.iterdir())
    found = rehearse(folder / program, arguments)
    assert sorted(folder.iterdir()) == before, "a rehearsal leaves the learner's folder as it was"
    return found, {each.fault: text.splitlines()[each.line - 1].strip() for each in found.findings}


def test_a_right_program_is_seen_to_be_right(tmp_path):
    found, named = rehearsed(tmp_path, arguments=("--epochs", "3", "--checkpoint", "run.pt"))
    assert named == {} and found.status == 0
    seen = {
        "same-rows",
        "missing-set-epoch",
        "different-start",
        "drift",
        "not-averaged",
        "unguarded-save",
        "inexact-resume",
    }
    assert seen | {"lr-not-scaled", "prints-by-every-rank"} <= set(found.right)
    assert {"local-batchnorm", "same-augmentation", "module-prefix"} <= set(found.unseen)


def test_a_program_that_starts_its_ranks_itself_is_rehearsed_too(tmp_path):
    found, named = rehearsed(tmp_path, arguments=("2", "--epochs", "2"), program="ddp_spawn.py")
    assert named == {} and {"same-rows", "not-averaged", "drift"} <= set(found.right)


SLOW_AND_ALIKE = """class Noisy(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(0.002)
        x, y = self.rows[index]
        return x + 0.01 * torch.randn(x.shape), y


def main():
    torch.manual_seed(0)
"""


DIVIDED = "            for p in model.parameters():\n                p.grad /= world_size\n"
PADDED = """    sampler = DistributedSampler(data, shuffle=False)
    for x, y in DataLoader(data, batch_size=256, sampler=sampler):
"""


def test_silent_faults_are_named_on_their_lines(tmp_path):
    found, named = rehearsed(
        tmp_path,
        ("import os\n", "import os\nimport time\n"),
        ("def main():\n", SLOW_AND_ALIKE),
        ("DataLoader(train,", "DataLoader(Noisy(train),"),
        ("BATCH // world_size", "BATCH"),
        ("        sampler.set_epoch(epoch)  # 4: a new order in each epoch\n", ""),
        ("            optimizer.step()\n", f"{DIVIDED}            optimizer.step()\n"),
        ("    test = Subset(test, range(rank, len(test), world_size))\n", ""),
        ("    for x, y in DataLoader(data, batch_size=256):\n", PADDED),
        ('        optimizer.load_state_dict(saved["optimizer"])\n', ""),
        ("if rank == 0:  # 5: one rank prints", "if True:"),
        ("[device] if cuda else None)", "[device] if cuda else None, find_unused_parameters=True)"),
        arguments=("--epochs", "3", "--checkpoint", "run.pt"),
    )  # fmt: skip
    assert named.keys() == {
        *("same-augmentation", "slow-loading", "missing-set-epoch", "averaged-twice", "padded-evaluation"),
        "inexact-resume",
        *("prints-by-every-rank", "find-unused-without-need", "lr-not-scaled"),
    }
    assert found.status == 1 and not found.failure
    lines = {
        "same-augmentation": "return x + 0.01",
        "missing-set-epoch": "for x, y in loader",
        "padded-evaluation": "sampler = DistributedSampler(data",
        "inexact-resume": "model.load_state_dict(",
        "averaged-twice": "p.grad /= world_size",
        "prints-by-every-rank": 'print(f"epoch',
    }
    assert {fault: line for fault, line in lines.items() if not named[fault].startswith(line)} == {}


@pytest.mark.parametrize(
    ("edit", "faults"),
    [
        (("(replica(x.to(device))", "(model(x.to(device))"), {"past-the-replica"}),
        ((", sampler=sampler", ", shuffle=True"), {"same-rows"}),
    ],
    ids=["the plain model is called", "no sampler"],
)
def test_ranks_that_do_not_work_together(tmp_path, edit, faults):
    assert rehearsed(tmp_path, edit)[1].keys() == faults


@pytest.mark.parametrize("style", ["gan", "resume", "evalgather"])  # two optimizers; a state gathered; padding cut off
def test_right_programs_of_other_styles_are_not_accused(style, tmp_path):
    shutil.copy(Path(__file__).parent / "right" / f"{style}.py", tmp_path)
    found = rehearse(tmp_path / f"{style}.py")
    assert (found.findings, found.failure) == ([], "")
    assert {"same-rows", "not-averaged", "drift", "prints-by-every-rank"} <= set(found.right)


def test_a_hang_ends_and_its_line_is_named(tmp_path):
    total = "        dist.all_reduce(total)\n"
    found, named = rehearsed(tmp_path, (total, f"        if rank == 0:\n    {total}"))
    assert named == {"collective-under-rank-0": "dist.all_reduce(total)"}
    assert found.status == 1 and "all_reduce #" in found.failure


def test_the_command_says_that_a_program_could_not_be_run(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\nraise KeyError('rows')\n")
    assert command.main([str(script)]) == 2
    said = capsys.readouterr().out
    assert "did not run to its end on 2 ranks" in said and "KeyError: 'rows'" in said and "train.py, line 3" in said
    assert command.main(["--json", str(script)]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == 2 and "rows" in told["failure"] and told["findings"] == []
    assert command.main([str(tmp_path / "none.py")]) == 2 and "cannot be rehearsed" in capsys.readouterr().err
