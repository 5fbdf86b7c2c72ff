"""Each incident fails and says its figures, its cured program ends well, and a file without the form is refused."""

import re
import sys

import pytest

from ddp_course.commands.faults import code
from ddp_course.diagnose.faults.catalogue import FAULTS, INCIDENTS
from ddp_course.diagnose.faults.incidents import ALL, ROOMS, Started, read
from tests.warm.plugin import start_of

GIVEN_UP = "Timed out waiting 3000ms"
# Incident -> what its broken program says, and what the cured one says.
SAYS = {
    "all-reduce-not-waited-for": ("the step used 0.50, not 1.50", "gradient 1.50, the mean is 1.50"),
    "epoch-walked-twice-after-resume": ("16 steps were counted, 12 are planned", "12 steps were counted"),
    "evaluated-with-each-ranks-buffers": ("is 1.2443 in the log, 1.2214 with", "is 1.2214 in the log, 1.2214"),
    "last-stage-never-reduces": ("the gradients of stage 1 differ by 11.30", "stage 1 differ by 0.00"),
    "loss-not-divided": ("the gradient is 4.00 times that of all rows", "1.00 times"),
    "no-sync-a-step-off": ("after 2 steps the ranks' weights differ by 0.086", "differ by 0.000"),
    "one-batch-more": (GIVEN_UP, "each rank took 5 steps, 100 rows in all"),
    "plateau-of-the-local-loss": ("learning rates are 0.1000 and 0.0125", "are 0.1000 and 0.1000"),
    "second-backward-not-averaged": ("the ranks' gradients differ by 0.310", "differ by 0.000"),
    "split-by-each-ranks-seed": ("17 of the ranks' 40 validation rows are trained on", "0 of the ranks' 40"),
    "stopped-by-one-rank": (GIVEN_UP, "rank 0 stops after epoch 2"),
    "stream-repeated-by-workers": ("64 lines were read, 32 of them different", "32 lines were read, 32 of them"),
    "sync-decided-after-the-forward": ("after 3 steps the ranks' weights differ by 0.032", "differ by 0.000"),
    "unfrozen-after-wrapping": ("backbones differ by 0.039, their heads by 0.000", "backbones differ by 0.000"),
    "weighted-draws-alike": ("32 of 32 draws are the same on both ranks", "0 of 32 draws"),
    "norm-of-a-shard": (
        "clipped by a norm of 3.67, the gradient's is 5.39; clipped to 1.0, it has 1.41",
        "a norm of 5.39 clipped to 1.00",
    ),
    "gathered-into-one-tensor": (
        "gathered [67.16, 67.16]: the loss is 1.119, one process has 1.137",
        "gathered [69.28, 67.16]: the loss is 1.137, one process has 1.137",
    ),
    "one-generator-for-all-ranks": (
        "498 of 2000 dropout decisions differ after the resume",
        "0 of 2000 dropout decisions differ after the resume",
    ),
    "schedule-over-too-soon": (
        "the learning rate is 0 from step 50 of 100 on",
        "100 of 100 steps have a learning rate above 0",
    ),
    "loss-reduced-in-place": ("the gradient is 0.50 times that of one process", "loss 1.238"),
    "gradients-that-are-none": (
        "a head's gradient differs from one process's by 189% of its norm",
        "a head's gradient differs from one process's by 0% of its norm",
    ),
    "average-of-recalls": ("the ranks' recall is 0.760, that of all 1000 rows 0.805", "recall 0.805 of 313 positives"),
    "reduced-a-copy": ("; one process has 1.041", "reports a loss of 1.041; one process has 1.041"),
    "a-seed-for-each-sampler": (
        "of 1000 samples, 245 are never drawn, 245 twice",
        "of 1000 samples, 0 are never drawn, 0 twice",
    ),
    "counts-in-bfloat16": (
        "[2386, 2562, 2758, 4294] tokens were routed, [2400.0, 2560.0, 2752.0, 4288.0] counted",
        "[2386, 2562, 2758, 4294] tokens were routed, [2386, 2562, 2758, 4294] counted",
    ),
    "bad-loss-skipped-by-one-rank": (GIVEN_UP, "both ranks took 3 of 4 steps"),
    "best-on-one-rank": (GIVEN_UP, "epochs [0, 1] saved, the best loss is 0.45"),
    "first-rank-of-the-group": ("ValueError: Global rank 0 is not part of group", "rank 3 has the plan of rank 2"),
    "optimizer-before-fsdp": (
        " in step 1, ",
        "loss 9.509 in step 1, 0.136 in step 20",
    ),
    "barrier-behind-a-file": (GIVEN_UP, "read 'compiled', reduced [2.0, 2.0, 2.0, 2.0]"),
    "wrapper-bypassed": ("after 5 steps the ranks' weights differ by 0.233", "differ by 0.000"),
}
FORM = '''\
"""The sum is not divided.

Seen: the numbers grow
    with the ranks.
Found: print it.
Cure: divide.
Met at: owner/repo.py#12
Ranks: 3
"""

import os

for i in range(2):
    total = i  # cure: total = i / 2
    print(total)  # cure:

    # cure: if total:
    # cure:     os.sync()
    assert total == 0, os.name
'''


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", SAYS)
def test_provoked_it_says_its_figures_and_cured_it_ends_well(name, nothing_left, monkeypatch):
    monkeypatch.setattr(sys, "executable", start_of("python"))  # which starts sooner, where there is one
    broken, cured = (run() for run in (INCIDENTS[name].provoke, INCIDENTS[name].fix))
    assert broken.fault == name and SAYS[name][0] in broken.evidence
    assert cured.fault is None and SAYS[name][1] in cured.evidence


