"""The project's own files: one list of packages everywhere, and commands that say what is wrong."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [Requirement(line) for line in [*PROJECT["dependencies"], *(x for xs in EXTRAS.values() for x in xs)]]
PINNED = [Requirement(line) for line in (ROOT / "versions.txt").read_text().splitlines()]


def pinned_here(name: str) -> Version:
    """The one version that versions.txt gives this platform and this Python."""
    rows = [r for r in PINNED if canonicalize_name(r.name) == canonicalize_name(name)]
    (row,) = [r for r in rows if r.marker is None or r.marker.evaluate()]
    return Version(str(row.specifier).removeprefix("=="))


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "TORCH", "MFLAGS"))}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def bare(tmp_path) -> Path:
    """A folder with the files that `make env` reads, and no environment yet."""
    for name in ("Makefile", "pyproject.toml", "versions.txt"):
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_versions_are_exact_and_name_no_address_hash_or_build():
    for row in PINNED:
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(row.specifier)), row
        assert row.url is None and not row.extras, row
    names = [(canonicalize_name(row.name), str(row.marker)) for row in PINNED]
    assert len(names) == len(set(names))
    assert [name for name, _ in names] == sorted(name for name, _ in names)


@pytest.mark.parametrize("wanted", DIRECT, ids=lambda wanted: wanted.name)
def test_every_direct_dependency_is_pinned_within_its_range(wanted):
    assert pinned_here(wanted.name) in wanted.specifier


def test_conda_users_get_what_a_learner_needs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *from_conda, from_pip = environment["dependencies"]
    assert from_pip == {"pip": ["-c versions.txt", "-e .[course]"]}
    assert from_conda[1:] == ["pip"]
    assert from_conda[0].removeprefix("python =") in SpecifierSet(PROJECT["requires-python"])
    assert re.search(r"^EXTRAS := (.*)$", MAKEFILE, re.MULTILINE)[1] == ",".join(EXTRAS)


def test_containers_make_what_the_makefile_knows():
    dev = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    docker = (ROOT / "Dockerfile").read_text()
    assert f"AS {dev['build']['target']}\n" in docker and f"USER {dev['remoteUser']}\n" in docker
    for command in (dev["postCreateCommand"], re.search(r"^RUN (make .*)$", docker, re.MULTILINE)[1]):
        assert make("-n", *command.replace("${TORCH}", "cpu").split()[1:]).returncode == 0, command
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)


def test_the_environment_holds_the_pinned_versions():
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("these tests run in another environment than the one that `make env` made")
    found = {w.name: Version(importlib.metadata.version(w.name)).public for w in DIRECT}
    assert found == {w.name: str(pinned_here(w.name)) for w in DIRECT}


def test_torch_and_torchvision_are_of_one_build():
    import torch
    import torchvision

    needed = [Requirement(line) for line in importlib.metadata.requires("torchvision")]
    (torch_needed,) = [r.specifier for r in needed if r.name == "torch"]
    assert pinned_here("torch") in torch_needed
    assert Version(torch.__version__).local == Version(torchvision.__version__).local
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9], [5.0, 5.0, 6.0, 6.0]])
    # A compiled operator: with torchvision of another build it does not exist.
    kept = torchvision.ops.nms(boxes, torch.tensor([0.5, 0.9, 0.7]), 0.5)
    assert kept.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "was not found: install Python 3.11 or newer"),
        ('case "$2" in *version_info*) exit 1;; *) echo 3.10.4;; esac', "needs Python 3.11 or newer"),
        ('test "$1" = -c || exit 1', "cannot make environments: install its venv module"),
    ],
    ids=["no Python", "an old Python", "no venv module"],
)
def test_make_env_says_what_is_missing_and_leaves_nothing_behind(bare, python, said):
    name = "python-not-there" if python is None else script(bare / "fake-python", python)
    done = make("env", f"PYTHON={name}", folder=bare)
    assert done.returncode == 2
    assert said in done.stdout
    assert "Traceback" not in done.stderr
    assert not (bare / ".venv").exists()


def test_make_env_is_redone_when_the_lists_change_or_another_build_is_named(bare):
    (bare / ".venv").mkdir()
    (bare / ".venv" / "torch-build").write_text("cpu\n")
    (bare / ".venv" / "installed-dev").touch()
    assert "uv" not in make("-n", "env", folder=bare).stdout
    assert "uv" not in make("-n", "env", "TORCH=cpu", folder=bare).stdout
    other = make("-n", "env", "TORCH=default", folder=bare).stdout
    assert "--reinstall-package torch --reinstall-package torchvision" in other
    assert "--torch-backend" not in other
    os.utime(bare / "versions.txt", (2**31, 2**31))
    again = make("-n", "env", folder=bare).stdout
    assert "--torch-backend cpu" in again and "--reinstall" not in again


def test_a_learner_gets_no_more_than_the_lessons_need_and_a_developer_installs_nothing_again(bare):
    (bare / ".venv").mkdir()
    (bare / ".venv" / "torch-build").write_text("cpu\n")
    assert "'.[course]'" in make("-n", "lab", folder=bare).stdout
    assert "'.[course,instructor]'" in make("-n", "grade", "SUBMISSIONS=x", folder=bare).stdout
    (bare / ".venv" / "installed-dev").touch()
    assert not any("uv" in make("-n", *goal, folder=bare).stdout for goal in (["lab"], ["grade", "SUBMISSIONS=x"]))


def test_ci_runs_make_test_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "set -e",
        'cd "$(dirname "$0")/.."',
        "make test",
    ]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert steps == ["make env TORCH=cpu", "bash .ci/run"]


@pytest.mark.slow
def test_sdist_and_wheel_have_all_that_a_learner_needs(tmp_path):
    """Unpacked where no checkout is near: a copy, a hint, a solution, and a check of an answer."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    build = [uv, "build", "--quiet", "--out-dir", tmp_path, ROOT]  # the wheel is built from the sdist
    subprocess.run(build, check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}  # also for the kernels and ranks of a check

    def course(*words: str, folder: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ddp_course.cli", *words]
        return subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False
        )

    copied = course("new", "mine")
    assert copied.returncode == 0, copied
    assert (tmp_path / "mine" / "programs" / "ddp.py").exists()
    assert "A small helper" in course("hint", "03.1").stdout
    solution = course("solution", "03.1", "--anyway").stdout
    path = tmp_path / "mine" / "exercises" / "03_process_groups" / "03_process_groups.ipynb"
    notebook = json.loads(path.read_text())
    (answer,) = [cell for cell in notebook["cells"] if cell["metadata"]["nbgrader"]["grade_id"] == "ex-03-1-answer"]
    answer["source"] = f"{solution}\nimport ddp_course; assert ddp_course.__file__.startswith({str(tmp_path)!r})"
    path.write_text(json.dumps(notebook))
    checked = course("check", "03.1", "--json", folder=tmp_path / "mine")
    assert checked.returncode == 0, checked
    assert json.loads(checked.stdout)["exercises"] == [{"exercise": "03.1", "points": 5, "of": 5}], checked
