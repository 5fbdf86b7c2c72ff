"""What ranks print, brought to the one who called them: whole, live, and in rank order.

Each rank writes to a file of its own, so nothing is lost when a rank is killed in the middle of a line.
The lowest rank that has not finished is shown live; the others follow in order. The text is therefore the
same on every run, which a notebook that is compared with its stored output needs.

Left out on purpose: telling stdout from stderr; a rank's words stay in the order in which it said them.
Read next: `pool.py`, which calls this while it waits.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from pathlib import Path

MOST_BYTES = 1_000_000  # shown of one rank in one call


class _Stream:
    """The output file of one rank, read as it grows."""

    def __init__(self, rank: int, path: Path):
        self.rank, self.path, self.text = rank, path, ""
        path.touch()
        path.with_suffix(".stack").touch()  # faulthandler's, read after a crash
        self.rewind()

    def rewind(self) -> None:
        os.truncate(self.path, 0)  # the rank appends, so it goes on at the new end
        self.text, self._offset, self._at_start, self._left_out = "", 0, True, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """Return what is new, each line with the rank before it."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(MOST_BYTES - self._offset)
            self._left_out = file.seek(0, os.SEEK_END) - self._offset - len(data)
        self._offset += len(data)
        text = self._decoder.decode(data)
        self.text += text
        # A line begins after \n, and after \r, with which a progress bar goes back to its start.
        shown = re.sub(r"([\r\n]+)(?=[^\r\n])", rf"\1rank {self.rank} | ", text)
        if self._at_start and text[:1] not in ("", "\r", "\n"):
            shown = f"rank {self.rank} | {shown}"
        self._at_start = text[-1] in "\r\n" if text else self._at_start
        return shown

    def close(self) -> str:
        """Return the end of the last line, if the rank left it open, and what was too long to show."""
        end = "" if self._at_start else "\n"
        self._at_start = True
        if self._left_out:
            end += f"rank {self.rank} | … and {self._left_out:,} more bytes, not shown\n"
        return end


class Relay:
    """Shows the output of all ranks while a call runs."""

    def __init__(self, folder: Path, world_size: int, quiet: bool):
        self.folder, self.quiet = folder, quiet
        self._streams = [_Stream(rank, folder / f"rank{rank}.out") for rank in range(world_size)]
        self._current = 0

    def begin(self) -> None:
        """Forget the output of the last call."""
        self._current = 0
        for stream in self._streams:
            stream.rewind()

    def show(self, finished: set[int]) -> None:
        """Show what is new of the lowest unfinished rank, and all of the finished ranks before it."""
        while self._current < len(self._streams):
            stream = self._streams[self._current]
            done = stream.rank in finished  # before reading: whatever it wrote is there now
            self._print(stream.read())
            if not done:
                return
            self._print(stream.close())
            self._current += 1

    def finish(self) -> list[str]:
        """Show everything that is left and return what each rank wrote."""
        self.show(set(range(len(self._streams))))
        return [stream.text for stream in self._streams]

    def text(self, rank: int) -> str:
        """What one rank has written so far in this call, shown or not."""
        return self._streams[rank].path.read_text(errors="replace")

    def _print(self, text: str) -> None:
        if text and not self.quiet:
            sys.stdout.write(text)
            sys.stdout.flush()
