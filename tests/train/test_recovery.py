"""A run that was killed goes on as if it had not been: the same weights, losses and rows, and no saved step is lost."""

from __future__ import annotations

import functools
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler

from ddp_course import RankError, launch
from ddp_course.data import load
from ddp_course.diagnose.nodes import Node
from ddp_course.train.images import Config, Result
from tests.train import recovery_on_ranks as on_ranks
from tests.train.recovery_on_ranks import Case, Death, read_journal, train_and_die
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TINY = Config(epochs=2, hidden=16, local_batch=64, progress=False)
STEPS = {2: 24, 3: 16, 4: 12}  # in two epochs of 1437 rows
CASES, IN_EVERY_RUN = on_ranks.draw_cases(50, seed=5, steps=STEPS), 20  # the others at night


@functools.cache
def images() -> tuple:
    return load("digits", "train"), load("digits", "test")


@pytest.fixture(scope="module")
def start(ranks):
    """A function that trains on ranks that stay: other runs have left their traces in these processes."""

    def run(world_size: int, config: Config, journal: Path, death: Death | None = None, **more: str) -> list[Result]:
        journal.mkdir(parents=True)
        return ranks(world_size).run(train_and_die, arguments(config, journal, death, **more), limit_s=60)

    return run


def arguments(config: Config, journal: Path, death: Death | None, model: str = "", without: str = "") -> tuple:
    return config, journal, images(), death, model, without


def rank_ended(config: Config, world_size: int, journal: Path, death: Death, **more: str) -> None:
    """One life of a run, on fresh ranks, that `death` ends."""
    journal.mkdir(parents=True)
    settings = {"backend": "gloo", "start_method": "forkserver", "timeout_s": 30, "limit_s": 60, "quiet": True}
    with pytest.raises(RankError) as caught:
        launch(train_and_die, world_size, arguments(config, journal, death, **more), **settings)
    assert (caught.value.code, caught.value.rank) == ("died", death.rank), str(caught.value)


def config_of(model: str, **settings) -> Config:
    return replace(TINY, model="mlp" if model == "dropout" else model, **settings)


def outcome(result: Result) -> tuple:
    """What must not depend on whether the run was interrupted."""
    return result.checksum, result.losses, result.own_losses, result.accuracies, result.accuracy, result.steps


def rows_by_step(journal: Path, world_size: int, after: int = 0) -> list[dict[int, list[int]]]:
    """Return for each rank the rows it trained on in each step behind `after`."""
    return [
        {note["step"]: note["rows"] for note in read_journal(journal, rank, "step") if note["step"] > after}
        for rank in range(world_size)
    ]


@pytest.fixture(scope="module")
def straight(start, tmp_path_factory):
    """A function that returns what an uninterrupted run brings: outcomes by rank, and rows by rank and step."""

    @functools.cache
    def run(world_size: int, model: str) -> tuple[list, list]:
        journal = tmp_path_factory.mktemp("straight") / "journal"
        results = start(world_size, config_of(model), journal, model=model)
        assert results[0].steps == STEPS[world_size]
        return [outcome(result) for result in results], rows_by_step(journal, world_size)

    return run


# --- Fifty runs ------------------------------------------------------------------------------------


def last_note(folder: Path, lives: int, what: str) -> int:
    """Return the last step of which rank 0 has written this down in any life."""
    notes = [note for life in range(lives) for note in read_journal(folder / f"life{life}", 0, what)]
    return max((note["step"] for note in notes), default=0)


def may_have_got_its_name_unnoticed(case: Case, death: Death) -> bool:
    """Whether rank 0 may have been in the middle of a save when another thread or rank ended it."""
    return death.place == "waiting" or (case.background and death.place in on_ranks.IN_A_STEP)


def die(case: Case, config: Config, folder: Path, life: int, death: Death, began: int) -> tuple[int, int]:
    """Let one life end by `death`; return the bounds of the step from which the next one goes on."""
    rank_ended(config, case.world_size, folder / f"life{life}", death, model=case.model)
    named, begun = (last_note(folder, life + 1, what) for what in ("named", "begun"))
    done = max((note["step"] for note in read_journal(folder / f"life{life}", 0, "step")), default=began)
    assert done - named <= case.save_every * (2 if case.background else 1)
    return named, begun if may_have_got_its_name_unnoticed(case, death) else named


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.nightly] * (n >= IN_EVERY_RUN))
        for n, case in enumerate(CASES)
    ],
)
def test_killed_at_any_moment_a_run_goes_on_to_the_same_end(case, start, straight, tmp_path):
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
    return next((note["step"] - 1 for note in read_journal(journal, 0, "step")), None)


