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
LINK = re.compile(r"^(NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|X)$")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # the head of the matrix is underlined


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Return the link between each two GPUs, (0, 1) -> "NV12", from what `nvidia-smi topo -m` prints.

    Columns for network cards, CPU affinity and the legend are passed over. Whatever cannot be read is left out.
    """
    columns: list[int] = []
    links = {}
    for line in ESCAPE.sub("", text).splitlines():
        words = line.split()
        if not columns:
            if words[:1] == ["GPU0"] and not LINK.match((words + [""])[1]):
                # A single GPU's head is "GPU0 CPU Affinity ...": only the names GPU<number> are columns.
                columns = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        elif words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, link in zip(columns, words[1:], strict=False):
                if row < column and LINK.match(link):
                    links[row, column] = "SYS" if link == "SOC" else link  # SOC: SYS's name in old drivers
    return links


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
