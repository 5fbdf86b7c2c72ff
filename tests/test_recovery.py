"""A run that was killed goes on as if it had not been: the same weights, losses and rows, and no saved step is lost."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_course import RankError, launch
from ddp_course.data import load
from ddp_course.train import Config, Result
from tests import recovery_on_ranks as on_ranks
from tests.recovery_on_ranks import Case, Death, read_journal, train_and_die

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TINY = Config(epochs=2, hidden=16, local_batch=64, progress=False)
STEPS = {2: 24, 3: 16, 4: 12}  # in two epochs of 1437 rows
CASES = on_ranks.draw_cases(50, seed=5, steps=STEPS)


@functools.cache
def images() -> tuple:
    return load("digits", "train"), load("digits", "test")


def start(world_size: int, config: Config, journal: Path, death: Death | None = None, **more: str) -> list[Result]:
    """One life of a run, on fresh ranks."""
    journal.mkdir(parents=True)
    args = (config, journal, images(), death, more.get("model", ""), more.get("without", ""))
    return launch(
        train_and_die, world_size, args, backend="gloo", start_method="forkserver", timeout_s=30, limit_s=60, quiet=True
    )


def config_of(model: str, **settings) -> Config:
    return replace(TINY, model="mlp" if model == "dropout" else model, **settings)


def outcome(result: Result) -> tuple:
    """What must not depend on whether the run was interrupted."""
    return result.checksum, result.losses, result.own_losses, result.accuracies, result.accuracy, result.steps


def rows_by_step(journal: Path, world_size: int, after: int = 0, until: int = 10**9) -> list[dict[int, list[int]]]:
    """Return for each rank the rows it trained on in each of the steps `after` + 1 to `until`."""
    return [
        {note["step"]: note["rows"] for note in read_journal(journal, rank)
         if note["what"] == "step" and after < note["step"] <= until}
        for rank in range(world_size)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A function that returns what an uninterrupted run brings: outcomes by rank, and rows by rank and step."""

    @functools.cache
    def run(world_size: int, model: str) -> tuple[list, list]:
        journal = tmp_path_factory.mktemp("straight") / "journal"
        results = start(world_size, config_of(model), journal, model=model)
        assert results[0].steps == STEPS[world_size]
        return [outcome(result) for result in results], rows_by_step(journal, world_size)

    return run


# --- Fifty runs ------------------------------------------------------------------------------------


def newest_by_journal(folder: Path, lives: int) -> tuple[int, int]:
    """Return the last step whose file got its name, and the last step whose saving began, as rank 0 wrote them down."""
    notes = [note for life in range(lives) for note in read_journal(folder / f"life{life}", 0)]
    named = max((note["step"] for note in notes if note["what"] == "named"), default=0)
    begun = max((note["step"] for note in notes if note["what"] == "begun"), default=0)
    return named, begun


def may_have_got_its_name_unnoticed(case: Case, death: Death) -> bool:
    """Whether rank 0 may have been in the middle of a save when another thread or rank ended it."""
    return death.place == "waiting" or (case.background and death.place in on_ranks.IN_A_STEP)


def die(case: Case, config: Config, folder: Path, life: int, death: Death, began: int) -> tuple[int, int]:
    """Let one life end by `death`; return the bounds of the step from which the next one goes on."""
    with pytest.raises(RankError) as caught:
        start(case.world_size, config, folder / f"life{life}", death, model=case.model)
    assert (caught.value.kind, caught.value.rank) == ("died", death.rank), str(caught.value)
    named, begun = newest_by_journal(folder, life + 1)
    done = max(
        (note["step"] for note in read_journal(folder / f"life{life}", 0) if note["what"] == "step"), default=began
    )
    assert done - named <= case.save_every * (2 if case.background else 1)
    return named, begun if may_have_got_its_name_unnoticed(case, death) else named


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_killed_at_any_moment_a_run_goes_on_to_the_same_end(case, straight, tmp_path):
    outcomes, rows = straight(case.world_size, case.model)
    saving = {"save_every": case.save_every, "background": case.background, "keep": case.keep}
    config = config_of(case.model, checkpoint=str(tmp_path / "run"), resume=True, **saving)
    bounds = [(0, 0)]
    for life, death in enumerate(case.deaths):
        bounds.append(die(case, config, tmp_path, life, death, bounds[-1][1]))
    last = len(case.deaths)
    results = start(case.world_size, config, tmp_path / f"life{last}", model=case.model)

    assert [outcome(result) for result in results] == outcomes
    assert bounds[last][0] <= results[0].first_step <= bounds[last][1]
    begins = [*(first_step(tmp_path / f"life{life}") for life in range(last)), results[0].first_step]
    kept: list[dict] = [{} for _ in range(case.world_size)]
    for life, (began, (least, most)) in enumerate(zip(begins, bounds, strict=True)):
        assert began is None or least <= began <= most  # nothing that was saved is done again, nothing is left out
        for rank, by_step in enumerate(rows_by_step(tmp_path / f"life{life}", case.world_size)):
            kept[rank] |= by_step
            assert all(rows[rank][step] == taken for step, taken in by_step.items())
    assert kept == rows


def first_step(journal: Path) -> int | None:
    """Return the steps that this life had behind it when it began; None if it did not come so far."""
    return next((note["step"] - 1 for note in read_journal(journal, 0) if note["what"] == "step"), None)


def test_the_cases_are_as_many_and_as_various_as_they_should_be():
    deaths = [death for case in CASES for death in case.deaths]
    in_a_save = [death for death in deaths if death.place not in on_ranks.IN_A_STEP]
    assert len(CASES) == 50 and len(in_a_save) >= 15
    assert {death.place for death in deaths} >= {"write", "fsync", "replace", "replaced", "waiting", "reading"}
    assert {(case.world_size, case.background) for case in CASES} >= {(w, b) for w in (2, 3) for b in (True, False)}
    assert {death.rank for death in deaths if death.place in on_ranks.IN_A_STEP} >= {0, 1, 2}
    assert sum(len(case.deaths) > 1 for case in CASES) >= 8 and {case.model for case in CASES} == {
        "mlp", "mlp_bn", "dropout"}  # fmt: skip
