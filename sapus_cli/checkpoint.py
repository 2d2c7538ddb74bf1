"""Checkpoints: the whole state of a server on disk, so that a server that was killed can be started again.

A checkpoint is two files, numbered from 000001:

    000007.safetensors   every tensor; the global state as "x", others by where they stand, as "early[2]"
    000007.json          everything else, and where the tensors belong

Each is written under a temporary name and renamed, the JSON last: with it the checkpoint exists. Nothing is forced to
the disk (no fsync), so a power cut may tear the newest one. The JSON holds its own CRC-32 and that of the other file:
a reader finds out, and takes the checkpoint before it. That is why two are kept; while a third is written there must be
room for it.

The JSON text:

    {"crc32": "<of all bytes after this line>",
    "format": 1, "tensors": {"bytes": ..., "crc32": "..."}, "tree": NODE}

    NODE   null, true, false, text, a finite float, an integer of 64 bits, or one of
           {"float": "nan" | "inf" | "-inf"}        {"int": "0x..."}        {"tensor": NAME}
           {"list" | "tuple" | "set" | "frozenset": [NODE, ...]}            {"dict": [[NODE, NODE], ...]}
           {"deque": [NODE, ...], "maxlen": n | null}
           {"class" | "namedtuple": "module:qualname", "fields": {name: NODE, ...}}
           {"again": n}, the list, dict, set, deque or dataclass instance that has "id": n

Reading runs nothing that a file brings: there is no pickle, a class must be a dataclass or a named tuple of a module
that has been imported before, and an instance gets its fields without its constructor. A file that differs from this in
any way is damaged. Tensors are stored little-endian, as they lie in the memory of the machines that torch supports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import sys
import zlib
from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from sapus_cli.errors import DamagedFileError, UserError
from sapus_cli.strategy import ServerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

FORMAT = 1
DEEPEST = 100
"""How many containers may stand in one another."""
_CHUNK_BYTES = 1 << 22
_INT64 = range(-(2**63), 2**63)
_NAME = re.compile(r"([0-9]{6,})\.(safetensors|json)(\.tmp)?")
_HEAD = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')
_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CONTAINERS = {"list", "tuple", "set", "frozenset", "dict"}
_SHAPES = {
    *(frozenset({kind}) for kind in ("float", "int", "tensor", "again", *_CONTAINERS)),
    *map(frozenset, ({"deque", "maxlen"}, {"class", "fields"}, {"namedtuple", "fields"})),
}
_ADVICE = (
    "use dataclasses, named tuples, lists, tuples, dicts, sets, deques, tensors, int, float, bool, text and None "
    "themselves, no subclasses of them"
)

T = TypeVar("T")


class UnsavableError(TypeError):
    """A state holds something that a checkpoint cannot: says where it stands, what it is, and what to use instead."""


class Loaded(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        tree: what was saved.
        path: its JSON file.
    """

    tree: Any
    path: Path


class Search(NamedTuple):
    """What was found in a folder.

    Attributes:
        newest: the newest checkpoint that is whole; None if there is none.
        skipped: a line for every newer one, newest first: which file, and what is wrong with it.
    """

    newest: Loaded | None
    skipped: list[str]


