"""A checkpoint is whole or it is the one before; what changed on the disk is noticed; reading it runs no code."""

import errno
import io
import os
import pickle
import random
import resource
import zipfile
import zlib

import pytest
import torch

from ddp_course.checkpoint.file import CheckpointError, check_seal, load_checkpoint, load_sealed, save_checkpoint

CPU = torch.device("cpu")
STATE = {"model": {"w": torch.arange(3.0)}, "epochs_done": 2, "config": {"lr": 0.1, "root": None}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "last.pt"


@pytest.mark.parametrize("numel", [3, 900_000])
def test_what_was_saved_is_read_back_and_nothing_else_lies_there(path, numel):
    seal = save_checkpoint(path, STATE | {"model": {"w": torch.arange(numel).float(), "v": torch.ones(3)}})
    state, found = load_sealed(path, CPU)
    assert state["model"]["w"].tolist() == list(range(numel)) and state["model"]["v"].tolist() == [1, 1, 1]
    assert (state["epochs_done"], state["config"], found) == (2, {"lr": 0.1, "root": None}, seal)
    assert os.listdir(path.parent) == ["last.pt"]


def test_plain_torch_and_zip_tools_read_our_files(path):
    seal = save_checkpoint(path, STATE)
    assert torch.equal(torch.load(path, weights_only=True)["model"]["w"], STATE["model"]["w"])
    assert torch.equal(torch.load(path, weights_only=True, mmap=True)["model"]["w"], STATE["model"]["w"])
    with zipfile.ZipFile(path) as archive:
        assert archive.comment == b"crc32:" + seal.encode()
        assert archive.testzip() is None


def test_tensors_go_to_the_device_that_is_named(path):
    save_checkpoint(path, STATE)
    state = load_checkpoint(path, torch.device("meta"))  # stands for any other device
    assert state["model"]["w"].device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: one that saved, another that loads")
def test_without_a_map_tensors_go_to_the_gpu_that_saved_them(path):
    save_checkpoint(path, {"w": torch.ones(3, device="cuda:0")})
    with torch.cuda.device(1):
        assert load_checkpoint(path, None)["w"].device.index == 0
        assert load_checkpoint(path, torch.device("cuda", 1))["w"].device.index == 1


# --- Writing ---------------------------------------------------------------------------------------


def test_what_would_be_refused_when_it_is_loaded_is_not_written(path):
    """weights_only lets a bytearray through, and load_checkpoint does not: found on a save, not on a resume."""
    seal = save_checkpoint(path, STATE)
    with pytest.raises(CheckpointError, match=r"was not written: the state holds .*bytearray"):
        save_checkpoint(path, {"cursor": bytearray(b"12")})
    assert load_sealed(path, "cpu")[1] == seal


def test_the_new_name_appears_only_after_the_content_is_on_the_disk(path, monkeypatch):
    steps, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(("fsync", path.exists())), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append(("replace", path.exists())), replace(a, b)))
    save_checkpoint(path, STATE)
    assert steps == [("fsync", False), ("replace", False), ("fsync", True)]


@pytest.mark.parametrize(
    ("held", "refusal"),
    [
        ("open file", pytest.raises((TypeError, AttributeError, pickle.PicklingError))),
        (
            "path",
            pytest.raises(
                CheckpointError, match=r"last\.pt was not written: the state holds pathlib.*weights_only=True"
            ),
        ),
    ],
)
def test_a_save_that_fails_or_could_never_be_read_keeps_the_one_before_and_leaves_nothing(path, held, refusal):
    save_checkpoint(path, STATE)
    with refusal, open(os.devnull) as file:
        save_checkpoint(path, {"model": torch.ones(1000), held: {"open file": file, "path": path.parent}[held]})
    assert load_checkpoint(path, CPU)["epochs_done"] == 2
    assert os.listdir(path.parent) == ["last.pt"]


@pytest.mark.parametrize("numel", [3, 3_000_000])
def test_a_full_disk_is_said_with_what_is_needed_and_free(path, numel):
    save_checkpoint(path, STATE)
    path.with_name(".last.pt.unfinished").symlink_to("/dev/full")  # each write into it finds no space on the device
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(path, {"w": torch.ones(numel), "same again": torch.ones(5), "no tensor": 1})
    assert f"last.pt cannot be written: {os.strerror(errno.ENOSPC)}. The state needs {4 * numel + 20:,} bytes, " in str(
        caught.value
    )
    assert " are free; checkpoints written before are untouched" in str(caught.value)
    assert load_checkpoint(path, CPU)["epochs_done"] == 2
    assert os.listdir(path.parent) == ["last.pt"]


