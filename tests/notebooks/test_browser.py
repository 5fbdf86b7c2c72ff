"""Does a newcomer's first hour work? `make lab`, then lesson 00 in a real browser, through the menus."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.notebooks import execute

LESSON = Path("notebooks") / "00_start_here.ipynb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
BROWSER_FLAGS += ["--disable-background-networking", "--disable-component-update"]
START_LIMIT_S, RUN_LIMIT_S = 90, 360

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.fixture(scope="session")
def browser_path() -> str:
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"no browser found: looked for {', '.join(BROWSERS)}")
    return found[0]


@pytest.fixture
def copy(tmp_path) -> Path:
    """The course in a folder of its own, since JupyterLab saves what it runs; the environment is shared."""
    for name in ("Makefile", "pyproject.toml", "versions.txt"):
        shutil.copy2(execute.ROOT / name, tmp_path / name)
    for name in ("notebooks", "exercises"):
        shutil.copytree(execute.ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(execute.ROOT / ".venv")
    return tmp_path


@contextlib.contextmanager
def make_lab(folder: Path) -> Iterator[str]:
    """Run `make lab` without opening a browser; yields the address that it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST"))}
    own = {f"JUPYTER_{kind}_DIR": str(folder / "jupyter" / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    said = folder / "lab.log"
    keyboard, terminal = os.openpty()  # the server asks before it ends only where somebody could answer
    with said.open("w") as log:
        server = subprocess.Popen(
            # The environment is another folder's, and complete: the copy must not install itself into it.
            ["make", "--old-file=.venv/installed-dev", "lab", "LAB_FLAGS=--no-browser"],
            cwd=folder,
            env={**kept, **own, "IPYTHONDIR": str(folder / "ipython")},
            stdin=terminal,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield wait_for_address(said)
    finally:
        end_session(server, said)
        os.close(keyboard)
        os.close(terminal)


def wait_for_address(said: Path) -> str:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if found := re.search(r"http://\S+token=\w+", said.read_text()):
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"make lab printed no address within {START_LIMIT_S} s:\n{said.read_text()}")


def end_session(server: subprocess.Popen, said: Path) -> None:
    """End the server as two Ctrl-C do, the second when it has asked; make sure that nothing of it is left."""
    family = [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]
    os.killpg(server.pid, signal.SIGINT)
    deadline = time.monotonic() + 20
    while "Shut down this Jupyter server" not in said.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(server.pid, signal.SIGINT)
    _, alive = psutil.wait_procs(family, timeout=30)
    for process in alive:
        process.kill()
    server.wait(timeout=10)
    assert not alive, f"two Ctrl-C left running: {alive}"


def pick(page, menu: str, entry: str) -> None:
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(entry)}$")).click()


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_all(page, path: Path) -> list[dict]:
    """Clear every output, run all cells, save; returns the code cells of the saved file."""
    pick(page, "Edit", "Clear Outputs of All Cells")
    deadline = time.monotonic() + RUN_LIMIT_S
    while not page.locator(".jp-InputPrompt", has_text=re.compile(r"\[[*\d]+\]:")).count():
        assert time.monotonic() < deadline, "no cell began to run"
        pick(page, "Run", "Run All Cells")  # is lost while the kernel is not attached yet
        page.wait_for_timeout(2000)
    while time.monotonic() < deadline:
        pick(page, "File", "Save Notebook")
        page.wait_for_timeout(1000)
        cells = code_cells(path)
        failed = any(is_unexpected_failure(cell) for cell in cells)
        if failed or all(cell["execution_count"] for cell in cells):
            return cells
    raise AssertionError(f"not done within {RUN_LIMIT_S} s: {[cell['execution_count'] for cell in code_cells(path)]}")


def is_unexpected_failure(cell: dict) -> bool:
    expected = "raises-exception" in cell["metadata"].get("tags", [])
    return not expected and any(output["output_type"] == "error" for output in cell["outputs"])


def test_lesson_00_runs_through_the_interface(browser_path, copy):
    from playwright.sync_api import sync_playwright

    stored = code_cells(copy / LESSON)
    with make_lab(copy) as address, sync_playwright() as play:
        assert urlsplit(address).hostname == "127.0.0.1"
        assert urlsplit(address).path == f"/lab/tree/{LESSON.as_posix()}"
        browser = play.chromium.launch(executable_path=browser_path, args=BROWSER_FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(START_LIMIT_S * 1000)
        page.goto(address)
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        title = page.locator(".jp-Notebook h1").first.inner_text()
        files = page.locator(".jp-DirListing-itemText").all_inner_texts()
        panels = [tab.get_attribute("data-id") for tab in page.locator(".jp-SideBar .lm-TabBar-tab").all()]
        asked = page.locator(".Toastify__toast").all_inner_texts()
        try:
            cells = run_all(page, copy / "work" / LESSON)
        finally:
            page.screenshot(path=copy / "lesson.png")  # pytest keeps the folders of its last runs
        browser.close()
    assert title.strip("¶ ")
    assert files == sorted(path.name for path in (copy / "notebooks").glob("*.ipynb")), "the lessons, in their order"
    assert "filebrowser" in panels and not [name for name in panels if "nbgrader" in name]
    assert asked == [], "nothing about news"
    assert code_cells(copy / LESSON) == stored, "the checkout is as it was"
    assert [cell for cell in cells if is_unexpected_failure(cell)] == []
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    # What a cell shows is compared by nbval; here, that each shows as many kinds of thing in the interface.
    assert [kinds(cell) for cell in cells] == [kinds(cell) for cell in stored]


def kinds(cell: dict) -> list[str]:
    return sorted({output["output_type"] for output in cell["outputs"]})