class Checkpoints:
    """The checkpoints in one folder, of which one process at a time writes.

    Two are kept: the newest, and the one before it that this object has written or found whole. So damaged ones are
    not kept in the place of whole ones. Other files in the folder are left alone.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: int | None = None

    def save(self, tree: object) -> Path:
        """Write a checkpoint of a tree of objects, and remove those that are no longer needed.

        Vectors are written as they lie in memory; only one that is not contiguous is copied, alone.

        Returns:
            Its JSON file.

        Raises:
            UnsavableError: something in the tree cannot be saved. Nothing has been written.
            OSError: the system does not take it, as on a full disk. Earlier checkpoints are as they were.
        """
        document, tensors = encode(tree)
        number = max(_numbers(self._folder), default=0) + 1
        path = _write(self._folder, number, document, tensors)
        self._prune(number)
        self._whole = number
        return path

    def load(self) -> Search:
        """Read the newest checkpoint that is whole; see `load_newest`."""
        search = load_newest(self._folder)
        self._whole = None if search.newest is None else int(search.newest.path.stem)
        return search

    def _prune(self, newest: int) -> None:
        others = _numbers(self._folder) - {newest}
        kept = {newest, max(others, default=newest) if self._whole is None else self._whole}
        for file, number, temporary in _files(self._folder):
            if temporary or number not in kept:
                # What cannot be removed now is tried again after the next checkpoint.
                with contextlib.suppress(OSError):
                    file.unlink()


def load_newest(folder: Path) -> Search:
    """Read the newest checkpoint that is whole.

    The modules of all classes in it must have been imported. Tensors come as copies in memory of their own, on the CPU.
    """
    return _search(folder, load)


def load(path: Path) -> Any:
    """Read one checkpoint, given its JSON file; returns what was saved.

    Raises:
        DamagedFileError: a file is missing, torn, of another version, or names a class that is not there.
    """
    node, tensors = _read(path)
    try:
        return _Decoder(tensors).decode(node)
    except DamagedFileError as error:
        raise DamagedFileError(f"{path}: {error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{path}: does not hold a state: {type(error).__name__}: {error}") from error


def read_state(folder: Path) -> Tensor:
    """The global state in the newest checkpoint that is whole, shape `(d,)`; needs no module of a strategy.

    Raises:
        UserError: there is no checkpoint in the folder.
        DamagedFileError: there is, but none that is whole and holds a global state; says why.
    """
    search = _search(folder, _read_state)
    if search.newest is not None:
        return search.newest.tree  # type: ignore[no-any-return]
    if search.skipped:
        raise DamagedFileError("; ".join(search.skipped))
    raise UserError(f"no checkpoint in {folder}: there is no file such as 000001.json")


def encode(tree: object) -> tuple[Any, dict[str, Tensor]]:
    """Take a tree of objects apart: what JSON can hold, and its tensors by name, not copied.

    To call it is also the way to learn beforehand whether a tree can be saved.

    Raises:
        UnsavableError: something in it cannot be saved.
    """
    encoder = _Encoder()
    node = encoder.encode(tree)
    return node, encoder.named_tensors()


class _Vector:
    """A tensor of the tree, and the nodes that stand for it."""

    def __init__(self, tensor: Tensor, path: str) -> None:
        self.tensor = tensor
        self.path = path
        self.is_global = False
        self.node: dict[str, Any] = {"tensor": ""}

    def extent(self) -> tuple[int, int]:
        """First and last address of its memory."""
        start, item = self.tensor.data_ptr(), self.tensor.element_size()
        steps = zip(self.tensor.shape, self.tensor.stride(), strict=True)
        return start, start + item * (1 + sum((n - 1) * stride for n, stride in steps)) - 1


class _Encoder:
    def __init__(self) -> None:
        self._path: list[str] = []
        self._seen: dict[int, tuple[object, dict[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._vectors: dict[object, _Vector] = {}
        self._class_names: dict[type, str] = {}

    def encode(self, value: Any) -> Any:
        if value is None or type(value) in {bool, str}:
            return value
        if type(value) is int:
            return value if value in _INT64 else {"int": hex(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if type(value) is torch.Tensor:
            return self._vector(value).node
        return self._container(value)

    def _container(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        if len(self._path) >= DEEPEST:
            raise self._fault(f"stands in {DEEPEST} others, deeper than a checkpoint goes; use a list instead of links")
        if kind in {tuple, frozenset}:
            return {kind.__name__: self._items(value)}
        if _is_named_tuple(kind):
            return {"namedtuple": self._class_name(kind), "fields": self._fields(value, kind._fields)}
        if kind in {list, dict, set, deque} or dataclasses.is_dataclass(kind):
            return self._once(value)
        raise self._fault(f"is a {kind.__module__}.{kind.__qualname__}; {_ADVICE}")

    def named_tensors(self) -> dict[str, Tensor]:
        """All tensors, each under a name of its own, which is put into the nodes too."""
        self._check_memory()
        named: dict[str, Tensor] = {}
        for vector in sorted(self._vectors.values(), key=lambda v: not v.is_global):
            wanted = "x" if vector.is_global else vector.path or "tensor"
            names = itertools.chain([wanted], (f"{wanted}_{n}" for n in itertools.count(2)))
            # The format has that name for itself.
            name = next(name for name in names if name not in named and name != "__metadata__")
            named[name] = vector.tensor
            vector.node["tensor"] = name
        return named

    def _once(self, value: object) -> dict[str, Any]:
        if id(value) in self._seen:
            _, node = self._seen[id(value)]
            return {"again": node.setdefault("id", next(self._ids))}
        node = {}
        self._seen[id(value)] = (value, node)
        node.update(self._contents(value))
        return node

    def _contents(self, value: Any) -> dict[str, Any]:
        if type(value) is dict:
            return {"dict": [[self._at(".keys()", k), self._at(_key(k), v)] for k, v in value.items()]}
        if type(value) is deque:
            return {"deque": self._items(value), "maxlen": value.maxlen}
        if type(value) in {list, set}:
            return {type(value).__name__: self._items(value)}
        names = _field_names(value)
        for name in getattr(value, "__dict__", {}):
            if name not in names and not name.startswith("__"):
                raise self._fault("is an attribute, but no field of its dataclass; declare it as one", f".{name}")
        return {"class": self._class_name(type(value)), "fields": self._fields(value, names)}

    def _items(self, values: Iterable[object]) -> list[Any]:
        return [self._at(f"[{i}]", value) for i, value in enumerate(values)]

    def _fields(self, value: object, names: Sequence[str]) -> dict[str, Any]:
        fields = {}
        for name in names:
            if not hasattr(value, name):
                raise self._fault("is a field of a dataclass and has no value; set it", f".{name}")
            inner = getattr(value, name)
            fields[name] = self._at(f".{name}", inner)
            if name == "x" and isinstance(value, ServerState) and type(inner) is torch.Tensor:
                self._vector(inner).is_global = True
        return fields

    def _at(self, step: str, value: object) -> Any:
        self._path.append(step)
        node = self.encode(value)
        self._path.pop()
        return node

    def _vector(self, tensor: Tensor) -> _Vector:
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _DTYPES:
            raise self._fault(
                f"is a {tensor.dtype} tensor ({tensor.layout}) on {tensor.device}; use a dense one of float, int or "
                "bool elements on the CPU"
            )
        if tensor.requires_grad or tensor.is_neg():
            raise self._fault("is a tensor that is part of a computation; use its detach().clone()")
        # Two objects over the same elements act as one.
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)
        if same not in self._vectors:
            self._vectors[same] = _Vector(tensor, self._where())
        return self._vectors[same]

    def _check_memory(self) -> None:
        """Refuse tensors that are parts of one another: they would be apart after loading."""
        vectors = sorted((v for v in self._vectors.values() if v.tensor.numel()), key=_Vector.extent)
        for one, other in itertools.pairwise(vectors):
            if other.extent()[0] <= one.extent()[1]:
                raise UnsavableError(
                    f"cannot save {one.path} and {other.path}: one shares memory with the other; keep the one and make "
                    "the other from it when it is needed, or clone() it"
                )

    def _class_name(self, cls: type) -> str:
        if cls not in self._class_names:
            name = f"{cls.__module__}:{cls.__qualname__}"
            try:
                found = _class_of(name)
            except DamagedFileError:
                found = None
            if found is not cls:
                raise self._fault(
                    f"is a {name}, which is not to be found under that name; define it at the top of a module"
                )
            if not issubclass(cls, tuple) and not _is_plain(cls):
                raise self._fault(f"is a {name}, a dataclass that is a built-in type too; {_ADVICE}")
            self._class_names[cls] = name
        return self._class_names[cls]

    def _where(self, step: str = "") -> str:
        return "".join((*self._path, step)).removeprefix(".")

    def _fault(self, why: str, step: str = "") -> UnsavableError:
        return UnsavableError(f"cannot save {self._where(step) or 'the whole'}: it {why}")


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._known: dict[int, Any] = {}
        self._depth = 0

    def decode(self, node: Any) -> Any:
        if node is None or type(node) in {bool, str, float} or (type(node) is int and node in _INT64):
            return node
        if type(node) is not dict or frozenset(node) - {"id"} not in _SHAPES:
            raise DamagedFileError(f"does not hold a state: what is {_short(node)}?")
        self._depth += 1
        if self._depth > DEEPEST + 1:
            raise DamagedFileError(f"does not hold a state: it is nested deeper than {DEEPEST}")
        value = self._value(node)
        self._depth -= 1
        return value

    def _value(self, node: dict[str, Any]) -> Any:
        match node:
            case {"float": "nan" | "inf" | "-inf" as text}:
                return float(text)
            case {"int": str(text)}:
                return int(text, 16)
            case {"tensor": str(name)} if name in self._tensors:
                return self._tensors[name]
            case {"again": int(number)} if number in self._known:
                return self._known[number]
        return self._immutable(node)

    def _immutable(self, node: dict[str, Any]) -> Any:
        match node:
            case {"tuple": list(nodes)}:
                return tuple(map(self.decode, nodes))
            case {"frozenset": list(nodes)}:
                return self._unique(frozenset(map(self.decode, nodes)), nodes)
            case {"namedtuple": str(name), "fields": dict(nodes)}:
                cls = _class_of(name)
                if not _is_named_tuple(cls):
                    raise DamagedFileError(f"names {name}, which is no named tuple")
                return tuple.__new__(cls, self._values_of(cls._fields, nodes, name))
        return self._mutable(node)

    def _mutable(self, node: dict[str, Any]) -> Any:
        """What may be referred to again, also from its own inside: it is known before it is filled."""
        match node:
            case {"list": list(nodes)}:
                items: list[Any] = self._know(node, [])
                items.extend(map(self.decode, nodes))
                return items
            case {"set": list(nodes)}:
                members: set[Any] = self._know(node, set())
                members.update(map(self.decode, nodes))
                return self._unique(members, nodes)
            case {"dict": list(nodes)}:
                mapping: dict[Any, Any] = self._know(node, {})
                mapping.update((self.decode(key), self.decode(value)) for key, value in nodes)
                return self._unique(mapping, nodes)
            case {"deque": list(nodes), "maxlen": int() | None as most} if most is None or most >= len(nodes):
                queue: deque[Any] = self._know(node, deque(maxlen=most))
                queue.extend(map(self.decode, nodes))
                return queue
            case {"class": str(name), "fields": dict(nodes)}:
                instance, names = self._know(node, _new(name)), _field_names(_class_of(name))
                for field, value in zip(names, self._values_of(names, nodes, name), strict=True):
                    object.__setattr__(instance, field, value)
                return instance
        raise DamagedFileError(f"does not hold a state: what is {_short(node)}?")

    def _know(self, node: dict[str, Any], value: T) -> T:
        if "id" in node:
            if type(node["id"]) is not int or node["id"] in self._known:
                raise DamagedFileError(f"does not hold a state: {_short(node['id'])} is no id, or stands there twice")
            self._known[node["id"]] = value
        return value

    def _values_of(self, names: Sequence[str], nodes: dict[str, Any], cls: str) -> list[Any]:
        if different := sorted(set(names) ^ set(nodes)):
            raise DamagedFileError(f"is of another version: {cls} differs in the field {different[0]!r}")
        return [self.decode(nodes[name]) for name in names]

    @staticmethod
    def _unique(values: Any, nodes: Sequence[object]) -> Any:
        if len(values) != len(nodes):
            raise DamagedFileError("does not hold a state: something in a set or a dict stands there twice")
        return values


def _class_of(name: str) -> Any:
    """The class behind "module:qualname", without importing or calling anything."""
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType):
        raise DamagedFileError(f"names {_short(name)}, but there is no such module among those imported")
    found: Any = module
    for part in qualname.split("."):
        found = vars(found).get(part) if found is module or isinstance(found, type) else None
    if not isinstance(found, type):
        raise DamagedFileError(f"names {_short(name)}, which is no class")
    return found


def _new(name: str) -> Any:
    """An instance of a dataclass without any field, made without its constructor."""
    cls: Any = _class_of(name)
    if not dataclasses.is_dataclass(cls):
        raise DamagedFileError(f"names {name}, which is no dataclass")
    return object.__new__(cls)  # type: ignore[arg-type]


def _field_names(dataclass: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(dataclass)]


def _is_named_tuple(cls: Any) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def _is_plain(cls: type) -> bool:
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


def _key(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isascii() and key.isidentifier() else f"[{ascii(key)[:40]}]"


def _short(value: object) -> str:
    text = ascii(list(value)) if isinstance(value, dict) else ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004 - a line stays a line


def _files(folder: Path) -> Iterator[tuple[Path, int, bool]]:
    """The files of checkpoints: path, number, whether the name is a temporary one."""
    if folder.is_dir():
        for file in list(folder.iterdir()):
            if match := _NAME.fullmatch(file.name):
                yield file, int(match[1]), match[3] is not None


def _numbers(folder: Path) -> set[int]:
    return {number for _, number, temporary in _files(folder) if not temporary}


def _search(folder: Path, read: Callable[[Path], Any]) -> Search:
    skipped: list[str] = []
    for number in sorted(_numbers(folder), reverse=True):
        path = folder / f"{number:06}.json"
        try:
            return Search(Loaded(read(path), path), skipped)
        except DamagedFileError as error:
            skipped.append(str(error))
    return Search(None, skipped)


def _write(folder: Path, number: int, tree: Any, tensors: Mapping[str, Tensor]) -> Path:
    binary, text = (folder / f"{number:06}.{kind}" for kind in ("safetensors", "json"))
    temporary = [path.with_name(f"{path.name}.tmp") for path in (binary, text)]
    try:
        n_bytes, crc = _write_tensors(temporary[0], tensors)
        document = {"format": FORMAT, "tensors": {"bytes": n_bytes, "crc32": f"{crc:08x}"}, "tree": tree}
        rest = json.dumps(document, allow_nan=False)[1:].encode() + b"\n"
        temporary[1].write_bytes(f'{{"crc32": "{zlib.crc32(rest):08x}",\n'.encode() + rest)
        temporary[0].replace(binary)
        temporary[1].replace(text)
    except BaseException:
        for path in (*temporary, binary):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise
    return text


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write a safetensors file; returns its size in bytes and its CRC-32."""
    # In the order of falling element sizes every element is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size = crc = 0
    with path.open("wb") as file:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for chunk in itertools.chain([head], _chunks(tensor for _, tensor in ordered)):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
            file.write(chunk)
    return size, crc


