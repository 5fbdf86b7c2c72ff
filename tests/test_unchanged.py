"""Is a lesson left out only when it, what it imports and the versions are as they were when all of it passed?"""

from types import SimpleNamespace

import pytest

from tests import unchanged

LESSON = "notebooks/03_process_groups.ipynb"
BANK = "solutions/09_logging"
# They run `ddp-course`: the whole package.
COMMANDS = {"notebooks/00_start_here.ipynb", "notebooks/11_your_own_program.ipynb"}


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        (LESSON, {LESSON}),
        ("solutions/09_logging/09_logging.ipynb", {BANK}),
        ("judges/logging/mean.py", {BANK}),
        ("ddp_course/launcher/pool.py", None),
        ("ddp_course/beyond/live_bytes.py", {"notebooks/17_sharding.ipynb", *COMMANDS}),
        ("versions.txt", None),
        ("tests/test_gpt.py", set()),
    ],
)
def test_what_runs_again_after_a_change(changed, again, monkeypatch):
    before, read = unchanged.groups(), type(unchanged.ROOT).read_bytes
    edited = unchanged.ROOT / changed
    assert edited.is_file()
    monkeypatch.setattr(type(edited), "read_bytes", lambda path: read(path) + b" " * (path == edited))
    after = unchanged.groups()
    assert {group for group in before if before[group] != after[group]} == (set(before) if again is None else again)


class Remembers(dict):
    """Stands in for pytest's cache."""

    def set(self, name: str, value: str) -> None:
        self[name] = value


def ran(
    remembers: Remembers, outcomes: dict[str, bool], *without: str, again: bool = False, part: str = ""
) -> set[str]:
    """Return which cells are run by a session that runs cells `without` some, and notes how they end."""
    config = SimpleNamespace(
        cache=remembers,
        args=[f"{LESSON}::{part}" if part else LESSON],
        getoption=lambda name, default=False: {"again": again, "markexpr": "not nightly"}[name],
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    plugin = unchanged.Unchanged(config)
    items = [SimpleNamespace(nodeid=f"{LESSON}::{cell}", get_closest_marker=lambda name: None) for cell in outcomes]
    plugin.pytest_collection_modifyitems(config, items)
    names = {item.nodeid.partition("::")[2] for item in items} - set(without)
    for name in names:
        for when in ("setup", "call", "teardown"):
            failed = when == "call" and not outcomes[name]
            plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=f"{LESSON}::{name}", when=when, failed=failed))
    return names


def test_only_what_passed_whole_is_left_out_until_it_is_asked_for_again(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    remembers, good = Remembers(), {"Cell 0": True, "Cell 1": True}
    everything = set(good)
    assert ran(remembers, {"Cell 0": True}, part="Cell 0") == {"Cell 0"}
    assert ran(remembers, good, "Cell 1") == {"Cell 0"}  # left out by -k
    assert ran(remembers, {"Cell 0": True, "Cell 1": False}) == everything
    assert ran(remembers, good) == everything  # none of those was a pass of the whole
    assert ran(remembers, good) == set()
    assert ran(remembers, good, again=True) == everything
    monkeypatch.setenv("CI", "true")
    assert ran(remembers, good) == everything