def test_all_are_here_with_names_of_their_own():
    assert sorted(SAYS) == sorted(INCIDENTS) and not set(INCIDENTS) & set(FAULTS)
    assert len({each.met_at for each in ALL.values()}) == len(ALL), "a thread each"


def test_the_lab_shows_the_thread_and_the_lines_that_differ():
    incident = INCIDENTS["no-sync-a-step-off"]
    assert incident.met_at == "https://github.com/modelscope/FunASR/issues/3472"
    changed = [line for line in code(incident).splitlines() if re.match(r"[-+] ", line)]
    assert changed == ["-    last = i % accumulate == 0", "+    last = (i + 1) % accumulate == 0"]
    assert not re.search("cure|Seen", code(incident))


@pytest.fixture
def form(tmp_path):
    def written(text):
        (tmp_path / "not_divided.py").write_text(text)
        return read(tmp_path / "not_divided.py")

    return written


def test_a_line_is_replaced_taken_away_or_put_in(form):
    found = form(FORM)
    assert (found.name, found.title, found.seen) == (
        "not-divided",
        "The sum is not divided",
        "the numbers grow with the ranks.",
    )
    assert (found.ranks, found.met_at) == (3, "https://github.com/owner/repo.py/issues/12")
    assert found.broken == (
        "import os\n\nfor i in range(2):\n    total = i\n    print(total)\n\n    assert total == 0, os.name\n"
    )
    assert found.cured == (
        "import os\n\nfor i in range(2):\n    total = i / 2\n\n"
        "    if total:\n        os.sync()\n    assert total == 0, os.name\n"
    )
    assert found.lines == (4, 5, 7), "of those put in, the nearest with code before and after"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"""The', "The", r"line 1: expected a docstring, found 'The sum is not divided.'"),
        ('\n"""\n', '"""\n', r"line 18: expected a line that ends the docstring, found '    assert"),
        ("Found: print it.\n", "", r"line 8: expected the entries Seen, Found, .*, found \['Seen', 'Cure'"),
        ("Seen", "seen", r"line 9: expected the entries Seen, Found"),
        ("owner/repo.py#12", "a forum", r"line 9: expected Met at: owner/repository#number, found 'a forum'"),
        ("Ranks: 3", "Ranks: 8", r"line 9: expected 2, 3 or 4 ranks, found '8'"),
        ("  # cure: total = i / 2", "  # " + "x" * 90, r"line 14: expected at most 88 letters, found 107"),
        ("# cure: if total:", "# cure:", r"line 17: expected code before or after `# cure:`, found '    # cure:'"),
        ("# cure", "# Cure", r"expected 1 to 4 comments `# cure: CODE`, found 0"),
        ("import os\n", "import os  # cure: import os\n", r"expected 1 to 4 comments `# cure: CODE`, found 5"),
        ("import os\n", "import os\n" * 37, r"expected at most 40 lines of code, found 41"),
        ("total = i / 2", "total = i /", r"expected comments `# cure:` that give a program, found 'invalid syntax"),
    ],
)
def test_a_file_without_the_form_is_refused_with_its_line(old, new, said, form):
    with pytest.raises(ValueError, match=rf"not_divided\.py, {said}" if said.startswith("line") else said):
        form(FORM.replace(old, new))


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_another_error_is_not_taken_for_the_incident(nothing_left):
    with pytest.raises(RuntimeError, match=r"(?s)mine did not fail as it should.*ModuleNotFoundError: .*'no_module'"):
        Started("mine", 1, "import no_module\n")()


def test_the_programs_are_plain_and_no_comment_tells_the_bug():
    for path in ROOMS[0].glob("programs/incidents/*.py"):
        assert "ddp_course" not in path.read_text() and not re.search(
            r"# .*\b(bug|wrong|broken|fault)", path.read_text()
        )
