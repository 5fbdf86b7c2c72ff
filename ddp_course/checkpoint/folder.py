"""What must be saved so that a run can go on, by whom, and onto which device is it loaded?

One rank writes: the replicas are equal, and two writers of one file would spoil it. A `Checkpointer` keeps the last
few checkpoints in a folder, each whole and sealed (`file.py`), and names them by their step. "Latest" is
the highest step whose file is whole. No second file says which one it is, for that file could be wrong.

Every rank reads, each onto its own device, and all read the same one: rank 0 chooses and tells the others. If a
newer one is damaged, the choice falls on the one before, with a warning; it never falls on nothing.

Writing takes time, and the step need not wait for it: `save_later` copies the state and writes the copy in a thread,
while the training changes the original.

Left out on purpose: files that each rank writes its own part of. Models that no single rank holds need them;
torch.distributed.checkpoint has them.
Read next: `state.py`, what goes into the file.
"""

from __future__ import annotations

import copy
import fcntl
import gc
import os
import re
import socket
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from ddp_course.checkpoint.file import (
    CheckpointError,
    load_checkpoint,
    load_sealed,
    save_checkpoint,
    sync_folder,
)
from ddp_course.groups import my_device

__all__ = ["CheckpointError", "Checkpointer", "Loaded", "load_checkpoint", "place_in", "save_checkpoint"]

NAME = re.compile(r"step-(\d{10,})\.pt")
UNFINISHED = re.compile(r"\.step-\d{10,}\.pt\.unfinished")
LOCK = ".writer"  # holds the name of the process that writes into the folder; locked while it lives


class Loaded(NamedTuple):
    """A checkpoint that every rank has read."""

    step: int
    path: Path
    state: dict[str, Any]
    passed_over: list[str]  # why newer ones could not be used, a sentence each; the same on every rank