def test_the_cases_are_as_many_and_as_various_as_they_should_be():
    deaths = [death for case in CASES for death in case.deaths]
    in_a_save = [death for death in deaths if death.place not in on_ranks.IN_A_STEP]
    assert len(CASES) == 50 and len(in_a_save) >= 15
    assert {death.place for death in deaths} >= {"write", "fsync", "replace", "replaced", "waiting", "reading"}
    assert {(case.world_size, case.background) for case in CASES} >= {(w, b) for w in (2, 3) for b in (True, False)}
    assert {death.rank for death in deaths if death.place in on_ranks.IN_A_STEP} >= {0, 1, 2}
    assert sum(len(case.deaths) > 1 for case in CASES) >= 8 and {case.model for case in CASES} == {
        "mlp", "mlp_bn", "dropout"}  # fmt: skip


@pytest.mark.parametrize(
    ("without", "world_size", "model"),
    [
        ("settled buckets", 3, "mlp"),
        ("position", 2, "mlp"),
        ("random state", 2, "dropout"),
        ("own generator", 2, "dropout"),
    ],
)
def test_the_comparison_would_notice_what_is_left_out(without, world_size, model, start, tmp_path):
    more = {"model": model, "without": without}
    whole = start(world_size, config_of(model), tmp_path / "straight", **more)
    config = config_of(model, checkpoint=str(tmp_path / "run"), resume=True, save_every=3)
    rank_ended(config, world_size, tmp_path / "first", Death(1, 5, "trained"), **more)
    resumed = start(world_size, config, tmp_path / "second", **more)
    assert resumed[0].first_step == 3
    assert resumed[0].checksum != whole[0].checksum


# --- Another number of ranks -----------------------------------------------------------------------


def steps_of(rows: int, world_size: int) -> int:
    """Return the steps in which `world_size` ranks get through `rows`."""
    return math.ceil(math.ceil(rows / world_size) / TINY.local_batch)


@pytest.mark.parametrize(("before", "after", "background"), [(2, 3, False), (3, 2, True), (4, 1, False), (1, 4, True)])
def test_resumed_by_another_number_of_ranks_no_row_of_the_epoch_is_lost_or_seen_twice(
    before, after, background, start, tmp_path
):
    config = config_of("mlp", checkpoint=str(tmp_path / "run"), resume=True, save_every=2, background=background)
    rank_ended(config, before, tmp_path / "first", Death(0, 4, "replaced"))  # the file of step 4 is there
    results = start(after, config, tmp_path / "second")
    went_on_at, n = results[0].first_step, len(images()[0])
    assert went_on_at == 4
    order = list(DistributedSampler(range(n), 1, 0, seed=TINY.seed))
    left = n - went_on_at * TINY.local_batch * before
    epoch_ends = went_on_at + steps_of(left, after)
    notes = [note for rank in range(before) for note in read_journal(tmp_path / "first", rank, "step")]
    notes = [note for note in notes if note["step"] <= went_on_at]
    notes += [note for rank in range(after) for note in read_journal(tmp_path / "second", rank, "step")]
    notes = [note for note in notes if note["step"] <= epoch_ends]
    seen = Counter(row for note in notes for row in note["rows"])
    repeated = order[: -left % after]  # to give all ranks the same number, as torch does
    assert seen == Counter(order) + Counter(repeated)

    loss = sum(note["loss"] * len(note["rows"]) for note in notes) / seen.total()
    assert results[0].losses[0] == pytest.approx(loss, rel=1e-6)
    assert {result.checksum for result in results} == {results[0].checksum}
    assert [result.own_losses[0] for result in results] == [None] * after and None not in results[0].own_losses[1:]
    assert {tuple(result.losses) for result in results} == {tuple(results[0].losses)}

    for rank, by_step in enumerate(rows_by_step(tmp_path / "second", after, epoch_ends)):
        sampler = DistributedSampler(range(n), after, rank, seed=TINY.seed)
        sampler.set_epoch(1)
        assert [row for rows in by_step.values() for row in rows] == list(sampler)


