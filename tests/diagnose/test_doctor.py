"""Each verdict, on machines that are planted; then the doctor on this one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_course.diagnose import doctor
from ddp_course.diagnose.doctor import Facts, diagnose, import_apart, table

pytestmark = pytest.mark.timeout(180)

NMS = "RuntimeError: operator torchvision::nms does not exist"


def verdict(name: str, **planted):
    return next(v for v in diagnose(replace(Facts(), **planted)) if v.name == name)


def test_a_good_machine_has_nothing_to_mend():
    verdicts = diagnose(Facts())
    assert {v.state for v in verdicts} == {"ok"}
    assert not any(v.cure for v in verdicts)
    assert table(verdicts).endswith("11 checks: 0 problems, 0 warnings")


# The name of the check, what is planted, the state it must give, what it must find, a part of its cure.
PLANTED = [
    ("Python", {"python": (3, 10, 14)}, "problem", "3.10.14", "3.11 or newer"),
    ("torch", {"torch": None}, "problem", "not installed", "make env"),
    ("torch", {"torch": "2.10.1"}, "problem", "2.10.1, older than 2.11", "make env"),
    ("torch", {"torch": "1.13.1+cpu"}, "problem", "1.13.1+cpu, older than 2.11", "make env TORCH=cpu"),
    ("torch", {"torch_error": "OSError: libcudart"}, "problem", "cannot be imported: OSError: libcudart", "make env"),
    ("torchvision", {"torchvision": None}, "warning", "not installed", "make env"),
    ("torchvision", {"torch": None}, "warning", "not tried without torch", "mend torch first"),
    ("GPUs", {"nvidia_driver": True}, "warning", "torch sees no GPU", "TORCH=default"),
    ("GPUs", {"gpus": ("A", "B")}, "ok", "A, B", ""),
    ("gloo", {"gloo": False}, "problem", "ranks on the CPU cannot talk", "make env"),
    ("loopback", {"loopback": None}, "problem", "no connection to 127.0.0.1", "ip link set lo up"),
    ("shared memory", {"shm_bytes": 64 * 2**20}, "warning", "64 MiB in /dev/shm: NCCL", "--shm-size=1g"),
    ("shared memory", {"shm_bytes": 2**30}, "ok", "1,024 MiB in /dev/shm", ""),
    ("shared memory", {"shm_bytes": None}, "warning", "no /dev/shm: NCCL", "--shm-size=1g"),
    ("shared memory", {"shm_bytes": None, "linux": False}, "ok", "none needed", ""),
    ("cores", {"cores": 1}, "warning", "all ranks share it", "nothing"),
    ("temporary files", {"temp_error": "No space left"}, "problem", "cannot write in /tmp: No space left", "TMPDIR"),
    ("Jupyter kernel", {"kernel": False}, "warning", "none for this Python", "--sys-prefix"),
    ("launcher", {"environ": {"RANK": "1"}}, "problem", "RANK=1, but no WORLD_SIZE", "unset RANK"),
    ("launcher", {"environ": {"WORLD_SIZE": "4"}}, "problem", "WORLD_SIZE=4, but no RANK", "unset WORLD_SIZE"),
    ("launcher", {"environ": {"RANK": "0", "WORLD_SIZE": "2"}}, "warning", "would join", "unset RANK WORLD_SIZE"),
    ("launcher", {"environ": {"MASTER_PORT": "29500"}}, "warning", "MASTER_PORT=29500", "unset MASTER_PORT"),
]


@pytest.mark.parametrize(("name", "planted", "state", "found", "cure"), PLANTED)
def test_a_planted_fault_gets_its_verdict(name, planted, state, found, cure):
    got = verdict(name, **planted)
    assert got.state == state
    assert found in got.found
    assert cure in got.cure and bool(cure) == bool(got.cure)


def test_torch_2_11_is_old_enough_and_2_9_is_not():
    assert verdict("torch", torch="2.11.0").state == "ok"
    assert verdict("torch", torch="2.9.1").state == "problem"  # although "2.9" > "2.11" as texts
    assert verdict("torch", torch="3.0.0").state == "ok"


def test_a_mismatched_pair_names_both_builds_and_the_cure():
    got = verdict("torchvision", torch="2.15.0+cpu", torchvision="0.29.2+cu132", torchvision_error=NMS)
    assert got.state == "problem"
    assert got.found == (
        "torch 2.15.0+cpu and torchvision 0.29.2+cu132 come from different builds; "
        "torchvision cannot be imported: RuntimeError: operator torchvision::nms does not exist"
    )
    assert got.cure.startswith("rm -rf .venv && make env TORCH=cpu, which takes both from one build")


def test_different_builds_that_can_be_imported_are_a_warning():
    got = verdict("torchvision", torch="2.15.0+cu132", torchvision="0.29.2+cpu")
    assert (got.state, "different builds" in got.found) == ("warning", True)
    assert "TORCH=cpu" not in got.cure  # torch's own build is kept


def test_torchvision_that_wants_another_torch_is_named():
    got = verdict("torchvision", torch="2.13.0+cpu", torchvision_error=NMS)
    assert got.state == "problem"
    assert "torchvision 0.29.2+cpu wants torch>=2.14.0, found torch 2.13.0+cpu" in got.found
    assert verdict("torchvision", torch="2.11.0+cpu", torchvision_wants="torch (==2.11.0)").state == "ok"
    assert verdict("torchvision", torch="2.11.1+cpu", torchvision_wants="torch (==2.11.0)").state == "warning"


def test_a_pair_that_fits_and_still_fails_is_a_problem():
    got = verdict("torchvision", torchvision_error="ImportError: libjpeg")
    assert got.state == "problem" and "libjpeg" in got.found and "different" not in got.found


# --- Looking around --------------------------------------------------------------------------------


def test_a_failed_import_gives_its_last_line_and_does_not_reach_us():
    found, error = import_apart("raise RuntimeError('operator torchvision::nms does not exist')")
    assert (found, error) == ({}, NMS)


def test_a_crash_and_a_hang_at_import_are_survived():
    assert import_apart("import os; os.abort()")[1] != ""
    assert import_apart("import time; time.sleep(60)", limit_s=0.5) == ({}, "no answer within 0.5 s")


def test_words_that_an_import_prints_do_not_disturb():
    assert import_apart("print('hello'); found = {'version': '1'}") == ({"version": "1"}, "")


def test_a_version_is_read_with_its_build_without_an_import():
    import torch

    assert doctor.installed("torch") == torch.__version__
    assert doctor.installed("no-such-package") is None


@pytest.mark.parametrize(
    ("starts", "expected"), [("python", True), ("/env/bin/python3", True), ("/other/bin/python", False)]
)
def test_only_a_kernel_of_this_python_counts(tmp_path, starts, expected):
    folder = tmp_path / "share" / "jupyter" / "kernels" / "python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps({"argv": [starts, "-m", "ipykernel_launcher"]}))
    assert doctor.has_kernel(tmp_path, "/env/bin/python") is expected


def test_no_kernel_at_all(tmp_path):
    assert doctor.has_kernel(tmp_path, sys.executable) is False


def test_a_folder_that_cannot_be_written_says_why(tmp_path):
    assert doctor.error_of_writing(str(tmp_path)) == ""
    assert doctor.error_of_writing(str(tmp_path / "missing")) == "No such file or directory"


@pytest.mark.parametrize(("planted", "status"), [({}, 0), ({"shm_bytes": 1}, 0), ({"loopback": None}, 1)])
def test_the_exit_status_is_1_only_for_a_problem(monkeypatch, capsys, planted, status):
    monkeypatch.setattr(doctor, "gather_facts", lambda: replace(Facts(), **planted))
    assert doctor.main(["--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert len(told) == 11 and set(told[0]) == {"name", "state", "found", "cure"}


def test_the_table_puts_the_cure_below_what_it_cures():
    lines = table(diagnose(replace(Facts(), loopback=None, cores=1))).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("PROBLEM  loopback"))
    assert lines[at + 1].strip().startswith("-> bring it up")
    assert lines[-1] == "11 checks: 1 problems, 1 warnings"


def test_this_machine_can_run_the_course_and_a_broken_torch_does_not_stop_the_doctor():
    path = Path(doctor.__file__)
    # In this process torch cannot be imported; the processes that the doctor starts can.
    program = f"import runpy, sys; sys.modules['torch'] = None; sys.argv = ['doctor', '--json']; " \
              f"runpy.run_path({str(path)!r}, run_name='__main__')"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    states = {told["name"]: told["state"] for told in json.loads(done.stdout)}
    assert (done.returncode, states["torch"], states["gloo"], states["loopback"]) == (0, "ok", "ok", "ok"), done
