"""The digits, files that are there, downloads that fail, and many ranks that share one download."""

import gzip
import hashlib
import http.server
import json
import os
import socket
import struct
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST

from ddp_course import launch
from ddp_course.data import DATASETS, DatasetError, datasets, digits, load

pytestmark = pytest.mark.timeout(120)

DIGITS_TEST_SHA256 = "3cc232bd25364446c8646cd9434a26e35ea92e20045d395b2fdd2232a75c9b8f"


# --- The digits ------------------------------------------------------------------------------------


def test_digits_are_all_there_once():
    train, test = load("digits", "train"), load("digits", "test")
    assert (len(train), len(test)) == (1437, 360)
    assert train.image_shape == test.image_shape == (1, 8, 8)
    assert train.classes == tuple("0123456789")
    rows = {split.pixels[i].numpy().tobytes() for split in (train, test) for i in range(len(split))}
    assert len(rows) == 1797  # scikit-learn's digits have no two equal images, so no row is in both splits


def test_the_digits_are_scikit_learns_own():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    for split, rows in json.loads(digits.SPLIT.read_text()).items():
        images = load("digits", split)
        assert (images.pixels.squeeze(1).numpy() == theirs.images[rows]).all()
        assert (images.labels.numpy() == theirs.target[rows]).all()


def test_digits_that_are_not_there_are_one_sentence(monkeypatch):
    monkeypatch.setattr(digits, "INSIDE", Path("elsewhere.csv"))
    with pytest.raises(DatasetError, match="the digits cannot be read from .*elsewhere.csv"):
        load("digits")
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match="scikit-learn, which is not installed"):
        load("digits")


def test_the_split_never_changes():
    # Another one would make old results incomparable.
    digest = hashlib.sha256(load("digits", "test").pixels.numpy().tobytes()).hexdigest()
    assert digest == DIGITS_TEST_SHA256


def test_a_row_is_an_image_from_0_to_1_and_its_label():
    train = load()
    image, label = train[0]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32
    assert label.dtype == torch.int64 and label == train.labels[0]
    torch.testing.assert_close(image * 16, train.pixels[0].float())
    assert train.pixels.max() == 16 and (train.pixels.max() / train.white) == 1.0


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="digits, mnist, fashion_mnist, cifar10"):
        load("imagenet")
    with pytest.raises(ValueError, match="train, test"):
        load("digits", "validation")


# --- Files in MNIST's own format -------------------------------------------------------------------


def idx_bytes(values: torch.Tensor) -> bytes:
    """The IDX format: two zero bytes, 8 for unsigned bytes, the number of dimensions, sizes, values."""
    sizes = struct.pack(f">{values.dim()}I", *values.shape)
    return bytes([0, 0, 8, values.dim()]) + sizes + values.to(torch.uint8).numpy().tobytes()


def mnist_files() -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(1)
    files = {}
    for split, n in (("train", 12), ("t10k", 5)):
        files[f"{split}-images-idx3-ubyte"] = idx_bytes(torch.randint(0, 256, (n, 28, 28), generator=generator))
        files[f"{split}-labels-idx1-ubyte"] = idx_bytes(torch.arange(n) % 10)
    return files


@pytest.fixture
def mnist_root(tmp_path: Path) -> Path:
    raw = tmp_path / "there" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, content in mnist_files().items():
        (raw / name).write_bytes(content)
    return tmp_path / "there"


def test_mnist_files_on_disk_are_read_without_a_download(mnist_root):
    train, test = load("mnist", "train", mnist_root), load("mnist", "test", mnist_root)
    assert (len(train), len(test)) == (12, 5)
    assert train.image_shape == (1, 28, 28)
    assert train.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    content = mnist_files()["train-images-idx3-ubyte"][16:]  # after the header
    assert train.pixels.numpy().tobytes() == content
    assert train[3][0][0, 5, 7].item() == pytest.approx(content[3 * 784 + 5 * 28 + 7] / 255)


def test_the_folder_may_come_from_the_environment(mnist_root, monkeypatch):
    monkeypatch.setenv("DDP_COURSE_DATA", str(mnist_root))
    assert len(load("mnist", "test")) == 5


@pytest.mark.parametrize("broken", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_half_a_file_is_not_taken_for_good(mnist_root, broken):
    path = mnist_root / "MNIST" / "raw" / broken
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DatasetError, match=r"mnist: the files in .*MNIST are incomplete or broken .*remove that"):
        load("mnist", "train", mnist_root)  # also when the other split is the broken one
    assert path.exists()  # whose files they are is not ours to judge


