"""The names of workloads, the data sets and their cache, and the shards of the workers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision import datasets

from sapus_cli.errors import UserError
from sapus_cli.workloads import (
    DATASETS,
    MODELS,
    check_names,
    check_partition,
    check_seed,
    default_model,
    fake_shape,
)
from sapus_cli.workloads import data as data_module
from sapus_cli.workloads.data import cache_folder, load, make_dataset, partition, prepare

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL = "fake:1x4x4:2"


def _python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- Names ---


@pytest.mark.parametrize("dataset", [*DATASETS, "fake:3x32x32:10"])
def test_the_default_model_of_every_data_set_goes_with_it(dataset: str) -> None:
    check_names(dataset, default_model(dataset))


@pytest.mark.parametrize("model", [*(m for m in MODELS if m != "gpt"), "torchvision:resnet18"])
def test_every_image_model_goes_with_images_and_not_with_text(model: str) -> None:
    check_names("digits", model)
    with pytest.raises(UserError, match=f"'{model}' takes images.*give gpt"):
        check_names("pydoc", model)


@pytest.mark.parametrize(
    ("dataset", "model", "message"),
    [
        ("digit", "cnn", "unknown data set 'digit'; did you mean digits"),
        ("cifar", "cnn", "did you mean cifar1"),
        ("fake", "cnn", "'fake' does not have the form fake:CxHxW:K"),
        ("fake:3x32:10", "cnn", "'fake:3x32:10' does not have the form fake:CxHxW:K"),
        ("fake:3x32x32:ten", "cnn", "does not have the form"),
        ("fake:3x0x32:10", "cnn", r"C \* H \* W must lie in \[1, 262144\]"),
        ("fake:3x999x999:10", "cnn", r"C \* H \* W must lie in"),
        ("fake:3x32x32:1", "cnn", r"K must lie in \[2, 1000\]"),
        ("digits", "resnet2", "unknown model 'resnet2'; did you mean resnet20"),
        ("digits", "torchvision:", "unknown model 'torchvision:'"),
        ("digits", "gpt", "'gpt' takes text.*give mlp, cnn"),
        ("null", "null", "'null' must have the form null:ELEMENTS"),
        ("null", "null:", "'null:' must have the form"),
        ("null", "null:1e6", "'null:1e6' must have the form"),
        ("null", "null:0", "whole number from 1 to 1000000000"),
        ("null", "null:1000000001", "whole number from 1 to 1000000000"),
        ("null", "mlp", "'mlp': null:ELEMENTS goes with the data set null"),
        ("digits", "null:10", "'null:10': null:ELEMENTS goes with the data set null"),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_be_right(dataset: str, model: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_names(dataset, model)


def test_a_fake_name_is_read() -> None:
    assert fake_shape("fake:3x32x16:10") == (3, 32, 16, 10)


def test_partitions_are_read() -> None:
    assert check_partition("iid") is None
    assert check_partition("dirichlet:0.5") == 0.5


@pytest.mark.parametrize(
    "text", ["", "uniform", "dirichlet", "dirichlet:", "dirichlet:x", "dirichlet:0", "dirichlet:nan"]
)
def test_a_malformed_partition_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="dirichlet:"):
        check_partition(text)


def test_text_cannot_be_skewed_by_labels() -> None:
    with pytest.raises(UserError, match="'dirichlet:1' skews class labels, and text has none; give iid"):
        check_partition("dirichlet:1", "pydoc")
    with pytest.raises(UserError, match="text has none"):
        partition(torch.zeros(10, 4), 2, "dirichlet:1", 0)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(UserError, match=f"seed {seed}: must be a whole number from 0"):
        check_seed(seed)


def test_names_are_checked_without_torch() -> None:
    process = _python("import sys, sapus_cli.workloads; print([m for m in ('torch', 'numpy') if m in sys.modules])")
    out, err = process.communicate(timeout=60)
    assert out.strip() == "[]", err


# --- Data sets ---


def test_digits_are_split_by_class_the_same_way_every_time() -> None:
    data = load(prepare("digits", None, download=False))
    assert (data.kind, data.n_classes, data.train_x.dtype) == ("image", 10, torch.uint8)
    assert (tuple(data.train_x.shape), tuple(data.test_x.shape)) == ((1438, 1, 8, 8), (359, 1, 8, 8))
    # A fifth of 178, 182, 177, 183, 181, 182, 181, 179, 174 and 180 images, each rounded.
    assert torch.bincount(data.test_y).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    x = data.train_x.double()
    assert data.mean == pytest.approx([x.mean().item()])
    assert data.std == pytest.approx([x.std(correction=0).item()])
    assert data_module._digits().sha256 == data.sha256


def test_mnist5k_keeps_a_hundred_images_of_each_digit_for_the_test() -> None:
    data = load(prepare("mnist5k", None, download=False))
    assert (tuple(data.train_x.shape), data.train_x.dtype) == ((4000, 1, 28, 28), torch.uint8)
    assert torch.bincount(data.test_y).tolist() == [100] * 10
    assert int(data.train_x.max()) == 255


def test_mnist5k_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match=r"pip install 'sapus\[mnist\]'"):
        prepare("mnist5k", None, download=False)


def test_text_is_cut_into_windows_with_the_character_that_follows() -> None:
    x, y = data_module._windows(np.arange(130, dtype=np.uint8))
    # 130 characters hold two windows of 64: a third would need 193.
    assert x.tolist() == [list(range(64)), list(range(64, 128))]
    assert y.tolist() == [list(range(1, 65)), list(range(65, 129))]
    x, y = data_module._windows(np.arange(128, dtype=np.uint8))
    assert (len(x), len(y)) == (1, 1)


def test_pydoc_is_the_help_text_of_python() -> None:
    text = data_module._pydoc_text()
    data = load(prepare("pydoc", None, download=False))
    cut = len(text) * 9 // 10
    assert (data.kind, data.n_classes) == ("text", len(set(text)))
    assert tuple(data.train_x.shape) == ((cut - 1) // 64, 64)
    assert tuple(data.test_y.shape) == ((len(text) - cut - 1) // 64, 64)
    vocabulary = sorted(set(text))
    assert "".join(vocabulary[i] for i in data.train_x[1].tolist()) == text[64:128]
    assert "".join(vocabulary[i] for i in data.test_y[0].tolist()) == text[cut + 1 : cut + 65]


def test_fake_images_are_balanced_and_can_be_told_apart() -> None:
    data = load(prepare("fake:1x16x16:10", None, download=False))
    assert (tuple(data.train_x.shape), tuple(data.test_x.shape)) == ((5000, 1, 16, 16), (1000, 1, 16, 16))
    assert torch.bincount(data.train_y).tolist() == [500] * 10
    assert torch.bincount(data.test_y).tolist() == [100] * 10
    centres = torch.stack([data.train_x[data.train_y == k].float().mean(0) for k in range(10)]).flatten(1)
    nearest = torch.cdist(data.test_x.float().flatten(1), centres).argmin(1)
    assert (nearest == data.test_y).float().mean() > 0.9


def test_mean_and_deviation_are_per_channel_and_a_constant_channel_divides_by_one() -> None:
    images = torch.tensor([[[[1.0, 3.0]], [[5.0, 5.0]]], [[[1.0, 3.0]], [[5.0, 5.0]]]])  # two images, 2x1x2
    labels = torch.tensor([0, 1])
    data = make_dataset("toy", "image", (images, labels), (images, labels), 2)
    assert (data.mean, data.std) == ((2.0, 5.0), (1.0, 1.0))


# --- Data sets from files ---


def _write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    """Write the format of MNIST: 0, 0, type (8: unsigned byte), dimensions; sizes, big-endian; the bytes."""
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.tobytes())


def _write_mnist(root: Path, cls: str = "MNIST") -> None:
    folder = root / cls / "raw"
    folder.mkdir(parents=True)
    for part, n in (("train", 6), ("t10k", 2)):
        images = np.arange(n * 28 * 28, dtype=np.uint32).reshape(n, 28, 28) % 251
        _write_idx(folder / f"{part}-images-idx3-ubyte", images.astype(np.uint8))
        _write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8))


@pytest.mark.parametrize(("name", "cls"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_files_are_read(tmp_path: Path, name: str, cls: str) -> None:
    _write_mnist(tmp_path, cls)
    data = load(prepare(name, tmp_path, download=False))
    assert (tuple(data.train_x.shape), tuple(data.test_x.shape)) == ((6, 1, 28, 28), (2, 1, 28, 28))
    assert data.train_y.tolist() == [0, 1, 2, 3, 4, 5]
    assert data.n_classes == 10
    assert data.train_x[5, 0, 27, 27] == (6 * 28 * 28 - 1) % 251


def _write_pickle(path: Path, entry: dict[str, object]) -> list[str]:
    """Pickle as the CIFAR files are: protocol 2, numpy's dtype spelt with 0 and 1. Returns name and MD5."""
    content = pickle.dumps(entry, protocol=2).replace(b"\x89\x88\x87", b"K\x00K\x01\x87")
    path.write_bytes(content)
    return [path.name, hashlib.md5(content, usedforsecurity=False).hexdigest()]


