"""Which GPUs are near each other?

`nvidia-smi topo -m` draws a matrix: NV12 stands for twelve NVLinks between two GPUs, PIX and PXB for switches on
one PCIe tree, PHB and NODE for the way through the processor, SYS for the way to another processor's side. Ranks
that talk much belong on near GPUs. Here the matrix, and the head of `nvidia-smi`, are read from their text.

Standard library alone, and nothing here needs a GPU: the parsers work on any text.
Read next: `cluster_checks.py`, which judges the links.
"""

from __future__ import annotations

import re
import subprocess

# From near to far. NVLinks come before all of them.
NEARNESS = ("PIX", "PXB", "PHB", "NODE", "SYS")
LINK = re.compile(r"^(NV\d+|PIX|PXB|PHB|NODE|SYS|SOC)$")
ROW = re.compile(r"^[ \t]*GPU(\d+)([ \t].*\bX\b.*)$", re.MULTILINE)  # X, itself, stands in no other line with GPUs


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Return the link between each two GPUs, (0, 1) -> "NV12", from what `nvidia-smi topo -m` prints.

    Columns for network cards, CPU affinity and the legend are passed over. Whatever cannot be read is left out.
    """
    rows = {int(gpu): links.split() for gpu, links in ROW.findall(text)}
    return {
        (a, b): "SYS" if link == "SOC" else link  # SOC: SYS's name in old drivers
        for a, links in rows.items()
        for b, link in zip(rows, links, strict=False)  # the first columns are the rows' GPUs
        if a < b and LINK.match(link)
    }


def farness(link: str) -> int:
    """Return how far apart a link's GPUs are: 0 for NVLink, then the place in NEARNESS, counted from 1."""
    return NEARNESS.index(link) + 1 if link in NEARNESS else 0


def parse_driver(text: str) -> tuple[str | None, tuple[int, ...]]:
    """Return the driver's version and the highest CUDA version it is for, from the head that `nvidia-smi` prints."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA (?:UMD )?Version:\s*([\d.]+)", text)
    return (driver[1] if driver else None), tuple(map(int, cuda[1].split("."))) if cuda else ()


def ask_nvidia_smi(*arguments: str, limit_s: float = 20.0) -> str:
    """Return what `nvidia-smi` prints, or nothing where it is missing, fails or does not answer."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
