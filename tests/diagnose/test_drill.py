"""An incident of each level is made, and solved from its logs alone; answers are judged for fault and rank."""

import pytest

from ddp_course import cli
from ddp_course.commands import drill as command
from ddp_course.diagnose.drill import CHANNELS, LEVELS, drawn, solve
from ddp_course.diagnose.drill_job import happen
from ddp_course.diagnose.faults.incidents import ALL, exhibit
from ddp_course.diagnose.logs import read


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", LEVELS)
def test_the_logs_of_an_incident_tell_its_faults_and_no_others(level, tmp_path, nothing_left):
    happen(level, 100, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.log", "rank1.log", "rank2.log"]
    assert solve(tmp_path) == drawn(level, 100).faults


def test_faults_come_from_the_levels_channels_one_from_each_and_all_come():
    came = set()
    for level, (count, channels, _) in LEVELS.items():
        for seed in range(60):
            faults = drawn(level, seed).faults
            used = [channel for channel, names in CHANNELS.items() if faults.keys() & names]
            assert len(faults) == count == len(used) and set(used) <= set(channels)
            came |= faults.keys()
            assert not faults.keys() >= {"same-rows", "not-averaged"}, "the first hides the second"
        kinds = [tuple(drawn(level, seed).faults) for seed in range(60)]
        assert all(kinds.index(kind) == seed % len(set(kinds)) for seed, kind in enumerate(kinds)), "repeats too soon"
        assert len({drawn(level, seed).world for seed in range(20)}) == 20, "other rows and weights for each seed"
    assert came == {name for names in CHANNELS.values() for name in names} == set(command.TITLES)
    assert drawn(10, 3) == drawn(10, 3)


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_killed_rank_alone_is_silent_and_two_silent_ranks_are_refused(tmp_path, capsys):
    assert drawn(1, 3).faults == {"killed": 1}
    assert command.main(["--level", "1", "--seed", "3", "--into", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "ddp-course drill --level 1 --seed 3 --answer FAULT" in said and "  own  " in said and "had 1 fault." in said
    assert (tmp_path / "README.txt").read_text() in said
    found = read([tmp_path])
    assert (found.cause, found.rank) == ("connection-closed", 1) and "first suspect" in found.cure
    with pytest.raises(SystemExit):  # nothing in the folder is overwritten
        command.main(["--into", str(tmp_path)])
    log = tmp_path / "rank0.log"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"more than one answer: \[\('killed', 0\), \('killed', 1\)\]"):
        solve(tmp_path)


@pytest.fixture
def drift():
    """The arguments of an incident with a drift alone, and the rank that drifts."""
    seed = next(seed for seed in range(50) if "drift" in drawn(3, seed).faults)
    return ["--level", "3", "--seed", str(seed)], drawn(3, seed).faults["drift"]


def test_an_answer_is_judged_for_fault_and_rank(drift, capsys):
    call, rank = drift
    other = (rank + 1) % 3
    for words, status, said in (
        ([f"drift:{rank}"], 0, "solved: 5 of 5"),
        ([f"drift:{rank}", "--hint", "--hint"], 0, "solved: 4 of 5"),  # there is but one hint
        ([f"drift:{other}"], 1, "the fault is right, the rank is not\nnot yet: 0 of 5"),
        ([f"killed:{rank}"], 1, "the rank is right, the fault is not"),
        ([f"killed:{other}"], 1, "neither fault nor rank is right"),
        ([f"drift:{rank}", "--answer", "same-rows"], 1, "same-rows: not in this incident\nnot yet: 0 of 5"),
    ):
        assert command.main([*call, "--answer", *words]) == status
        assert said in capsys.readouterr().out


def test_each_missing_wrong_or_surplus_fault_costs_the_same():
    true = {"drift": 1, "same-rows": None, "straggler": 2}
    for said, points in (
        (true, 15),
        ({"drift": 1, "straggler": 2}, 10),
        (true | {"drift": 0}, 10),
        (true | {"killed": 0}, 10),
        (dict.fromkeys(command.TITLES, 1) | true, 0),
    ):
        assert command.points(said, true, 0) == points


def test_a_hint_names_its_cost(drift, capsys):
    assert command.main([*drift[0], "--hint", "--hint"]) == 0
    said = capsys.readouterr().out
    assert "same weights" in said and said.count("--hint") == 1 and "a point" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "no fault is called"),
        (["drift"], "drift:RANK, with a rank from 0 to 2"),
        (["drift:9"], "drift:RANK, with a rank from 0 to 2"),
        (["drift:x"], "drift:RANK, with a rank from 0 to 2"),
        (["same-rows:1"], "same-rows alone"),
        (["drift:0", "--answer", "drift:1", "--answer", "drift:2"], "drift comes twice"),
    ],
)
def test_an_answer_that_cannot_be_is_explained(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--answer", *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_folder_that_is_taken_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "rank0.log").write_text("mine")
    for into in (tmp_path, tmp_path / "rank0.log"):
        with pytest.raises(SystemExit) as ended:
            command.main(["--into", str(into)])
        assert ended.value.code == 2 and str(into) in capsys.readouterr().err
    below = tmp_path / "rank0.log" / "below"
    assert cli.main(["drill", "--into", str(below)]) == 2 and str(below) in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


SEED = next(seed for seed in range(99) if exhibit(seed).name == "no-sync-a-step-off")
OF_MUSEUM = ["--level", str(command.MUSEUM), "--seed", str(SEED)]


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_program_of_the_museum_is_run_and_shown_without_its_cause(tmp_path, capsys, nothing_left):
    assert command.main([*OF_MUSEUM, "--into", str(tmp_path)]) == 0
    said, incident = capsys.readouterr().out, exhibit(SEED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.txt", "rank0.log", "rank1.log", "train.py"]
    assert (tmp_path / "train.py").read_text() == incident.broken and (tmp_path / "README.txt").read_text() in said
    assert "\n 19      last = i % accumulate == 0\n" in said and incident.seen in said and "--answer LINE" in said
    for rank in range(2):
        words = (tmp_path / f"rank{rank}.log").read_text()
        assert words in said and "the ranks' weights differ by 0.086" in words
    for hidden in (incident.title, incident.found, incident.cure, incident.met_at, incident.name, "(i + 1) %"):
        assert hidden not in said.replace("if (i + 1) % accumulate == 0:", "")


def test_a_line_of_the_museum_is_judged(capsys):
    for words, status, said in (
        (["19"], 0, "✓ line 19\nsolved: 5 of 5 points\ncause: Gradients are averaged in the first micro-batch"),
        (["19", "--hint", "--hint"], 0, "solved: 4 of 5"),  # there is but one hint
        (["19"], 0, "FunASR/issues/3472"),
        (["22"], 1, "✗ line 22\nnot yet: 0 of 5"),
    ):
        assert command.main([*OF_MUSEUM, "--answer", *words]) == status
        assert said in capsys.readouterr().out
    assert command.main([*OF_MUSEUM, "--hint"]) == 0
    assert "on two ranks just before" in capsys.readouterr().out
    for words in (["0"], ["99"], ["drift"], ["19", "--answer", "20"]):
        with pytest.raises(SystemExit) as ended:
            command.main([*OF_MUSEUM, "--answer", *words])
        assert ended.value.code == 2 and "name one line by its number, from 1 to 3" in capsys.readouterr().err


def test_seeds_in_a_row_show_each_program_of_the_museum_once():
    shown = [exhibit(seed).name for seed in range(2 * len(ALL))]
    assert sorted(shown[: len(ALL)]) == sorted(ALL) and shown == 2 * shown[: len(ALL)]
    assert shown[: len(ALL)] != sorted(ALL)
