"""Is the report of a GPU machine right, and does its dry run measure what it says? No time is asserted."""

import json
import os
import sys

import pytest

from benchmarks import gpu, gpu_run
from benchmarks.gpu_report import DONE, NO_TIME, Part, markdown, read_junit
from benchmarks.measure import Result, Row

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="works"/>
<testcase classname="tests.a" name="raises"><failure message="m">E  one
E  NCCL error</failure></testcase>
<testcase classname="tests.a" name="breaks"><error message="m">E  no fixture</error></testcase>
<testcase classname="tests.a" name="waits"><skipped message="needs two GPUs">file:1: needs two GPUs</skipped></testcase>
<testcase classname="lesson" name="Cell 3"><failure message="m">#x1B[91mCell 3: Cell outputs differ#x1B[0m</failure></testcase>
<testcase classname="lesson" name="Cell 4"><failure message="m">Cell 4: Cell execution caused an exception</failure></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_a_cell_with_another_output_differs_and_what_raises_has_failed():
    cases = read_junit(JUNIT)
    assert [case["outcome"] for case in cases] == ["passed", "failed", "failed", "skipped", "differs", "failed"]
    assert (cases[3]["told"], cases[4]["told"]) == ("needs two GPUs", "Cell 3: Cell outputs differ")
    part = Part("tests", DONE, 2.0, cases)
    assert part.failures[0] == "tests.a::raises\nE  one\nE  NCCL error" and len(part.failures) == 3


def test_the_report_counts_and_tells_every_failure():
    row = {"failed": "deep: RuntimeError: no NCCL"}
    found = [
        Part("tests", DONE, 2.0, read_junit(JUNIT)),
        Part("steps", DONE, 3.0, figures={"rows": [row, row]}, table="torch's DDP  2 ms"),
        Part("11_training", "ended after its limit", 9.0, said="cell 7"),
        Part("05_samplers"),
    ]
    text = markdown({"started": "today", "dry": False, "machine": {"GPUs": "H"}}, found)
    lines = text.splitlines()
    assert lines[0] == "# GPU report, today" and "| GPUs | H |" in lines and "torch's DDP  2 ms" in lines
    assert [line for line in lines if line.startswith(("| tests", "| steps", "| 0", "| 1"))] == [
        "| tests | done | 2 | 1 | 3 | 1 | 1 |",
        "| steps | done | 3 | 0 | 1 | 0 | 0 |",
        f"| 05_samplers | {NO_TIME} | 0 | 0 | 0 | 0 | 0 |",
        "| 11_training | ended after its limit | 9 | 0 | 1 | 0 | 0 |",
    ]
    assert "Other outputs than the stored ones, tests: Cell 3" in lines
    assert text.count("## Failed") == 5 and "- 1: needs two GPUs" in lines


def test_what_takes_longer_than_its_limit_is_ended():
    status, said = gpu_run.run([sys.executable, "-c", "while True: pass"], 0.1)
    assert status is None
    assert gpu_run.run([sys.executable, "-c", "print('here'); raise SystemExit(3)"], 60) == (3, "here\n")


def test_what_has_no_time_left_is_not_begun_and_a_failed_row_makes_the_command_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run.gpu_report, "machine", lambda: {"GPUs": "none"})
    for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # the command sets both for what it starts
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    rows, shared = [Row("a", "a", 2, failed="a: RuntimeError: no")], []

    def planted(blocks, limit_s):
        shared.append(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"))
        return Result("planted", rows)

    monkeypatch.setitem(gpu.GROUPS, "copies", planted)
    command = ["--only", "copies", "--out", str(tmp_path)]
    for budget, status, ended, failures in ((1, 0, NO_TIME, []), (600, 1, DONE, ["a: RuntimeError: no"])):
        assert gpu_run.main([*command, f"--budget={budget}"]) == status
        found = json.loads((tmp_path / "report.json").read_text())
        (part,) = found["parts"]
        assert found["dry"] and (part["ended"], part["failures"]) == (ended, failures)
    assert shared == ["1"] and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ  # of one GPU, while it is measured
    with pytest.raises(SystemExit):
        gpu_run.main(["--only", "copy"])


def test_gpu_tests_are_found_by_their_mark():
    assert {"tests/launcher/test_spawn.py", "tests/checkpoint/test_folder.py"} <= set(gpu_run.files_with_gpu_tests())
    assert "tests/beyond/test_plan.py" not in gpu_run.files_with_gpu_tests()


@pytest.mark.timeout(120)
def test_the_dry_run_measures_the_memory_that_is_planned_and_trains_in_both_formats(ranks, monkeypatch):
    monkeypatch.setattr(gpu, "run_on_ranks", lambda fn, world_size, *args, backend: ranks(world_size).run(fn, args))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    rows = {row.key: row for row in gpu.memory(1, 60).rows}
    assert {key for key, row in rows.items() if row.failed} == set()
    for precision in gpu.PRECISIONS:
        assert rows[f"ratio_{precision}"].samples == pytest.approx([1.0, 1.0], abs=0.05)
    assert rows["measured_bf16"].median < 0.9 * rows["measured_float32"].median
    for result, keys in (
        (gpu.formats(2, 60), ["float32_tiny", "bf16_tiny", "bf16_ratio_tiny"]),
        (gpu.copies(2, 60), ["pageable_1MiB", "pinned_1MiB", "pinned_ratio_1MiB"]),
    ):
        assert result.failures == []
        assert {row.key: len(row.samples) for row in result.rows} == dict.fromkeys(keys, 2)
