"""Does this program on several ranks compute what one process computes, read each sample once, and resume exactly?

The runs are those of the rehearsal, with more eyes. On one rank the program was given the samples of the ranks' first
step in its own first step; later ones it chooses itself, so steps are alike only if it divides its batch.
Read next: `certificate.py`, what is told; `watch_certified.py`, where the numbers come from.
"""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ddp_course.rehearsal.certificate import Certificate, power_of_ten
from ddp_course.rehearsal.notes import Notes
from ddp_course.rehearsal.rehearse import Rehearsal, rehearse
from ddp_course.rehearsal.rehearse_weights import CLOSE, EQUAL
from ddp_course.rehearsal.stage import Stage
from ddp_course.rehearsal.two_runs import APART


def certify(script: str | Path, arguments: Sequence[str] = (), *, world_size: int = 2, **more: Any) -> Rehearsal:
    """Rehearse a program, and measure what its certificate says.

    Args:
        more: as of `rehearse`.
    Raises:
        OSError, SyntaxError, ValueError: as `rehearse`.
    Collective: none of its own; the program's, on ranks of this machine.
    """
    measured: dict[str, dict] = {}

    def measure(stage: Stage) -> None:
        measured.update(weights=weights(stage), samples=samples(stage), resume=resume(stage))

    found = rehearse(script, arguments, world_size=world_size, measure=measure, **more)
    digest, told = hashlib.sha256(Path(script).read_bytes()).hexdigest(), [each.as_json() for each in found.findings]
    found.certificate = Certificate(Path(script).name, digest, list(arguments), torch.__version__, world_size,
                                    **measured, findings=told, failure=found.failure)  # fmt: skip
    return found


def _both(stage: Stage) -> tuple[str, Notes, Notes]:
    """Why one process and several ranks cannot be compared, or "", and what they have noted."""
    (many, failure), (one, alone) = (stage.runs.get(name, (Notes([], []), "none")) for name in ("whole", "one"))
    return "it did not run to its end" + (" on 1 rank" if not failure else "") if failure or alone else "", one, many


