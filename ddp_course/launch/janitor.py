"""Who ends the ranks when their parent is killed?

A rank ends itself when its pipe breaks, but not while compiled code holds its interpreter. So each set of ranks
has a janitor: a small process, without torch, that reads the ranks' process numbers from its stdin and waits
there. Its stdin ends when the parent is gone. Then it kills the ranks, with their children, and removes their
folder. A parent that cleans up itself kills its janitor last. SIGTERM, with which a notebook's kernel ends all its
children at shutdown, means the same as the end of stdin.

Run as `python janitor.py FOLDER`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress


def main(folder: str) -> None:
    """Wait for the end of stdin, then leave nothing of the ranks named there."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    pids = []
    try:
        for line in sys.stdin:
            pids.append(int(line))
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may not have become the head of its process group yet
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
