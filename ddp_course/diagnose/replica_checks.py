"""Do the ranks get in each other's way, and do they still hold one model?

They share files, devices and cores, and they are meant to share every weight. Each check is a pure function from the
notes of all ranks to a finding, like those of `training_checks.py`, which calls them.

Left out on purpose: the threads of DataLoader's workers, CPU quotas of containers, and BatchNorm layers whose
statistics were shared just before the look.
Read next: `observer.py`, which takes the notes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_course.diagnose.training_facts import Finding, RankFacts, Write
from ddp_course.launcher.rank_status import listed_ranks

PREFIX = "module."
HARMLESS = ("cpu", "meta")  # to load a checkpoint there takes no GPU's memory

# --- Which files, devices, cores -------------------------------------------------------------------


def check_writers(everyone: Sequence[RankFacts]) -> Finding | None:
    """One file has one writer."""
    writers: dict[str, list[tuple[int, Write]]] = {}
    for facts in everyone:
        for write in facts.writes:
            writers.setdefault(write.path, []).append((facts.rank, write))
    for path, found in writers.items():
        ranks = sorted({rank for rank, _ in found})
        if len(ranks) < 2:
            continue
        together = any(a < b and v.began < w.ended and w.began < v.ended for a, v in found for b, w in found)
        hosts = {facts.host for facts in everyone if facts.rank in ranks}
        evidence = (
            f"{listed_ranks(ranks)} wrote the same file, {path.rpartition('/')[2]}"
            f"{'' if len(hosts) == 1 else f', from {len(hosts)} hosts: a fault if they share its folder'}; "
            "let rank 0 write, and the others wait for it"
        )
        return Finding("several-writers", ranks[1], evidence, {"writers": len(ranks), "together": together})
    return None


def check_devices(everyone: Sequence[RankFacts]) -> Finding | None:
    """What a rank loads lies on its own device, or on the CPU."""
    astray = {}
    for facts in everyone:
        elsewhere = {d for load in facts.loads for d in load.devices} - {facts.device, *HARMLESS}
        if elsewhere:
            astray[facts.rank] = (facts.device, sorted(elsewhere))
    if not astray:
        return None
    rank, (own, found) = next(iter(astray.items()))
    evidence = (
        f"{listed_ranks(astray)} loaded a state onto another rank's device: rank {rank} has {own}, its state lies on "
        f"{', '.join(found)}. Without map_location, a tensor returns to the device that it was saved from"
    )
    return Finding("all-on-gpu-0", rank, evidence, {"ranks": len(astray)})


def check_names(everyone: Sequence[RankFacts]) -> Finding | None:
    """A state that fits but for a prefix was saved from the other side of DDP's wrapper."""
    misfits = {}
    for facts in everyone:
        for load in facts.loads:
            fits = len(set(load.names) & set(load.model_names))
            bare = len(_without_prefix(load.names) & _without_prefix(load.model_names))
            if bare > fits:
                misfits[facts.rank] = (fits, bare, len(load.model_names))
    if not misfits:
        return None
    rank = None if len(misfits) == len(everyone) else min(misfits)
    fits, bare, size = next(iter(misfits.values()))
    evidence = (
        f"{fits} of the model's {size} tensors have their name in the state that was loaded; without the prefix "
        f"{PREFIX!r}, {bare} have. With strict=False nothing is said, and the model keeps its first weights"
    )
    return Finding("module-prefix", rank, evidence, {"fits": fits, "without_prefix": bare, "tensors": size})


def _without_prefix(names: Sequence[str]) -> set[str]:
    return {name.removeprefix(PREFIX) for name in names}


def check_threads(everyone: Sequence[RankFacts]) -> Finding | None:
    """The threads of all ranks of a host fit on its cores. One thread each is the least, and never a fault."""
    for host in sorted({facts.host for facts in everyone}):
        here = [facts for facts in everyone if facts.host == host]
        threads, cores = sum(facts.threads for facts in here), len(set().union(*(facts.cores for facts in here)))
        if threads > cores and max(facts.threads for facts in here) > 1:
            share = max(1, cores // len(here))
            greedy = [facts.rank for facts in here if facts.threads > share]
            evidence = (
                f"{len(here)} ranks on {host} use {threads} threads for {cores} cores; torch.set_num_threads({share}) "
                f"on each, or OMP_NUM_THREADS={share} before they start"
            )
            rank = None if len(greedy) == len(here) else greedy[0]
            return Finding("too-many-threads", rank, evidence, {"threads": threads, "cores": cores, "share": share})
    return None


# --- Which replicas --------------------------------------------------------------------------------


def check_batchnorm(everyone: Sequence[RankFacts]) -> Finding | None:
    """Running statistics of the global batch are the same everywhere; those of local batches are not."""
    apart = {}
    for name in everyone[0].of_batchnorm:
        for facts in everyone[1:]:
            mine, theirs = everyone[0].buffers[name], facts.buffers.get(name)
            if theirs is not None and theirs.shape == mine.shape and not torch.equal(mine, theirs):
                apart[name, facts.rank] = (mine.double() - theirs.double()).abs().max().item()
    if not apart:
        return None
    (name, rank), largest = max(apart.items(), key=lambda item: item[1])
    evidence = (
        f"{name} of rank {rank} is up to {largest:.3g} away from rank 0's; {len({n for n, _ in apart})} running "
        "statistics differ. Each rank normalises by its own rows, so each evaluates another model"
    )
    return Finding("batchnorm-drift", rank, evidence, {"largest": largest, "buffers": len({n for n, _ in apart})})


def check_replicas(everyone: Sequence[RankFacts]) -> Finding | None:
    """All other values of the model are the same everywhere."""
    first = everyone[0]
    for facts in everyone[1:]:
        names = [name for name, mine in first.parameters.items() if facts.parameters.get(name) != mine]
        for name in set(first.buffers) - set(first.of_batchnorm):
            if name not in facts.buffers or not torch.equal(first.buffers[name], facts.buffers[name]):
                names.append(name)
        if names:
            evidence = (
                f"{len(names)} tensors of rank {facts.rank} are not rank 0's, {names[0]} among them; the replicas "
                "began unequal, or took unequal steps"
            )
            return Finding("replicas-differ", facts.rank, evidence, {"tensors": len(names)})
    return None