def _write_cifar(root: Path, cls: type[datasets.CIFAR10], label_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / cls.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)
    for attribute in ("train_list", "test_list"):
        files = []
        for i, (file, _) in enumerate(getattr(cls, attribute)):
            rows = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
            rows[0, 2 * 1024 + 5 * 32 + 7] = 100 + i  # image 0, blue, row 5, column 7
            files.append(_write_pickle(folder / file, {"data": rows, label_key: [i, 1, 2, 3]}))
        monkeypatch.setattr(cls, attribute, files)
    name, md5 = _write_pickle(folder / cls.meta["filename"], {cls.meta["key"]: ["a", "b"]})
    monkeypatch.setattr(cls, "meta", {"filename": name, "key": cls.meta["key"], "md5": md5})


@pytest.mark.parametrize(
    ("name", "cls", "label_key", "n_train", "n_classes"),
    [("cifar10", datasets.CIFAR10, "labels", 20, 10), ("cifar100", datasets.CIFAR100, "fine_labels", 4, 100)],
)
def test_cifar_files_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cls: type[datasets.CIFAR10],
    label_key: str,
    n_train: int,
    n_classes: int,
) -> None:
    _write_cifar(tmp_path, cls, label_key, monkeypatch)
    data = load(prepare(name, tmp_path, download=False))
    assert (tuple(data.train_x.shape), tuple(data.test_x.shape)) == ((n_train, 3, 32, 32), (4, 3, 32, 32))
    assert data.n_classes == n_classes
    n_files = n_train // 4
    assert data.train_x[::4, 2, 5, 7].tolist() == [100 + i for i in range(n_files)]
    assert data.train_y.tolist() == [label for i in range(n_files) for label in (i, 1, 2, 3)]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    _write_mnist(tmp_path)
    first = prepare("mnist", tmp_path, download=False)
    assert prepare("mnist", tmp_path, download=False) == first
    labels = np.full(6, 9, dtype=np.uint8)
    _write_idx(tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte", labels)
    second = prepare("mnist", tmp_path, download=False)
    assert second != first
    assert load(second).train_y.tolist() == [9] * 6


def test_a_data_set_of_files_needs_a_folder() -> None:
    with pytest.raises(UserError, match="'cifar10' is read from files; give their folder with --data-dir"):
        prepare("cifar10", None, download=False)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder .*nowhere does not exist; .*--download"):
        prepare("mnist", tmp_path / "nowhere", download=False)
    with pytest.raises(UserError, match=r"lacks MNIST/raw/train-images-idx3-ubyte and 3 more; .*--download"):
        prepare("mnist", tmp_path, download=False)
    _write_mnist(tmp_path)
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match=r"lacks MNIST/raw/t10k-labels-idx1-ubyte; .*--download"):
        prepare("mnist", tmp_path, download=False)


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.MNIST, "mirrors", [(tmp_path / "mirror").as_uri() + "/"])
    with pytest.raises(UserError, match=r"'mnist' could not be downloaded into .*train-images") as caught:
        prepare("mnist", tmp_path, download=True)
    assert "\n" not in str(caught.value)


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    _write_mnist(tmp_path)
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, 6, 28, 28) + b"short")
    with pytest.raises(UserError, match=r"'mnist': the files in .* cannot be read .*; fetch them again"):
        prepare("mnist", tmp_path, download=False)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    _write_mnist(tmp_path)
    labels = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    _write_idx(labels, np.arange(5, dtype=np.uint8))
    with pytest.raises(UserError, match="do not match"):
        prepare("mnist", tmp_path, download=False)
    _write_idx(labels, np.full(6, 10, dtype=np.uint8))
    with pytest.raises(UserError, match="do not match"):
        prepare("mnist", tmp_path, download=False)