def test_a_file_that_may_not_grow_so_far_is_an_error_too(path):
    save_checkpoint(path, STATE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))  # the write that crosses it is cut short
    try:
        with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
            save_checkpoint(path, {"w": torch.ones(900_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(path.parent) == ["last.pt"]


def test_a_place_where_no_folder_can_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/last\.pt cannot be written: .*may write to"):
        save_checkpoint(tmp_path / "file" / "last.pt", STATE)


# --- Damage ----------------------------------------------------------------------------------------


def refused(content: bytes) -> bool:
    try:
        check_seal(io.BytesIO(content), "x.pt")
    except CheckpointError:
        return True
    return False


def test_every_flipped_bit_of_a_small_checkpoint_is_noticed(path):
    save_checkpoint(path, STATE)
    content = bytearray(path.read_bytes())
    assert not refused(bytes(content))
    missed = []
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            missed += [] if refused(bytes(content)) else [(place, bit)]
            content[place] ^= 1 << bit
    assert missed == []


def test_flipped_bytes_of_a_large_checkpoint_are_noticed_where_torch_notices_none(path):
    state = {"w": torch.zeros(300_000)}
    save_checkpoint(path, state)
    content, rng = bytearray(path.read_bytes()), random.Random(7)
    inside = content.find(bytes(1_000_000))  # the weights: the middle of the file
    for place in rng.sample(range(len(content)), 50):
        content[place] ^= 1 << rng.randrange(8)
        assert refused(bytes(content)), place
        content[place] = path.read_bytes()[place]
    content[inside + 400_002] ^= 64
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"last\.pt is damaged: its bytes are not those that were sealed"):
        load_checkpoint(path, CPU)
    assert torch.load(path, weights_only=True)["w"].count_nonzero() == 1


def test_every_length_it_can_be_cut_to_is_noticed(path):
    save_checkpoint(path, STATE)
    content = path.read_bytes()
    assert [n for n in range(len(content)) if not refused(content[:n])] == []
    assert refused(content + b"\x00") and refused(content + content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: b"", "it is empty"),
        (lambda content: b"not a checkpoint", "it does not begin as a file of torch.save does"),
        (lambda content: content[: len(content) // 2], "it breaks off after"),
        (lambda content: content[:-1], "it breaks off after|it has no seal"),
        (lambda content: of_torch_save(), r"it has no seal\. .*torch\.load\(\.\.\., weights_only=True\)"),
    ],
)
def test_a_broken_checkpoint_is_named_and_the_reason_given(path, damage, said):
    save_checkpoint(path, STATE)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"last\.pt is not a whole checkpoint: ({said})"):
        load_checkpoint(path, CPU)


def of_torch_save() -> bytes:
    file = io.BytesIO()
    torch.save(STATE, file)
    return file.getvalue()


def test_a_missing_checkpoint_says_where_and_what_to_do(path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*last\.pt; a first run has none"):
        load_checkpoint(path, CPU)
    path.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"last\.pt cannot be read: Is a directory"):
        load_checkpoint(path, CPU)


def test_another_file_than_the_one_that_was_meant_is_refused(path):
    save_checkpoint(path, STATE)
    seal = save_checkpoint(path, STATE | {"epochs_done": 3})
    assert load_sealed(path, CPU, seal)[0]["epochs_done"] == 3
    with pytest.raises(CheckpointError, match="is another file than rank 0's of that name"):
        load_sealed(path, CPU, "0" * 8)


class Trap:
    def __reduce__(self):
        return os.mkdir, ("sprung",)


def test_a_checkpoint_that_carries_code_is_refused_unrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_course.checkpoint.file._refuse_what_cannot_be_read", lambda *_: None)
    save_checkpoint("trap.pt", {"model": Trap()})  # sealed well, by somebody who means harm
    with pytest.raises(CheckpointError, match=r"trap\.pt was refused: .*nothing of it was run"):
        load_checkpoint("trap.pt", CPU)
    assert not os.path.exists("sprung")
    torch.load("trap.pt", weights_only=False)  # and the trap is a real one
    assert os.path.exists("sprung")


# --- Files that somebody has made up and sealed ------------------------------------------------------


def sealed(content: bytes) -> bytes:
    """Any zip archive with the seal that fits it."""
    checksum = zlib.crc32(b"\0\0", zlib.crc32(content[:-2]))
    return content[:-2] + b"\x0e\x00crc32:" + f"{checksum:08x}".encode()


def archive(pickled: bytes | None = None, storage: bytes = bytes(16), how: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save writes for four zeros, with another pickle, or other bytes of the tensor."""
    usual, made = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(4)}, usual)
    with zipfile.ZipFile(usual) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            content = {"data.pkl": pickled, "0": storage}.get(name.rpartition("/")[2])
            target.writestr(name, source.read(name) if content is None else content, how)
    return made.getvalue()


class Swells:
    def __reduce__(self):
        return bytearray, (3 << 30,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (archive(pickle.dumps({"a": Swells()}, 2)), "was refused: it holds a bytearray"),
        (archive(storage=bytes(1 << 28), how=zipfile.ZIP_DEFLATED), "compressed, which save_checkpoint never"),
        (archive(b""), "is sealed, but what is in it is no checkpoint"),
        (archive(b"\x80\x02."), "IndexError"),
        (archive(storage=bytes(8)), "is sealed, but what is in it is no checkpoint"),
    ],
)
def test_sealed_nonsense_is_an_error_and_takes_no_memory(path, content, said):
    path.parent.mkdir()
    path.write_bytes(sealed(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path, "cpu")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_an_error_and_is_not_waited_for(path, make):
    path.parent.mkdir()
    make(path)
    with pytest.raises(CheckpointError, match=r"no file but a folder, a pipe or a device|Is a directory"):
        load_checkpoint(path, "cpu")
