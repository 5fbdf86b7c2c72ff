"""Is this folder fit for checkpoints?

A checkpoint is written beside its place and renamed onto it, so that a kill leaves the old one or the new one. A
lock keeps a second run out. Both are tried here, in the folder itself, since network file systems differ. What kind
of file system it is, is read from the system's list of mounts.

Standard library alone. Left out on purpose: whether another machine sees the folder; only it can tell.
Read next: `cluster_checks.py`, which judges what was found.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

# File systems that other machines can mount too.
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p"}
NETWORK |= {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.gcsfuse", "fuse.s3fs", "fuse.juicefs", "virtiofs"}
MEMORY = {"tmpfs", "ramfs"}  # gone after a restart of the machine
# Tries to lock a file that another process holds; lockf's locks keep processes out, not threads.
TRY_TO_LOCK = """
import fcntl, sys
with open(sys.argv[1], "a") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(3)
"""


@dataclass(frozen=True)
class Storage:
    """What was found about a folder. The defaults describe one that is fit."""

    folder: str = "/data/checkpoints"
    error: str = ""  # why nothing can be written there
    atomic_rename: bool = True  # a rename onto an existing file replaces it
    locks: bool = True  # a lock keeps another process out
    free_bytes: int = 100 * 2**30
    kind: str = "ext4"  # "" if unknown


def look_at(folder: str) -> Storage:
    """Try what a checkpoint needs in `folder`, which must exist, and leave nothing there."""
    kind = kind_of(folder, mounts())
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as own:
            renames, locks = can_rename(Path(own)), can_lock(Path(own, "lock"))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Storage(folder, error.strerror or str(error), False, False, 0, kind)
    return Storage(folder, "", renames, locks, free, kind)


def can_rename(folder: Path) -> bool:
    """Say whether a rename replaces an existing file, with the new bytes, and leaves one name."""
    (folder / "old").write_text("old")
    (folder / "new").write_text("new")
    try:
        os.replace(folder / "new", folder / "old")
    except OSError:
        return False
    return (folder / "old").read_text() == "new" and not (folder / "new").exists()


def can_lock(file: Path) -> bool:
    """Say whether a lock on `file` keeps another process out."""
    try:
        import fcntl

        with open(file, "a") as held:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tried = subprocess.run([sys.executable, "-c", TRY_TO_LOCK, str(file)], timeout=30, capture_output=True)
    except (ImportError, OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 3


def mounts() -> str:
    """Return Linux's list of mounts, or nothing elsewhere."""
    with contextlib.suppress(OSError):
        return Path("/proc/mounts").read_text(errors="replace")
    return ""


def kind_of(folder: str, mounted: str) -> str:
    """Return the type of the file system that holds `folder`: of the deepest mount above it, the latest one.

    Args:
        mounted: lines as in /proc/mounts: device, place, type, options; a space in a place is written \\040.
    """
    folder = os.path.realpath(folder)
    best, kind = -1, ""
    for line in mounted.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        place = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), words[1])
        inside = folder == place or folder.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= best:
            best, kind = len(place), words[2]
    return kind