def _chunks(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def _read(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """Read both files of a checkpoint, of which it has been made sure that they are as they were written."""
    document = _read_document(path)
    binary = path.with_suffix(".safetensors")
    _check_whole(binary, document["tensors"])
    try:
        # Copies, since arithmetic on memory aligned otherwise may differ in the last bit, and the file may be removed.
        with safe_open(binary, framework="pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{binary}: is no safetensors file: {error}") from error
    return document["tree"], tensors


def _read_state(path: Path) -> Tensor:
    _, tensors = _read(path)
    if "x" not in tensors:
        raise DamagedFileError(f"{path}: holds no global state")
    return tensors["x"]


def _read_document(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: is missing, so the checkpoint was not finished") from error
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read: {error.strerror}") from error
    head = _HEAD.match(data)
    if head is None or int(head[1], 16) != zlib.crc32(memoryview(data)[head.end() :]):
        raise DamagedFileError(f"{path}: is torn or was changed: its checksum does not fit")
    try:
        document = json.loads(b"{" + data[head.end() :], parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: is not the JSON of a checkpoint: {error}") from error
    match document:
        case {"format": int(version)} if version != FORMAT:
            raise DamagedFileError(f"{path}: has format {_short(version)}, this sapus reads {FORMAT}")
        case {"format": int(), "tensors": {"bytes": int(), "crc32": str()}, "tree": _, **rest} if not rest:
            return document  # type: ignore[no-any-return]
    raise DamagedFileError(f"{path}: is not the JSON of a checkpoint")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {_short(text)} is out of range")
    return value


def _check_whole(path: Path, expected: dict[str, Any]) -> None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            crc = 0
            while size == expected["bytes"] and (chunk := file.read(_CHUNK_BYTES)):
                crc = zlib.crc32(chunk, crc)
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path}: is missing") from error
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read: {error.strerror}") from error
    if size != expected["bytes"]:
        raise DamagedFileError(f"{path}: is torn: it has {size} bytes, not {_short(expected['bytes'])}")
    if f"{crc:08x}" != expected["crc32"]:
        raise DamagedFileError(f"{path}: is torn or was changed: its checksum does not fit")
