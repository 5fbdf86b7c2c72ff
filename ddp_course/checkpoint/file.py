"""When is a file on the disk a whole checkpoint, and how does one know?

A file under its final name must be whole. So it is written under another name beside it, brought to the disk, and
renamed only then: a kill at any moment leaves the old file or the new one. And a byte that changes later must be
noticed, so the file ends with a seal, the CRC-32 of everything before it.

The seal stands in the comment at the end of the zip archive that `torch.save` writes. So there is no second file
that could be lost or belong to another state, and plain `torch.load` reads ours. It does not check anything, though:
torch builds its zip reader without the comparison of checksums, and a flipped byte becomes another weight.

CRC-32 finds every change within 4 neighbouring bytes, and misses one in four billion of the others. SHA-256 takes
several times as long, and its strength is against people. A seal has none: whoever can change the file can seal it
again. Against people there is `weights_only=True`: reading runs no code.

Left out on purpose: compression; weights are as good as random, and it would gain little.
Read next: `folder.py`, a folder of such files; torch/serialization.py, `_save` and `_load`.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import shutil
import stat
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

# The tail of a file: the length of the comment, as zip wants it, and the comment. torch leaves the length 0.
SEAL = re.compile(rb"\x0e\x00crc32:([0-9a-f]{8})")
TAIL_BYTES = 2 + 14
PIECE_BYTES = 1 << 20  # read at once: fits into a core's cache


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used. The message names the file, what is wrong, and the way out."""


# --- Writing ---------------------------------------------------------------------------------------


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> str:
    """Write `state` so that `path` is at every moment either the old checkpoint or the new one.

    Args:
        path: its folder is made if need be.
        state: tensors, numbers, texts, and lists and dicts of them: what loads without running any code.
    Returns:
        The seal, a checksum of the bytes.
    Raises:
        CheckpointError: it cannot be written, or could never be read again. What was at `path` is still there; or the
            new one, if it is whole and only the folder could not be brought to the disk.
    Collective: none. Call it on one rank.
    """
    path = Path(path)
    unfinished = unfinished_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        seal = _write_sealed(unfinished, state)
        _refuse_what_cannot_be_read(unfinished, path)
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):
            raise CheckpointError(_why_not_written(path, state, error)) from error
        raise
    return seal


def unfinished_name(path: Path) -> Path:
    """Return the name under which `path` is written, beside it: a rename must not cross file systems."""
    return path.with_name(f".{path.name}.unfinished")


def _write_sealed(path: Path, state: dict[str, Any]) -> str:
    with path.open("wb", buffering=0) as file:
        sink = _Sink(file)
        torch.save(state, sink)
        if sink.error:
            raise sink.error
        seal = f"{sink.checksum:08x}"
        file.seek(-2, os.SEEK_END)
        _write_all(file, b"\x0e\x00crc32:" + seal.encode())
        os.fsync(file.fileno())  # the rename must not reach the disk before the bytes do
    return seal


