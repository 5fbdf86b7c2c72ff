"""Are the benchmarks' tables and files right? Planted numbers; no time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import launch, measure
from benchmarks.measure import Plan, Result, Row, Target, attempt
from benchmarks.run import BENCHMARKS

ROOT = Path(__file__).parents[2]


def planted() -> Result:
    rows = [
        Row("plain_spawn", "plain mp.spawn", 2, samples=[3.0, 1.0, 2.0]),
        Row("rank_pool_call", "RankPool.run", 2, samples=[0.004, 0.001, 0.002, 0.003]),
        Row("rank_pool_start", "RankPool start", 2, missing="there is no pool"),
        Row("launch_forkserver", "launch, forkserver, later", 2, failed="the call: RuntimeError: no"),
    ]
    return Result("planted", rows, launch.targets(rows), ["a note"], baseline="rank_pool_call")


def test_quartiles_do_not_depend_on_order_and_one_sample_has_no_spread():
    assert planted().rows[1].quartiles == pytest.approx((0.00175, 0.0025, 0.00325))
    assert Row("k", "w", 2, samples=[5.0]).quartiles == (5.0, 5.0, 5.0)
    assert Row("k", "w", 2).quartiles is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.00123, "s", "1.23 ms"), (1.5, "s", "1.50 s"), (123.4, "s", "123 s"), (0.25, "", "1/4.00"),
     (0.002, "", "1/500"), (8.0, "", "8.00"), (None, "s", "not measured"),
     (-0.5, "%", "-0.50 %"), (12.34, "%", "12.3 %")],
)  # fmt: skip
def test_numbers_carry_their_unit(value, unit, text):
    assert measure.show_number(value, unit) == text


def test_targets_hold_at_the_limit_and_say_when_nothing_was_measured():
    assert [Target("t", 2.0, m).holds for m in (1.9, 2.0, 2.1, None)] == [True, True, False, None]
    pool, plain, later = planted().targets
    assert (pool.measured, pool.holds) == (pytest.approx(0.0025), True)
    assert (plain.measured, plain.holds) == (pytest.approx(0.0025 / 2.0), True)
    assert later.holds is None


def test_the_table_shows_every_row_and_marks_what_is_missing_or_failed():
    lines = measure.table(planted()).splitlines()
    (plain,) = [line for line in lines if line.startswith("plain mp.spawn")]
    assert plain.split() == ["plain", "mp.spawn", "2", "2.00", "s", "1.50", "s", "to", "2.50", "s", "3", "800"]
    assert any(line.startswith("RankPool start") and line.endswith("there is no pool") for line in lines)
    assert any(line.startswith("launch, forkserver") and line.endswith("FAILED") for line in lines)
    assert lines[-2:] == ["a note", measure.WARNING]
    assert planted().failures == ["launch, forkserver, later, 2 ranks: the call: RuntimeError: no"]


def test_a_busy_machine_is_marked():
    machine = measure.machine_state() | {"cores": 4, "load_before": [0.9, 0, 0]}
    assert "BUSY" not in measure.show_machine(machine)
    assert "BUSY" in measure.show_machine(machine | {"load_before": [1.1, 0, 0]})


def test_a_wrong_answer_of_the_ranks_is_an_error():
    launch.check([6.0, 6.0, 6.0], 3)
    with pytest.raises(RuntimeError, match="expected .*6.0, 6.0, 6.0.* found .*6.0, 5.0, 6.0"):
        launch.check([6.0, 5.0, 6.0], 3)


def test_what_fails_is_noted_and_does_not_stop_the_rest():
    rows = [Row("a", "a", 2), Row("b", "b", 2)]
    with attempt(rows[:1], "the call"):
        raise RuntimeError("no")
    assert [row.failed for row in rows] == ["the call: RuntimeError: no", ""]


def test_a_step_that_hangs_is_ended():
    with pytest.raises(TimeoutError, match="this took longer than 0.05 s"), measure.limit(0.05, "this"):
        while True:
            pass


def test_a_plan_wants_all_or_what_it_names():
    assert Plan().wants("anything")
    assert Plan(only=frozenset({"a"})).wants("a")
    assert not Plan(only=frozenset({"a"})).wants("b")


@pytest.mark.parametrize(
    ("name", "key", "told"),
    [
        ("launch", "pool", "launch has no row pool; choose from launch_forkserver, "),
        ("ddp", "buckets", "ddp has no row buckets; choose from bucketed_deep, "),
        ("sampler", "rate", "sampler has no row rate; choose from compatible_first_MB_1e7, "),
        ("simulation", "buckets", "simulation has no row buckets; their names hold one of mlp, conv, waits, sweep"),
    ],
)
def test_an_unknown_row_is_refused(name, key, told):
    with pytest.raises(SystemExit, match=told):
        import_module(BENCHMARKS[name]).measure(Plan(only=frozenset({key})))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_command_writes_the_documented_json(tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/run.py", "--quick", "--only", "launch/launch_forkserver"]
    done = subprocess.run([*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert set(found) == {"schema", "started", "quick", "machine", "benchmarks"}
    assert set(found["machine"]) == {"cores", "processor", "system", "python", "packages", "load_before"}
    (row,) = found["benchmarks"]["launch"]["rows"]
    documented = {"key", "way", "ranks", "unit", "median", "q1", "q3", "n", "samples", "missing", "failed"}
    assert set(row) == documented
    assert (row["key"], row["ranks"], row["n"], row["failed"]) == ("launch_forkserver", 2, 1, "")
    assert row["samples"] == [pytest.approx(row["median"], abs=1e-6)]
    assert all(
        set(t) == {"what", "limit", "unit", "measured", "holds"} for t in found["benchmarks"]["launch"]["targets"]
    )
    assert "launch, forkserver, later" in done.stdout


@pytest.mark.timeout(60)
def test_an_unknown_benchmark_is_refused():
    command = [sys.executable, "benchmarks/run.py", "--only", "lunch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    assert "--only lunch: there is no such benchmark; choose from launch" in done.stderr