def weights(stage: Stage) -> dict:
    """Compare all weights of all ranks with those of one process, after each step."""
    reason, one, many = _both(stage)
    seen: dict = {"equal": None, "equal_to": None, "largest_difference": None, "steps": 0, "reason": reason}
    if reason:
        return seen
    alone, *ranks = [_kept(stage.notes(name) / f"rank{rank}.weights")
                     for name, runs in (("one", one), ("whole", many)) for rank in range(len(runs.ranks))]  # fmt: skip
    if large := max((each.shape[1] for each in (alone, *ranks) if not len(each)), default=0):
        return seen | {"reason": f"too large: {8 * large / 1e6:.0f} MB of weights in double precision"}
    steps = min(map(len, (alone, *ranks)))
    if steps < 2 or len({each.shape[1] for each in (alone, *ranks)}) > 1:
        return seen | {"reason": "no step was seen of weights that each rank holds whole, as 1 process does"}
    apart = np.max([np.abs(each[:steps] - alone[:steps]).max(axis=1) for each in ranks], axis=0)
    sizes = np.maximum(np.abs(alone[:steps]).max(axis=1), 1e-30)
    largest = float((apart / sizes).max())
    moved = np.abs(alone[:steps] - alone[0]).max()
    if not moved or not np.isfinite(largest):
        return seen | {"reason": "weights are not finite" if moved else "weights do not change"}
    seen |= {"largest_difference": largest, "steps": steps - 1}
    counts = [len(notes.of("weights")[0]) // 2 for notes in (one, many)]
    # Of how far training has moved them; where that is little, rounding is a larger share of it.
    parted = np.flatnonzero(apart > np.clip(EQUAL * sizes, CLOSE * moved, APART * moved))
    if not len(parted) and counts[0] == counts[1]:
        return seen | {"equal": True, "equal_to": power_of_ten(largest) if largest else 0.0}
    if chance := _chance(many):
        return seen | {"reason": f"chance takes part by design, {chance}"}
    # Up to where the rehearsal has seen so many rows that it notes no more.
    rows = [[sorted(sum(each, [])) for each in takewhile(all, zip(*map(_rows_of_steps, notes.ranks), strict=False))]
            for notes in (one, many)]  # fmt: skip
    other = next((step for step, pair in enumerate(zip(*rows, strict=False), 1) if pair[0] != pair[1]), None)
    if other or counts[0] != counts[1]:
        told = [f"its {counts[0]} steps are {counts[1]} on {len(ranks)} ranks"] if counts[0] != counts[1] else []
        return seen | {"reason": "; ".join(told + ([f"step {other} has other samples"] if other else []))}
    return seen | {"equal": False, "reason": f"by {largest:.1e} of the largest weight, from step {parted[0]} on"}


def _kept(path: Path) -> np.ndarray:
    """A rank's weights, by step: those before the first, then those after each."""
    numbers = np.fromfile(path)
    return numbers[1:].reshape(-1, int(numbers[0])) if len(numbers) else np.empty((0, 0))


def _chance(notes: Notes) -> str:
    if any(fact["random"] and fact["training"] for fact in notes.all("forward")):
        return "dropout"
    lines = [f"line {fact['line']}" for fact in (*notes.draws, *notes.all("chance"))]
    return f"numbers are drawn, {lines[0]}" if lines else ""


def _rows_of_steps(facts: list[dict]) -> list[list[float]]:
    """The samples of each step of one rank."""
    steps: list[list[float]] = [[]]
    for fact in facts:
        if fact["what"] == "forward" and fact["training"]:
            steps[-1] += fact["rows"]
        elif fact["what"] == "weights" and fact["at"] == "after":
            steps.append([])
    return steps


def samples(stage: Stage) -> dict:
    """Count the samples of each epoch that all ranks and one process read to its end."""
    reason, one, many = _both(stage)
    seen: dict = {"once": None, "rows": 0, "repeated": 0, "missing": 0, "epochs": 0, "reason": reason}
    for alone, *ranks in zip(*one.of("epoch"), *many.of("epoch"), strict=False) if not reason else ():
        if not all("drawn" in each for each in (alone, *ranks)):
            return seen | {"reason": "samples have no numbers, are no tensors, or too many"}
        if set().union(*(each["of"] for each in ranks)) != set(alone["of"]):
            return seen | {"reason": "the ranks' data sets together are not that of 1 process"}
        drawn, contents = (Counter(x for each in ranks for x in each[name]) for name in ("drawn", "contents"))
        # Equal samples under other numbers: as many as 1 process reads are the data's own.
        alike = contents.total() - len(contents) - len(alone["contents"]) + len(set(alone["contents"]))
        seen["epochs"] += 1
        seen["rows"] += drawn.total()
        seen["repeated"] += max(drawn.total() - len(drawn), alike)
        seen["missing"] += len(set(alone["of"]) - drawn.keys())
    if not seen["epochs"]:
        return seen | {"reason": reason or "no DataLoader was read to its end in training"}
    return seen | {"once": seen["repeated"] == seen["missing"] == 0}


def resume(stage: Stage) -> dict:
    """Compare what a killed and resumed run has saved at its end with what an uninterrupted one has."""
    (whole, failed), (killed, _), (again, failure) = (
        stage.runs.get(name, (Notes([[]], []), "")) for name in ("whole", "killed", "again")
    )
    states = [[fact["sketch"] for fact in notes.of("weights")[0]] for notes in (whole, killed, again)]
    reasons = {
        "it did not run to its end": failed,
        "it saves nothing with torch.save": "killed" not in stage.runs,
        "no step follows its first save": "again" not in stage.runs,
        "two runs from the start differ: chance without a seed": states[0][: len(states[1])] != states[1],
    }
    seen: dict = {"equal": None, "largest_difference": None, "reason": next((r for r in reasons if reasons[r]), "")}
    if seen["reason"]:
        return seen
    if failure:
        return seen | {"equal": False, "reason": f"after the kill it fails: {failure.splitlines()[0]}"}
    if len(states[2]) >= len(states[0]):
        how = f"with {' '.join(stage.resume_with)}" if stage.resume_with else "not asked for (--resume-with)"
        return seen | {"reason": f"{how}; after the kill it starts from the beginning"}
    homes = [stage.folder / "whole", stage.folder / "resumed"]
    paths = [path.relative_to(homes[0]) for path in sorted(homes[0].rglob("*")) if _is_checkpoint(path)]
    if not (paths := [path for path in paths if not (stage.script.parent / path).exists()]):
        return seen | {"reason": "it leaves no file of torch.save in its folder that was not there before"}
    apart: dict[str, float | None] = {}
    unread = ""
    for path in paths:
        if not (homes[1] / path).exists():
            return seen | {"equal": False, "reason": f"{path} is missing"}
        try:
            one, other = (_leaves(torch.load(home / path, map_location="cpu", weights_only=True)) for home in homes)
        except (pickle.UnpicklingError, RuntimeError):  # the latter of TorchScript
            unread = unread or f"{path} cannot be read with weights_only=True"
            continue
        for name in {**one, **other}:
            pair = one.get(name, ...), other.get(name, ...)  # None can be saved, too
            if not _same(*pair):
                apart[f"{path}{name}"] = _difference(*pair)
    if unlike := [name for name, far in apart.items() if far is None]:
        return seen | {"equal": False, "reason": f"{unlike[0]} differs"}
    if unread and not apart:
        return seen | {"reason": unread}
    largest = max((far for far in apart.values() if far is not None), default=0.0)
    reason = f"{next(iter(apart))} differs, by {largest:.1e} at most" if apart else ""
    return seen | {"equal": not apart, "largest_difference": largest, "reason": reason}


def _is_checkpoint(path: Path) -> bool:
    return path.is_file() and zipfile.is_zipfile(path) and b"/data.pkl" in path.read_bytes()


def _leaves(state: Any) -> dict[str, Any]:
    """What is saved, by its place; Python's floats as tensors, for they are rounded, too."""
    leaves = ((pytree.keystr(way), leaf) for way, leaf in pytree.tree_leaves_with_path(state))
    return {name: torch.tensor(leaf, dtype=torch.float64) if type(leaf) is float else leaf for name, leaf in leaves}


def _same(one: Any, other: Any) -> bool:
    """Whether two saved things are the same, to the bit."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def _difference(one: Any, other: Any) -> float | None:
    """How far floating-point numbers are apart, relative to the largest; None: not by rounding, as anything else."""
    if not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (one, other)):
        return None
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return None
    far = ((one.double() - other.double()).abs().max() / one.double().abs().max().clamp(min=1e-30)).item()
    return far if far < float("inf") else None  # nan, too