class _Sink:
    """What `torch.save` writes into: forms the checksum of the bytes on their way to the file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.checksum, self.error = file, 0, None

    def write(self, data: memoryview) -> int:
        # torch's writer answers an exception with one of its own, about a position. So the first one is kept,
        # and the rest of the bytes go nowhere.
        if self.error is None:
            self.checksum = zlib.crc32(data, self.checksum)
            try:
                _write_all(self.file, data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""


def _write_all(file: BinaryIO, data: memoryview | bytes) -> None:
    rest = memoryview(data)
    while rest:  # one call writes at most 2 GiB, and less on a disk that is nearly full
        rest = rest[file.write(rest) :]


def _refuse_what_cannot_be_read(unfinished: Path, path: Path) -> None:
    unknown = set(torch.serialization.get_unsafe_globals_in_checkpoint(unfinished))
    with zipfile.ZipFile(unfinished) as archive:
        unknown |= {name.replace(" ", ".") for name in _named(archive) if "bytearray" in name}
    if unknown:
        raise CheckpointError(
            f"{path} was not written: the state holds {', '.join(sorted(unknown))}, which weights_only=True or "
            "load_checkpoint would refuse; save tensors, numbers, texts, and lists and dicts of them"
        )


def _why_not_written(path: Path, state: dict[str, Any], error: OSError) -> str:
    folder = next((parent for parent in path.absolute().parents if parent.is_dir()), Path("/"))
    return (
        f"{path} cannot be written: {error.strerror or error}. The state needs {tensor_bytes(state):,} bytes, "
        f"{shutil.disk_usage(folder).free:,} are free; checkpoints written before are untouched. "
        "Make room, or choose a folder that this user may write to"
    )


def tensor_bytes(state: Any) -> int:
    """Return the bytes of all tensors in nested dicts, lists and tuples; storage that is shared counts once."""
    storages: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, dict | list | tuple):
            for inner in part.values() if isinstance(part, dict) else part:
                visit(inner)

    visit(state)
    return sum(storages.values())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk. A rename is such an entry: without this, a power cut may lose it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- Reading ---------------------------------------------------------------------------------------


def load_checkpoint(path: str | Path, map_location: Any) -> dict[str, Any]:
    """Check the seal, then read the checkpoint onto this rank's own device, without running any code in it.

    Args:
        map_location: this rank's device. With None, every rank would put its tensors onto the device of the rank
            that saved them, GPU 0.
    Raises:
        CheckpointError: there is no such file, it is not whole, or it holds code.
    Collective: none.
    """
    return load_sealed(path, map_location)[0]


def load_sealed(path: str | Path, map_location: Any, seal: str | None = None) -> tuple[dict[str, Any], str]:
    """Do what `load_checkpoint` does, and return the file's seal with its content.

    Args:
        seal: the file that is meant, where rank 0 has chosen one and told its seal; None takes any that is whole.
    Raises:
        CheckpointError: as above, or it is another file.
    Collective: none.
    """
    try:
        with _open_plain(path) as file:
            found = check_seal(file, path)
            if seal not in (None, found):
                raise CheckpointError(
                    f"{path} is another file than rank 0's of that name; use a folder that all hosts share"
                )
            refuse_what_swells(file, path)
            file.seek(0)
            return torch.load(file, map_location=map_location, weights_only=True), found
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no checkpoint at {path}; a first run has none to go on from; on several hosts use a folder that "
            "all of them see"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} was refused: it holds more than tensors and plain values, and loading that could run code; "
            f"nothing of it was run. {str(error).partition(chr(10))[0]}"
        ) from error
    except Exception as error:  # sealed as it is, and no checkpoint: torch's reader then raises whatever it stumbles on
        raise CheckpointError(
            f"{path} is sealed, but what is in it is no checkpoint ({type(error).__name__}: {error}); use an older one"
        ) from error


def _open_plain(path: str | Path) -> BinaryIO:
    """Open a file for reading, without waiting for the other end of a pipe that has a checkpoint's name."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is no file but a folder, a pipe or a device; move it away")
    return file


def refuse_what_swells(file: BinaryIO, path: str | Path) -> None:
    """Refuse a file that would take more memory than its own bytes, before any is taken.

    torch.save compresses nothing. `bytearray(n)` is among the few names that weights_only lets through, and takes n
    bytes, whatever n is: `save_checkpoint` refuses one, and so does this.

    Raises:
        CheckpointError: something in it is compressed, or is a bytearray.
    """
    with zipfile.ZipFile(file) as archive:
        packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        named = [] if packed else _named(archive)
    if packed or any("bytearray" in name for name in named):
        what = f"{packed[0]} is compressed" if packed else "it holds a bytearray"
        raise CheckpointError(f"{path} was refused: {what}, which save_checkpoint never does; it could take any memory")


def _named(archive: zipfile.ZipFile) -> list[str]:
    """Return the classes and functions that a checkpoint names; weights_only reads no other naming."""
    pickles = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    return [arg for content in pickles for opcode, arg, _ in pickletools.genops(content) if opcode.name == "GLOBAL"]


def check_seal(file: BinaryIO, path: str | Path) -> str:
    """Read the whole file and return its seal.

    Raises:
        CheckpointError: the seal is missing or does not fit the bytes before it.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    found = SEAL.fullmatch(file.read())
    if not found:
        raise CheckpointError(f"{path} is not a whole checkpoint: {_what_it_is(file, size)}")
    checksum, rest = 0, size - TAIL_BYTES
    file.seek(0)
    while rest:
        piece = file.read(min(rest, PIECE_BYTES))
        checksum = zlib.crc32(piece, checksum)
        rest -= len(piece)
        if not piece:
            raise CheckpointError(f"{path} became shorter while it was read; another program writes to it")
    checksum = zlib.crc32(b"\x00\x00", checksum)  # the length of the comment, as it was before the seal
    if f"{checksum:08x}".encode() != found[1]:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were sealed; use an older checkpoint")
    return found[1].decode()


def _what_it_is(file: BinaryIO, size: int) -> str:
    file.seek(0)
    if size == 0:
        return "it is empty"
    if file.read(4) != b"PK\x03\x04":
        return "it does not begin as a file of torch.save does"
    if zipfile.is_zipfile(file):
        return "it has no seal. If it is torch.save's and you know whose, read it by torch.load(..., weights_only=True)"
    return f"it breaks off after {size:,} bytes, or its end is damaged"
