"""What is certified of programs as they are: a right one, and ones that are wrong in one thing. Values, not words."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddp_course.commands import rehearse as command
from ddp_course.rehearsal import watch_certified
from ddp_course.rehearsal.certificate import Certificate, power_of_ten
from ddp_course.rehearsal.certify import certify, resume, weights
from ddp_course.rehearsal.notes import Notes
from ddp_course.rehearsal.watch_certified import CertifiedWatch, _numbered

pytest_plugins = ["pytester"]
PROGRAMS = Path(__file__).parents[2] / "programs"

WEIGHTS = {"equal": True, "equal_to": 1e-6, "largest_difference": 4e-7, "steps": 90, "reason": ""}
SAMPLES = {"once": True, "rows": 2880, "repeated": 0, "missing": 0, "epochs": 2, "reason": ""}
RESUME = {"equal": True, "largest_difference": 0.0, "reason": ""}
ROUNDED = {"equal": False, "largest_difference": 1e-8, "reason": "m differs, by 1e-8"}
RIGHT = Certificate("train.py", "0", [], "2", 2, WEIGHTS, SAMPLES, RESUME, findings=[], failure="")


def test_a_number_is_rounded_up_to_a_power_of_ten():
    assert [power_of_ten(x) for x in (4e-7, 1e-6, 1.0001e-6, 0.3)] == [1e-6, 1e-6, 1e-5, 1.0]


def test_a_line_claims_what_was_measured():
    assert RIGHT.line() == "2 ranks equal 1 process to 1e-6 over 90 steps; resumed run bit-equal; samples each once"
    assert Certificate(**json.loads(RIGHT.as_json())) == RIGHT
    RIGHT.check(equal_to=5e-7, samples_once=True, resumed_equal=True)


@pytest.mark.parametrize(
    ("part", "seen", "asked", "said"),
    [
        ("weights", {}, {"equal_to": 3e-7}, "2 ranks equal 1 process to 1e-6 over"),
        ("weights", {"equal": False, "equal_to": None, "reason": "by 0.3"}, {}, "2 ranks differ from 1 process: by"),
        ("weights", {"equal": None, "equal_to": None, "reason": "dropout"}, {"equal_to": 1e-3}, "not compared with"),
        ("samples", {"once": False, "repeated": 7}, {"samples_once": True}, "samples: 7 of 2880 repeated, 0 missing"),
        ("samples", {"once": None, "reason": "no loader"}, {"samples_once": True}, "samples not counted: no loader"),
        ("resume", {"equal": False, "reason": "m differs"}, {}, "resumed run differs: m differs"),
        ("resume", ROUNDED, {"resumed_equal": True}, "resumed run differs: m differs, by 1e-8"),
        ("resume", {"equal": None, "reason": "no save"}, {"resumed_equal": True}, "resumed run not compared: no save"),
    ],
)
def test_a_check_names_what_differs_and_takes_nothing_unseen_for_right(part, seen, asked, said):
    other = replace(RIGHT, **{part: getattr(RIGHT, part) | seen})
    with pytest.raises(AssertionError) as error:
        other.check(**asked)
    assert said in str(error.value) and str(error.value).count("\n") == 1
    if asked:
        other.check()


def resumed(folder: Path, whole: dict, again: dict, model: torch.jit.ScriptModule | None = None) -> Certificate:
    """What is certified of a program of which two runs have left these states, and a model if there is one."""
    for run, saved in (("whole", whole), ("resumed", again)):
        (folder / run).mkdir()
        torch.save(saved, folder / run / "run.pt")
        if model:
            torch.jit.save(model, folder / run / "model.pt")
    runs = [[{"what": "weights", "sketch": step} for step in steps] for steps in (range(9), range(5), range(4))]
    runs = {name: (Notes([facts], []), "") for name, facts in zip(("whole", "killed", "again"), runs, strict=True)}
    stage = SimpleNamespace(runs=runs, folder=folder, script=folder / "train.py", resume_with=[])
    return replace(RIGHT, resume=resume(stage))


NEAR = {"w": torch.tensor([1.0, 2.0 + 2**-22]), "loss": 0.5 + 2e-9}


@pytest.mark.parametrize(
    ("edit", "named"),
    [({"step": 7}, "['step']"), ({"count": torch.tensor(7)}, "['count']"), ({"w": torch.ones(3)}, "['w']"),
     ({"w": torch.tensor([1.0, torch.nan])}, "['w']"), ({"more": None}, "['more']")],
    ids=["step", "integer tensor", "shape", "nan", "another key"],
)  # fmt: skip
def test_a_resume_that_differs_by_more_than_rounding_fails_whatever_else_is_rounded(tmp_path, edit, named):
    whole = {"loss": 0.5, "w": torch.tensor([1.0, 2.0]), "step": 6, "count": torch.tensor(6), "best": float("nan")}
    found = resumed(tmp_path, whole, whole | NEAR | edit)
    assert found.resume == {"equal": False, "largest_difference": None, "reason": f"run.pt{named} differs"}
    with pytest.raises(AssertionError, match="resumed run differs"):
        found.check()
    (near := tmp_path / "near").mkdir()
    found = resumed(near, whole, whole | NEAR)
    assert found.resume["largest_difference"] == 2**-23 and found.resumed_equal is False
    found.check()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_cannot_be_read_is_not_compared_and_hides_no_difference(tmp_path):
    model = torch.jit.script(torch.nn.Linear(1, 1))
    found = resumed(tmp_path, {"step": 6}, {"step": 6}, model)
    assert found.resumed_equal is None and found.resume["reason"].startswith("model.pt cannot be read")
    (other := tmp_path / "other").mkdir()
    assert resumed(other, {"step": 6}, {"step": 7}, model).resumed_equal is False


@pytest.mark.parametrize(
    ("numbers", "inside"),
    [([2, 0], [2, 0]), ([np.array([2, 0]), np.array([1, 3])], None), (["a", "b"], None), ([(0, "a"), (1, "b")], None),
     ([None, None], None)],
    ids=["numbers", "arrays", "texts", "tuples", "none"],
)  # fmt: skip
def test_numbers_of_rows_are_noted_if_they_are_numbers(numbers, inside):
    noted = {"drawn": inside, "of": [0, 1, 2], "contents": [0.5, 0.7]}
    assert _numbered([5, 6, 7], numbers, [0.5, 0.7]) == (noted if inside else {})


@pytest.mark.parametrize(
    ("of_all", "of_one", "steps", "reason"), [(48, 16, 2, ""), (8, 16, 1, ""), (48, 15, 0, "too large: 0 MB")]
)
def test_the_first_step_is_compared_unless_a_state_is_too_large(tmp_path, monkeypatch, of_all, of_one, steps, reason):
    monkeypatch.setattr(watch_certified, "MOST_BYTES", of_all)
    monkeypatch.setattr(watch_certified, "MOST_OF_A_STATE", of_one)
    stage = SimpleNamespace(notes=lambda name: tmp_path / name, runs={})
    for name in ("one", "whole"):
        stage.runs[name] = Notes([[]], []), ""
        (tmp_path / name).mkdir()
        weight = torch.tensor([1.0, 2.0])  # 16 bytes in double precision
        watch = CertifiedWatch(SimpleNamespace(trained={0: [weight]}), str(tmp_path / name / "rank0.weights"))
        for _ in range(5):
            watch.keep()
            weight += 1
        watch.file.close()
    seen = weights(stage)
    assert seen["steps"] == steps and seen["equal"] is (True if steps else None) and seen["reason"].startswith(reason)


def certified(folder: Path, *edits: tuple[str, str], program: str = "train.py", arguments=(), **more) -> Certificate:
    text = (PROGRAMS / program).read_text().replace("range(5)", "range(2)")
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / program).write_text(text)
    return certify(folder / program, arguments, **more).certificate


def faults(certificate: Certificate) -> list[str]:
    return [each["fault"] for each in certificate.findings]


BACKWARD = "        loss.backward()  # computes the gradients, and averages them over the ranks\n"
DIVIDED = "        for p in model.parameters():\n            p.grad /= dist.get_world_size()\n"
ODD = [("pixels[:1440]", "pixels[:1439]"), ("labels[:1440]", "labels[:1439]")]
ROWS = "digits = TensorDataset(x, y)"
SHUFFLED = "torch.manual_seed(dist.get_rank())\norder = torch.randperm(1440)\ndigits = TensorDataset(x[order], y)"
AUGMENTED = """class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        return images[index] + torch.rand(64), labels[index]

