"""An incident of each level is made, and solved from its logs alone; answers are judged for fault and rank."""

import re

import pytest

from ddp_course.commands import drill as command
from ddp_course.diagnose.drill import CHANNELS, LEVELS, drawn, happen, solve


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("level", LEVELS)
def test_the_logs_of_an_incident_tell_its_faults_and_no_others(level, tmp_path, nothing_left):
    happen(level, 100, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.log", "rank1.log", "rank2.log"]
    assert solve(tmp_path) == drawn(level, 100)


def test_faults_come_from_the_levels_channels_one_from_each_and_all_come():
    came = set()
    for level, (count, channels) in LEVELS.items():
        for seed in range(60):
            faults = drawn(level, seed)
            used = [channel for channel, names in CHANNELS.items() if faults.keys() & names]
            assert len(faults) == count == len(used) and set(used) <= set(channels)
            came |= faults.keys()
            assert not faults.keys() >= {"same-rows", "not-averaged"}, "the first hides the second"
    assert came == {name for names in CHANNELS.values() for name in names}
    assert drawn(10, 3) == drawn(10, 3) and any(drawn(10, seed) != drawn(10, 3) for seed in range(9))


def test_an_answer_is_judged_whole(capsys):
    seed = next(seed for seed in range(50) if "drift" in drawn(3, seed))
    rank = drawn(3, seed)["drift"]
    call = ["--level", "3", "--seed", str(seed)]
    assert command.main([*call, "--answer", f"drift:{(rank + 1) % 3}"]) == 1
    assert command.main([*call, "--answer", f"drift:{rank}", "--answer", "same-rows"]) == 1
    assert command.main([*call, "--answer", f"drift:{rank}"]) == 0
    assert command.main([*call, "--answer", f"drift:{rank}", "--hint"]) == 0
    assert re.findall(r"solved: .*", capsys.readouterr().out) == ["solved: 5 of 5 points", "solved: 4 of 5 points"]
    assert command.main([*call, "--hint"]) == 1 and "same weights" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["nonsense", "drift", "drift:9", "same-rows:1", "drift:x"])
def test_an_answer_that_cannot_be_is_explained(word, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--answer", word])
    assert ended.value.code == 2 and ("write" in capsys.readouterr().err or word == "nonsense")


@pytest.mark.slow
def test_the_command_makes_the_incident_and_asks(tmp_path, capsys):
    assert command.main(["--level", "2", "--into", str(tmp_path / "logs")]) == 1
    said = capsys.readouterr().out
    assert "It had 1 fault. Which" in said and "same-rows" in said and (tmp_path / "logs" / "rank2.log").exists()