# --- Signals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "background", "step"),
    [(2, True, 3), (3, False, 3), (2, False, STEPS[2] // 2 - 1)],  # the last one ends with its epoch
)
def test_a_sigterm_to_one_rank_stops_all_at_one_step_and_they_go_on_exactly(
    world_size, background, step, start, straight, tmp_path
):
    config = config_of("mlp", checkpoint=str(tmp_path / "run"), resume=True, background=background)
    death = Death(world_size - 1, step, "reading", signal=signal.SIGTERM)
    stopped = start(world_size, config, tmp_path / "first", death)
    epochs = (step + 1) // (STEPS[world_size] // 2)
    assert [(r.stopped, r.steps, len(r.losses)) for r in stopped] == [(True, step + 1, epochs)] * world_size
    assert [path.name for path in (tmp_path / "run").glob("*.pt")] == [f"step-{step + 1:010d}.pt"]
    resumed = start(world_size, config, tmp_path / "second")
    assert [(r.stopped, r.first_epoch, r.first_step) for r in resumed] == [(False, epochs, step + 1)] * world_size
    assert [outcome(result) for result in resumed] == straight(world_size, "mlp")[0]


def test_a_sigusr1_to_one_rank_saves_and_the_run_goes_on(start, straight, tmp_path):
    config = config_of("mlp", checkpoint=str(tmp_path / "run"))
    results = start(3, config, tmp_path / "only", Death(2, 3, "reading", signal=signal.SIGUSR1))
    saved = [note["step"] for note in read_journal(tmp_path / "only", 0, "saved")]
    assert saved == [4, 8, 16]  # 8 steps in an epoch
    assert not results[0].stopped and [outcome(result) for result in results] == straight(3, "mlp")[0]


# --- From a terminal -------------------------------------------------------------------------------

EPOCH = STEPS[2] // 2
OPTIONS = ["--epochs=100000", "--hidden=16", "--local-batch=64", "--backend=gloo", "--no-progress", "--keep=100000"]
TRAIN = ["-m", "ddp_course.train", *OPTIONS]


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:15]) for path in folder.glob("step-*.pt"))


def ask_for_a_save_within_an_epoch(folder: Path, signal_it, alive) -> None:
    """Send SIGUSR1 once the training is under way; again, if it came in an epoch's last step, which is saved anyway."""
    wait_for(lambda: saved_steps(folder), alive, "the end of the first epoch")

    def within() -> bool:
        signal_it(signal.SIGUSR1)
        return any(step % EPOCH for step in saved_steps(folder))

    wait_for(within, alive, "a file within an epoch")


def goes_on_exactly(start, folder: Path, tmp_path: Path) -> None:
    """Resume at what was saved last, to the end of that epoch; compare with a run that nobody stopped."""
    last = saved_steps(folder)[-1]
    config = replace(TINY, epochs=last // EPOCH + 1)
    whole = start(2, config, tmp_path / "whole")
    resumed = start(2, replace(config, checkpoint=str(folder), resume=True), tmp_path / "resumed")
    assert resumed[0].first_step == last and resumed[0].steps == whole[0].steps
    assert [outcome(result) for result in resumed] == [outcome(result) for result in whole]


def test_the_command_saves_on_sigusr1_and_on_sigterm_saves_and_ends_with_143(two_cores, start, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, *TRAIN, "--world-size=2", f"--checkpoint={folder}"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ask_for_a_save_within_an_epoch(folder, program.send_signal, lambda: program.poll() is None)
        program.terminate()
        said, errors = program.communicate(timeout=60)
    finally:
        program.kill()
        program.communicate()
    assert program.returncode == 143, errors
    assert f"stopped by a signal after step {saved_steps(folder)[-1]}, saved" in said
    goes_on_exactly(start, folder, tmp_path)


def test_under_torchrun_a_signal_to_one_rank_is_every_ranks(start, tmp_path):
    folder = tmp_path / "run"
    with Node([*TRAIN, f"--checkpoint={folder}"]) as node:
        ask_for_a_save_within_an_epoch(
            folder, lambda number: os.kill(node.rank_pids()[1], number), lambda: node.status is None
        )
        os.kill(node.rank_pids()[1], signal.SIGTERM)
        assert node.wait(60) == 1  # torchrun's own, whatever a rank's was
    assert "exitcode  : 143" in node.errors, node.errors
    goes_on_exactly(start, folder, tmp_path)