images = x
digits = Noisy()"""
NOISY = "nn.functional.dropout(replica(x), 0.2)"
LONGER = "its 90 steps are 180 on 2 ranks"


@pytest.mark.parametrize(
    ("edits", "equal", "reason", "counts", "named"),
    [
        ([], True, "", (2880, 0, 0), []),
        ([(BACKWARD, BACKWARD + DIVIDED)], False, "from step 1 on", (2880, 0, 0), ["averaged-twice"]),
        ([(", sampler=sampler)", ", shuffle=True)")], None, f"{LONGER}; step 2", (5760, 2880, 0), ["same-rows"]),
        (ODD, None, "step 45 has other", (2880, 2, 0), []),
        ([*ODD, ("digits, seed=0", "digits, drop_last=True")], None, "step 45 has other", (2876, 0, 2), []),
        ([(ROWS, SHUFFLED)], None, "step 2 has other", (2880, 728, 0), ["same-rows"]),
        ([*ODD, (ROWS, AUGMENTED)], None, "are drawn, line 30", (2880, 2, 0), ["same-augmentation"]),
        ([("nn.ReLU(),", "nn.ReLU(), nn.Dropout(0.2),")], None, "dropout", (2880, 0, 0), []),
        ([("replica(x.to(device))", NOISY)], None, "are drawn", (2880, 0, 0), ["loss-of-whole-batch"]),
        ([("32 // dist.get_world_size()", "32")], None, "its 90 steps are 46", (2880, 0, 0), ["lr-not-scaled"]),
    ],
    ids=["right", "divided twice", "no sampler", "padded", "cut off", "shuffled", "augmented", "dropout", "F.dropout",
         "larger batch"],
)  # fmt: skip
@pytest.mark.slow
def test_a_program_is_certified(tmp_path, nothing_left, edits, equal, reason, counts, named):
    found = certified(tmp_path, *edits)
    assert found.weights["equal"] is equal and reason in found.weights["reason"]
    assert tuple(found.samples[each] for each in ("rows", "repeated", "missing")) == counts
    assert found.samples_once is not any(counts[1:]) and faults(found) == named
    if equal:
        assert 0 < found.weights["largest_difference"] <= found.equal_to <= 1e-5 and found.steps == 90
    else:
        assert found.equal_to is None
    assert found.resumed_equal is None and found.resume["reason"] == "it saves nothing with torch.save"


RESTORED = '        optimizer.load_state_dict(saved["optimizer"])\n'
ASKED = [('    parser.add_argument("--checkpoint")\n',
          '    parser.add_argument("--checkpoint")\n    parser.add_argument("--resume", action="store_true")\n'),
         ("if options.checkpoint and os.path.exists(options.checkpoint)", "if options.resume")]  # fmt: skip


@pytest.mark.parametrize(
    ("edits", "resume_with", "equal", "reason"),
    [
        ([], [], True, ""),
        ([(RESTORED, "")], [], False, "run.pt['model']['0.weight'] differs, by "),
        (ASKED, [], None, "not asked for (--resume-with); after the kill it starts from the beginning"),
        (ASKED, ["--resume"], True, ""),
    ],
    ids=["right", "momentum is lost", "not asked for", "asked for"],
)
@pytest.mark.slow
def test_a_resume_is_certified(tmp_path, nothing_left, edits, resume_with, equal, reason):
    arguments = ["--epochs", "3", "--checkpoint", "run.pt"]
    found = certified(tmp_path, *edits, program="ddp.py", arguments=arguments, resume_with=resume_with)
    assert found.resumed_equal is equal and found.resume["reason"].startswith(reason)
    assert faults(found) == (["inexact-resume"] if equal is False else [])
    assert found.weights["equal"] and found.samples["rows"] == 3 * 2048 and found.steps == 96
    if equal is False:
        assert 1e-4 < found.resume["largest_difference"] < 1


@pytest.mark.slow
def test_a_program_saves_to_an_open_file_and_resumes_with_all_its_state(tmp_path):
    found = certified(tmp_path, program="train_whole.py", arguments=["--exact"])
    assert found.resumed_equal and found.steps == 150


PLUGIN = "ddp_course.rehearsal.pytest_plugin"


def test_the_plugin_is_an_entry_point_and_imports_no_torch():
    code = f"import sys, {PLUGIN}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
    assert [each.value for each in entry_points(group="pytest11") if each.name == PLUGIN] == [PLUGIN]


@pytest.mark.slow
def test_a_test_asks_for_a_certificate_and_is_told_what_differs(pytester, nothing_left):
    text = (PROGRAMS / "train.py").read_text().replace("range(5)", "range(1)")
    pytester.makepyfile(train=text, wrong=text.replace(BACKWARD, BACKWARD + DIVIDED), test_ddp="""
        import pytest, sys

        def test_right(ddp_certificate):
            seen = ddp_certificate("train.py", "--unused", 3)
            seen.check(equal_to=1e-5, samples_once=True)
            assert (seen.steps, seen.arguments, seen.resumed_equal) == (45, ["--unused", "3"], None)

        def test_wrong(ddp_certificate):
            ddp_certificate("wrong.py").check()

        def test_none(ddp_certificate):
            with pytest.raises(RuntimeError, match="there is no such file"):
                ddp_certificate("none.py")
            assert "torch" not in sys.modules
        """)  # fmt: skip
    ended = pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:nbval", "-p", "no:cacheprovider", timeout=300)
    ended.assert_outcomes(passed=2, failed=1)
    ended.stdout.fnmatch_lines(["*2 ranks differ from 1 process: by * from step 1 on", "*wrong: averaged-twice*"])


@pytest.mark.slow
def test_the_command_writes_a_file_and_a_line_and_leaves_no_old_certificate(tmp_path, capsys):
    script, file = tmp_path / "train.py", tmp_path / "certificate.json"
    script.write_text((PROGRAMS / "train.py").read_text().replace("range(5)", "range(1)"))
    assert command.main(["--certify", str(file), "--resume-with", "--resume", str(script)]) == 0
    told = Certificate(**json.loads(file.read_text()))
    assert capsys.readouterr().out.splitlines()[-1] == f"certificate: {told.line()}" and told.steps == 45
    assert told.sha256 == hashlib.sha256(script.read_bytes()).hexdigest() and told.torch == torch.__version__
    assert command.main(["--certify", str(file), str(tmp_path / "none.py")]) == 2 and file.read_text() == ""
    with pytest.raises(SystemExit):
        command.main(["--certify", str(script), str(script)])
    assert script.stat().st_size and ".json" in capsys.readouterr().err