def test_fewer_labels_than_images_are_noticed(mnist_root):
    (mnist_root / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(idx_bytes(torch.arange(11)))
    with pytest.raises(DatasetError, match="12 images but 11 labels in the train split"):
        load("mnist", "train", mnist_root)


def test_cifar10_files_with_another_checksum_are_never_unpickled(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (folder / name).write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(DatasetError, match="cifar10: the files in .* are incomplete or broken"):
        load("cifar10", "train", tmp_path)


# --- Downloads -------------------------------------------------------------------------------------


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def mirror(monkeypatch, tmp_path_factory):
    """A folder on a server of ours on loopback: torchvision finds our small MNIST there, and knows its checksums."""
    folder, resources = tmp_path_factory.mktemp("mirror"), []
    for name, content in mnist_files().items():
        packed = gzip.compress(content, mtime=0)
        (folder / f"{name}.gz").write_bytes(packed)
        resources.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        monkeypatch.setattr(MNIST, "resources", resources)
        yield folder
        server.shutdown()


def test_a_download_is_moved_into_place_whole(tmp_path, mirror, capfd):
    assert len(load("mnist", "train", tmp_path / "new")) == 12
    assert os.listdir(tmp_path / "new") == ["MNIST"]
    assert capfd.readouterr() == (f"downloading mnist to {tmp_path / 'new' / 'MNIST'}\n", "")
    load("mnist", "test", tmp_path / "new")
    assert capfd.readouterr().out == ""  # not downloaded again


@pytest.mark.parametrize("fault", ["half a file", "another file"])
def test_a_bad_download_leaves_nothing(tmp_path, mirror, fault):
    file = mirror / "t10k-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-4] if fault == "half a file" else gzip.compress(b"something else"))
    with pytest.raises(DatasetError, match=r"mnist is not in .* cannot be downloaded: File not found or corrupted"):
        load("mnist", "train", tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_silent_server_is_given_up(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never answers
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        monkeypatch.setattr(datasets, "SILENCE_LIMIT_S", 0.2)
        with pytest.raises(DatasetError, match="timed out"):
            load("mnist", "train", tmp_path)
    assert socket.getdefaulttimeout() is None


def go_offline(set_attribute) -> None:
    """Send every download to a closed port of this machine, so that it fails as it does without a network."""
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        address = f"http://127.0.0.1:{closed_soon.getsockname()[1]}/"
    set_attribute(MNIST, "mirrors", [address])
    set_attribute(FashionMNIST, "mirrors", [address])
    set_attribute(CIFAR10, "url", address)


@pytest.mark.parametrize("name", DATASETS[1:])
def test_offline_the_error_names_dataset_folder_and_way_out(tmp_path, monkeypatch, name):
    go_offline(monkeypatch.setattr)
    with pytest.raises(DatasetError) as caught:
        load(name, "train", tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{name} is not in {tmp_path} (looked for the folder ")
    assert "Connection refused" in message
    assert message.endswith(f"give a folder that has {name} (root=...), or use the digits, which need no download")
    assert "\n" not in message
    assert os.listdir(tmp_path) == []


# --- Many ranks ------------------------------------------------------------------------------------


def on_three_ranks(rank: int, world_size: int, empty: str, mnist_root: str) -> dict:
    go_offline(setattr)
    report = {}
    try:
        load("mnist", "train", empty)
    except DatasetError as error:
        report["offline"] = str(error)
    report["rows"] = len(load("mnist", "train", mnist_root))  # the group still works
    report["digits"] = len(load("digits", "test"))
    total = torch.ones(())
    dist.all_reduce(total)
    report["sum"] = total.item()
    return report


def test_a_failed_download_gives_every_rank_the_same_error_and_the_group_goes_on(tmp_path, mnist_root):
    (tmp_path / "empty").mkdir()
    args = (str(tmp_path / "empty"), str(mnist_root))
    reports = launch(on_three_ranks, 3, args=args, start_method="forkserver", quiet=True, limit_s=60)
    assert reports == [reports[0]] * 3
    assert f"mnist is not in {tmp_path / 'empty'}" in reports[0]["offline"]
    assert (reports[0]["rows"], reports[0]["digits"], reports[0]["sum"]) == (12, 360, 3.0)
