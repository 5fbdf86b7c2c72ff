"""Each silent fault is found, it alone, on its line; nothing is found in what was fixed."""

import io
import re

import pytest
import torch

from ddp_course.commands.faults import code
from ddp_course.diagnose.faults.catalogue import FAULTS, SILENT
from ddp_course.diagnose.faults.rehearsed import HEALTHY, PROGRAM, Rehearsed
from ddp_course.diagnose.faults.silent import _fit_on_cores, _loaded
from ddp_course.diagnose.recognise import recognise
from ddp_course.rehearsal.lint import lint

pytestmark = pytest.mark.timeout(120)
# Fault: what the finding says, and its line in the broken program.
REHEARSED = {
    "missing-sampler": (
        "same-rows: 200 of the first 200 samples of each rank are the same",
        "loader = DataLoader(train",
    ),
    "missing-set-epoch": ("missing-set-epoch: 2 passes, in the order of epochs 0, 0", "for x, y in loader"),
    "padded-evaluation": ("padded-evaluation: 1 rows are evaluated twice", "test_loader = "),
    "mean-of-means": ("mean-of-means: each rank divides by its own count", "mean = "),
    "several-writers": ("unguarded-save: 2 ranks write model.pt", "torch.save("),
    "module-prefix": ("module-prefix: 17 names do not meet, 9 were saved", "saved.load_state_dict("),
    "batchnorm-drift": ("local-batchnorm: module.1 normalises 8 rows of one rank", "return nn.Sequential("),
    "lr-not-scaled": ("lr-not-scaled: 1 rank: 8 samples a step, lr 0.05; 2 ranks: 16 samples", "optimizer.step()"),
}
ON_RANKS = {
    "all-on-gpu-0": (1, "rank 0 has cuda:0, its weights lie on cuda:0; rank 1 has cuda:1, its weights lie on cuda:0"),
    "too-many-threads": (None, "2 ranks compute with "),
}
MORE = {"batchnorm-drift": ["loss-of-whole-batch"]}  # the same fault, seen in the gradient


@pytest.mark.slow  # three runs each
@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsal_finds_it_alone_on_its_line(name, nothing_left):
    words, line = REHEARSED[name]
    broken, text = FAULTS[name].provoke(), FAULTS[name].provoke.text
    assert broken.fault == name and words in broken.evidence
    (number, _), *more = re.findall(r"^train\.py:(\d+): [a-z ]+ ([a-z-]+): ", broken.report, re.MULTILINE)
    assert [fault for _, fault in more] == MORE.get(name, [])
    assert text.splitlines()[int(number) - 1].strip().startswith(line)
    assert recognise(f"{broken.evidence}\n{broken.report}").fault is None  # nor is it taken for a loud one
    assert FAULTS[name].fix is HEALTHY


@pytest.mark.slow
def test_nothing_is_found_in_the_healthy_program(nothing_left):
    found = HEALTHY()
    assert (found.fault, found.evidence) == (None, "rehearsed on 1 rank and on 2: nothing wrong was seen")


def test_the_text_of_the_healthy_program_shows_nothing_and_that_of_a_plain_batchnorm_does():
    assert lint(PROGRAM) == []
    assert [each.fault for each in lint(FAULTS["batchnorm-drift"].provoke.text)] == ["local-batchnorm"]


def test_a_program_that_fails_is_not_taken_for_a_healthy_one():
    with pytest.raises(RuntimeError, match=r"(?s)did not run to its end: .*KeyError"):
        Rehearsed("import torch.distributed as dist\ndist.init_process_group('gloo')\nraise KeyError('rows')\n")()


@pytest.mark.parametrize("name", ON_RANKS)
def test_what_a_rehearsal_cannot_see_is_seen_on_ranks(name, nothing_left):
    broken, fixed = FAULTS[name].provoke(), FAULTS[name].fix()
    assert (broken.fault, broken.rank, fixed.fault) == (name, ON_RANKS[name][0], None)
    assert ON_RANKS[name][1] in broken.evidence


def test_one_thread_a_rank_is_no_fault(monkeypatch):
    monkeypatch.setattr("ddp_course.diagnose.faults.silent.usable_cores", lambda: 4)
    cases = ([1, 1, 1, 1, 1], [2, 2], [3, 2], [5, 1])
    assert [bool(_fit_on_cores(threads).fault) for threads in cases] == [False, False, True, True]


def test_all_ten_are_in_the_catalogue_and_can_be_read():
    silent = [fault.name for family in SILENT for fault in family.FAULTS]
    assert silent == list(FAULTS)[-10:] and set(silent) == {*REHEARSED, *ON_RANKS}
    shown = code(FAULTS["missing-sampler"])
    changed = [line for line in shown.splitlines() if re.match(r"[-+] ", line)]
    assert [line[0] for line in changed] == ["-", "+"] and "shuffle=True" in changed[0] and "sampler" in changed[1]
    assert len(shown.splitlines()) > len(PROGRAM.splitlines())
    assert "def take_a_share_of_the_cores(" in code(FAULTS["too-many-threads"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: what fake tensors say is compared with it")
@pytest.mark.parametrize("onto_own", [False, True])
def test_fake_tensors_go_where_real_ones_go(onto_own):
    file = io.BytesIO()
    torch.save({"weight": torch.ones(3, device="cuda:0")}, file)
    file.seek(0)
    real = torch.load(file, map_location="cuda:0" if onto_own else None, weights_only=True)
    assert _loaded(onto_own)(0, 1) == ("cuda:0", str(real["weight"].device))