def test_cifar_files_of_other_content_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for file in ("train", "test", "meta"):
        (folder / file).write_bytes(b"x")
    with pytest.raises(UserError, match=r"'cifar100': the files in .* cannot be read .*corrupted"):
        prepare("cifar100", tmp_path, download=False)


# --- The cache ---


def test_the_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAPUS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SAPUS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "sapus"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "sapus"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "new" / "cache"
    monkeypatch.setenv("SAPUS_CACHE", str(folder))
    return folder


def test_a_prepared_data_set_is_used_again(empty_cache: Path) -> None:
    path = prepare(SMALL, None, download=False)
    before = path.stat()
    assert prepare(SMALL, None, download=False) == path
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert list(empty_cache.iterdir()) == [path]


@pytest.mark.usefixtures("empty_cache")
def test_writing_to_a_loaded_data_set_does_not_reach_the_file() -> None:
    path = prepare(SMALL, None, download=False)
    data = load(path)
    assert str(path) in Path("/proc/self/maps").read_text() or sys.platform != "linux"
    original = data.train_x.clone()
    data.train_x.zero_()
    assert torch.equal(load(path).train_x, original)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "no meta"])
def test_a_damaged_entry_is_made_anew(damage: str) -> None:
    path = prepare(SMALL, None, download=False)
    good = path.read_bytes()
    bad = {
        "cut": good[:-100],
        "flip": good[:-1] + bytes([good[-1] ^ 1]),
        "empty": b"",
        "no meta": good.replace(b'"sapus"', b'"other"'),
    }[damage]
    path.write_bytes(bad)
    if damage != "flip":  # the digest is looked at once, when a run starts, and not by each of its processes
        with pytest.raises(UserError, match=f"{path.name} cannot be read"):
            load(path)
    assert prepare(SMALL, None, download=False) == path
    assert load(path).sha256 == data_module._fake(SMALL).sha256


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAPUS_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot write to the cache folder .*file/cache .*set SAPUS_CACHE"):
        prepare(SMALL, None, download=False)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cache_that_may_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("SAPUS_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"Permission denied.*set SAPUS_CACHE"):
        prepare(SMALL, None, download=False)


def test_processes_prepare_at_the_same_time_and_load_without_the_data_packages(empty_cache: Path) -> None:
    code = f"""
import sys
from sapus_cli.workloads.data import load, prepare
data = load(prepare({SMALL!r}, None, download=False))
print(data.sha256, [m for m in ("sklearn", "mlxtend", "torchvision") if m in sys.modules])
"""
    results = [process.communicate(timeout=60) for process in [_python(code), _python(code)]]
    assert results[0][0] == results[1][0] == f"{data_module._fake(SMALL).sha256} []\n", results
    assert len(list(empty_cache.iterdir())) == 1


# --- Shards ---


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    share=st.floats(0, 1),
    how=st.sampled_from(["iid", "dirichlet:0.001", "dirichlet:0.3", "dirichlet:1000000"]),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_sample_goes_to_one_worker_and_no_worker_goes_without(
    labels: list[int], share: float, how: str, seed: int
) -> None:
    n_workers = 1 + round(share * (len(labels) - 1))
    shards = partition(torch.tensor(labels), n_workers, how, seed)
    assert sorted(i for shard in shards for i in shard.tolist()) == list(range(len(labels)))
    sizes = [len(shard) for shard in shards]
    assert len(sizes) == n_workers
    assert max(sizes) - min(sizes) <= 1
    again = partition(torch.tensor(labels), n_workers, how, seed)
    assert all(torch.equal(a, b) for a, b in zip(shards, again, strict=True))


def test_another_seed_gives_other_shards() -> None:
    labels = torch.arange(100) % 10
    for how in ("iid", "dirichlet:1"):
        assert partition(labels, 2, how, 0)[0].tolist() != partition(labels, 2, how, 1)[0].tolist()


def _largest_share(how: str) -> float:
    """Share of a worker's most frequent class, mean over the workers."""
    labels = torch.arange(10_000) % 10
    shards = partition(labels, 10, how, 0)
    return float(np.mean([max(Counter(labels[shard].tolist()).values()) / len(shard) for shard in shards]))


def test_a_small_alpha_skews_and_a_large_one_does_not() -> None:
    # With p = 1/10 each, alpha = 0.01 makes Dir(0.001, ...): nearly all of q is one class, though a worker of high
    # rank may find it taken. 1000 draws from the uniform distribution put 100 +- 10 into each class.
    assert _largest_share("dirichlet:0.01") > 0.7
    assert 0.2 < _largest_share("dirichlet:5") < 0.7
    assert _largest_share("dirichlet:1000000") < 0.14


def test_text_windows_are_dealt_out_whole() -> None:
    shards = partition(torch.zeros(7, 64), 2, "iid", 0)
    assert sorted(len(shard) for shard in shards) == [3, 4]


@pytest.mark.parametrize("n_workers", [0, 11])
def test_workers_without_samples_are_refused(n_workers: int) -> None:
    with pytest.raises(UserError, match=f"{n_workers} workers cannot share 10 training samples; give 1 to 10"):
        partition(torch.zeros(10), n_workers, "iid", 0)