class Checkpointer:
    """A folder with the last `keep` checkpoints of one run.

        with Checkpointer("run7", keep=3) as checkpoints:
            found = checkpoints.load_latest()              # None in a folder without any
            ...
            checkpoints.save(state, step)                  # on every rank; rank 0's state is written

    Collective: see `load_latest` and `save`; to make one is none.
    """

    _writers: ClassVar[weakref.WeakValueDictionary[tuple[int, int, int], Checkpointer]] = weakref.WeakValueDictionary()

    def __init__(self, folder: str | Path, keep: int = 3, group: dist.ProcessGroup | None = None) -> None:
        """Name the folder; nothing is read or written yet.

        Raises:
            ValueError: `keep` is below 1.
            CheckpointError: there are several ranks and no group is open, so each would think it is the writer.
        """
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the last checkpoint must be kept")
        self.folder, self.keep, self.group = Path(folder), keep, group
        self.rank, self.world_size = place_in(group)
        self._lock = None
        self._writer: ThreadPoolExecutor | None = None
        self._under_way: tuple[int, Future | None] | None = None  # step, and on rank 0 what becomes of its writing

    def steps(self) -> list[int]:
        """Return the steps that have a file, in order. Whether the files are whole is not looked at."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:010d}.pt"

    # --- Saving ------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any] | None, step: int) -> Path:
        """Let rank 0 write `state` as the checkpoint of `step`, then remove the oldest.

        No rank comes back before the file is whole and on the disk. So none can look for it too early, and the
        group's time limit must be longer than the writing takes.

        Args:
            state: read on rank 0 only.
        Raises:
            CheckpointError: on every rank, if rank 0 could not write; earlier checkpoints are untouched.
        Collective: one broadcast_object_list from rank 0, every rank; one more if `save_later` was called before.
        """
        self.finish()
        error = None
        if self.rank == 0:
            try:
                self._write(state, step)
            except Exception as caught:  # whatever it is, the others must not wait for a rank that is gone
                error = caught
        self._raise_everywhere(step, error)
        return self.path_of(step)

    def save_later(self, state: dict[str, Any] | None, step: int) -> None:
        """Copy `state`, and let rank 0 write the copy while the training goes on.

        One checkpoint is under way at a time: this waits for the one before. `finish` waits for the last.

        Args:
            state: read on rank 0 only. Its tensors may change as soon as this has returned.
        Raises:
            CheckpointError: on every rank, if rank 0 could not write the one before; this one is not written then.
        Collective: one broadcast_object_list from rank 0 if this was called before, every rank.
        """
        self.finish()
        writing = None
        if self.rank == 0:
            self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            try:
                writing = self._writer.submit(self._write, copied_to_cpu(state), step)
            except Exception as caught:  # no memory for the copy, say; told to all by `finish`, as any other
                writing = Future()
                writing.set_exception(caught)
        self._under_way = step, writing

    def finish(self) -> None:
        """Wait until what was given to `save_later` is whole and on the disk.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write it; earlier checkpoints are untouched.
        Collective: one broadcast_object_list from rank 0 if something is under way, every rank.
        """
        if self._under_way:
            (step, writing), self._under_way = self._under_way, None
            self._raise_everywhere(step, writing and writing.exception())

    def _raise_everywhere(self, step: int, error: BaseException | None) -> None:
        """Raise rank 0's error on rank 0, and what it says on the others."""
        problem = self._from_rank_0(error and f"{type(error).__name__}: {error}")
        if error:
            raise error
        if problem:
            raise CheckpointError(f"rank 0 could not save step {step}: {problem}")

    def _write(self, state: dict[str, Any], step: int) -> None:
        self._become_the_writer()
        save_checkpoint(self.path_of(step), state)
        self._set_later_ones_aside(step)
        files = [path for path in map(self.path_of, self.steps()) if path.is_file()]
        for old in files[: -self.keep]:  # only now, with the new one safe
            old.unlink()

    def _become_the_writer(self) -> None:
        """Lock the folder, once, and remove what a killed writer left unfinished.

        The lock belongs to the process and is gone with it, however it ends. Unlike flock's, it is not inherited by
        a DataLoader's workers, which may outlive a rank that is killed.
        """
        if self._lock:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_a_second_in_this_process()
            lock = open(self.folder / LOCK, "a+")  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"cannot write into {self.folder}: {error.strerror}; choose another") from error
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            lock.seek(0)
            raise CheckpointError(
                f"another run ({lock.read().strip()}) is writing into {self.folder}; end it, or give this one a "
                "folder of its own"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{self.folder} cannot be locked ({error.strerror}): see that no other run writes there", stacklevel=4
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        self._lock = lock
        for path in self.folder.iterdir():
            if UNFINISHED.fullmatch(path.name):  # nobody else's, since the folder is ours
                path.unlink()

    def _refuse_a_second_in_this_process(self) -> None:
        """The lock cannot: it is the process's, and closing a second one would even end the first."""
        found = self.folder.stat()
        key = found.st_dev, found.st_ino, os.getpid()
        if key in self._writers:
            gc.collect()  # it may be gone, but for a cycle that an error of its own has left
        if self._writers.setdefault(key, self)._lock:
            raise CheckpointError(
                f"another Checkpointer of this program is writing into {self.folder}; close() that one, or give this "
                "one a folder of its own"
            )
        self._writers[key] = self

    def _set_later_ones_aside(self, step: int) -> None:
        """A run that went back to an earlier step leaves later files behind, and they would be taken for the latest."""
        for later in (self.path_of(other) for other in self.steps() if other > step):
            aside = later.with_name(f"{later.name}.set-aside")
            warnings.warn(f"{later} is later than step {step}, just saved; renamed to {aside.name}", stacklevel=4)
            os.replace(later, aside)
            sync_folder(self.folder)

    # --- Loading -----------------------------------------------------------------------------------

    def load_latest(self, map_location: Any = None) -> Loaded | None:
        """Read the newest checkpoint that is whole, the same one on every rank.

        Args:
            map_location: None means this rank's own device.
        Returns:
            None if the folder has no checkpoint at all, and the run begins.
        Raises:
            CheckpointError: on every rank, if there are checkpoints and none can be used, or if some rank does not
                read what rank 0 reads; names the ranks.
        Collective: one broadcast_object_list from rank 0, and if there is a checkpoint, one all_gather_object.
        """
        device = self._own_device() if map_location is None else map_location
        step, state, seal, passed_over = self._newest(device) if self.rank == 0 else (None, None, None, [])
        step, seal, passed_over = self._from_rank_0((step, seal, passed_over))
        if step is None and passed_over:
            raise CheckpointError(f"no checkpoint in {self.folder} can be used:\n" + "\n".join(passed_over))
        if step is None:
            return None
        problem = None
        if self.rank != 0:
            try:
                state, seal = load_sealed(self.path_of(step), device, seal)
            except CheckpointError as error:
                problem = str(error)
        failed = [f"rank {rank}: {said}" for rank, said in enumerate(self._from_all(problem)) if said]
        if failed:
            raise CheckpointError(f"not every rank can read what rank 0 reads, step {step}:\n" + "\n".join(failed))
        return Loaded(step, self.path_of(step), state, passed_over)

    def _newest(self, device: Any) -> tuple[int | None, dict[str, Any] | None, str | None, list[str]]:
        passed_over = []
        for step in reversed(self.steps()):
            try:
                state, seal = load_sealed(self.path_of(step), device)
            except CheckpointError as error:
                passed_over.append(str(error))
                warnings.warn(f"checkpoint passed over: {error}", stacklevel=3)
            else:
                return step, state, seal, passed_over
        return None, None, None, passed_over

    # --- Who else is there -------------------------------------------------------------------------

    def _own_device(self) -> torch.device:
        return my_device(self.group) if dist.is_initialized() else torch.device("cpu")

    def _from_rank_0(self, value: Any) -> Any:
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    def _from_all(self, value: Any) -> list[Any]:
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Let the writing under way come to its end, and another run write into the folder.

        For the bad path, too: it talks to nobody. Whether the writing succeeded, only `finish` tells.
        """
        if self._writer:
            self._writer.shutdown()
            self._writer = None
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def copied_to_cpu(state: Any, copies: dict[tuple, torch.UntypedStorage] | None = None) -> Any:
    """Return a copy of the dicts, lists, tuples and tensors of a state; the tensors in the CPU's memory.

    Args:
        copies: of the storages met so far. Tensors that share one, such as tied weights, share its copy.
    """
    copies = {} if copies is None else copies
    if isinstance(state, torch.Tensor):
        state = state.detach().resolve_conj().resolve_neg()
        if state.layout != torch.strided:  # a sparse one has no storage of its own
            return state.to("cpu", copy=True)
        storage = state.untyped_storage()
        place = (storage.device, storage.data_ptr(), storage.nbytes())
        if place not in copies:
            copies[place] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        alike = torch.empty(0, dtype=state.dtype)
        return alike.set_(copies[place], state.storage_offset(), state.size(), state.stride())
    if isinstance(state, dict):
        same_kind = copy.copy(state)  # a model's state is an OrderedDict with versions attached
        same_kind.update({key: copied_to_cpu(value, copies) for key, value in state.items()})
        return same_kind
    if type(state) in (list, tuple):
        return type(state)(copied_to_cpu(value, copies) for value in state)
    return copy.copy(state)


def place_in(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank and the world size; (0, 1) for a program of one process without a group.

    Raises:
        CheckpointError: a launcher has started several ranks, and no group is open.
    """
    if dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CheckpointError(
            f"rank {os.environ.get('RANK')}: {os.environ['WORLD_SIZE']} ranks were started, but no process group is "
            "open, so each would write; call init_process_group first"
        )
    return 0, 1
