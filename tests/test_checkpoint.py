"""Checkpoints: a state comes back as it was, to the last bit; what is torn or forged is found out and not run."""

from __future__ import annotations

import json
import math
import random
import resource
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from cores import InMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import strategies
from sapus_cli import registry
from sapus_cli.checkpoint import DEEPEST, Checkpoints, UnsavableError, encode, load, load_newest, read_state
from sapus_cli.errors import DamagedFileError, UserError
from sapus_cli.protocol import PushRow
from sapus_cli.strategy import Round, ServerState, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sapus_cli.strategy import Vec

NAMES = sorted(strategies.REGISTRY)
SMALL: dict[str, dict[str, Any]] = {"diloco": {"h": 5}, "fedbuff": {"k": 2}, "adacomm": {"t0_s": 20.0}}
"""Hyper-parameters that make a rule act within a few steps."""


@dataclass
class Node:
    value: Any = None
    other: Any = None


@dataclass(frozen=True, slots=True)
class Point:
    x: Any
    y: float = 0.0


class Two(NamedTuple):
    one: Any
    two: Any = math.inf


@dataclass
class Sealed:
    """Its constructor may not run when it is loaded."""

    n: int
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.made.append("constructor")


@dataclass
class Own(ServerState):
    near: list[Any] = field(default_factory=list)


@dataclass
class Text(str):  # noqa: SLOT000 - what it is for
    n: int = 0


class Outer:
    @dataclass
    class Inner:
        n: int


def same(a: Any, b: Any, known: dict[int, int] | None = None) -> bool:
    """Whether two trees are the same: types, bits, order, and what is one object in them."""
    known = {} if known is None else known
    if type(a) is not type(b):
        return False
    if a is None or isinstance(a, bool | int | str | float | set | frozenset):
        return exact(a) == exact(b)
    if not isinstance(a, tuple) and (id(a) in known or id(b) in known.values()):
        return known.get(id(a)) == id(b)
    known[id(a)] = id(b)
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    parts = [list(contents(tree)) for tree in (a, b)]
    equally_long = len(parts[0]) == len(parts[1]) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
    return equally_long and all(same(x, y, known) for x, y in zip(*parts, strict=True))


def exact(value: Any) -> object:
    """Something equal for what is the same: NaN is, 0.0 and -0.0 are not. The order in a set does not count."""
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return struct.pack("d", value) if isinstance(value, float) and not math.isnan(value) else repr(value)


def contents(tree: Any) -> Iterable[Any]:
    if is_dataclass(tree):
        return [getattr(tree, f.name) for f in fields(tree)]
    return [part for item in tree.items() for part in item] if isinstance(tree, Mapping) else tree


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def there_and_back(tree: Any) -> Any:
    with tempfile.TemporaryDirectory() as name:
        return load(Checkpoints(Path(name)).save(tree))


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


FLOATS = st.floats() | st.sampled_from([-0.0, 5e-324, 1e22, 0.1])
SCALARS = st.none() | st.booleans() | st.integers() | st.sampled_from([2**63, -(2**63), 10**400]) | FLOATS | st.text()
TENSORS = st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype),
    st.lists(st.floats(width=32), max_size=5) | st.floats(width=32) | st.just([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool]),
) | st.builds(
    lambda values, dtype: torch.tensor(values, dtype=dtype),
    st.lists(st.integers(0, 127), max_size=5),
    st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]),
)
KEYS = st.integers() | st.text(max_size=3) | st.tuples(st.integers(), st.floats()) | st.none() | st.floats()
TREES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(KEYS, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
        | st.tuples(st.lists(inner, max_size=3), st.none() | st.integers(0, 4)).map(lambda both: deque(*both))
        | st.tuples(inner, inner).map(lambda both: Node(*both))
        | inner.map(Point)
        | inner.map(Two)
        | inner.map(lambda part: [part, (part,), {"again": part}])
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(tree, there_and_back(tree))


def test_what_is_one_object_is_one_again() -> None:
    x, row, known = torch.arange(3.0), Node(1), {1: [2]}
    state = Own(x, near=[x, row, row, known, known, x.view(3)])
    state.near.append(state)
    back = there_and_back({"rows": [row], "state": state})
    near = back["state"].near
    assert near[0] is back["state"].x
    assert near[1] is near[2] is back["rows"][0]
    assert near[3] is near[4]
    assert near[5] is back["state"].x
    assert near[6] is back["state"]
    near[0].add_(1)
    assert back["state"].x.tolist() == [1, 2, 3]


def test_a_constructor_does_not_run_and_nested_classes_are_found() -> None:
    back = there_and_back([Sealed(3), Outer.Inner(4)])
    assert back == [Sealed(3, []), Outer.Inner(4)]
    assert back[0].made == ["constructor"], "once, when it was made"


def test_the_files_are_readable_by_others(tmp_path: Path) -> None:
    state = Own(torch.tensor([1.0, 2.0]), members={3}, near=[{"x": torch.tensor(7, dtype=torch.int16)}, torch.zeros(0)])
    path = Checkpoints(tmp_path).save(
        {"x": torch.ones(1), "state": state, "__metadata__": torch.ones(1), "n": math.nan}
    )
    tensors = load_file(tmp_path / "000001.safetensors")
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "x": [1.0, 2.0],
        "x_2": [1.0],
        "state.near[0].x": 7,
        "state.near[1]": [],
        "__metadata___2": [1.0],
    }
    binary = (tmp_path / "000001.safetensors").read_bytes()
    header = json.loads(binary[8 : 8 + int.from_bytes(binary[:8], "little")])
    for entry in header.values():
        size = int(entry["dtype"][-2:]) // 8
        assert entry["data_offsets"][0] % size == 0, "who maps the file into memory wants its elements aligned"
    assert int.from_bytes(binary[:8], "little") % 8 == 0
    document = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert document["format"] == 1
    assert document["tensors"] == {"bytes": len(binary), "crc32": f"{zlib.crc32(binary):08x}"}
    inner = dict(document["tree"]["dict"][1][1]["fields"])
    assert inner["x"] == {"tensor": "x"}
    assert inner["members"] == {"set": [3]}
    assert inner["setting"]["fields"]["memory_bytes"] == {"float": "inf"}
    assert document["tree"]["dict"][3] == ["n", {"float": "nan"}]


def test_loaded_vectors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    state = ServerState(torch.arange(8.0)[::2], setting=Setting(1e6))
    back = load(Checkpoints(tmp_path).save(state))
    with (tmp_path / "000001.safetensors").open("r+b") as file:
        file.write(b"\xff" * 100)
    back.x.add_(1)
    assert back.x.is_contiguous()
    assert back.x.tolist() == [1, 3, 5, 7]
    assert state.x.tolist() == [0, 2, 4, 6]
    assert back.setting == Setting(1e6)


def bowl(rank: int, y: Vec) -> Vec:
    return y - 1 - 0.1 * rank


def cluster(name: str) -> InMemory:
    strategy = registry.build(name, SMALL.get(name, {}))
    return InMemory(strategy, torch.tensor([5.0, -3.0, 0.3, 1e-3, 7.0]), 3, bowl, lr=0.1, steps=20)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_goes_on_from_a_checkpoint_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    for seed in range(3):
        order = random.Random(seed)  # noqa: S311 - no secret
        without = cluster(name).run(random.Random(seed).choice)  # noqa: S311 - no secret
        done, checkpoints = cluster(name), Checkpoints(tmp_path)
        while len(done.left) < done.n_workers:
            done.happen(*order.choice(done.possible()))
            if done.now % 8 == seed:
                checkpoints.save(done.server.state)
                found = Checkpoints(tmp_path).load().newest
                assert found is not None
                assert same(done.server.state, found.tree)
                done.server.state = found.tree
        assert bits(done.x) == bits(without.x)
        assert [row.version for row in done.rows] == [row.version for row in without.rows]
        assert read_state(tmp_path).shape == (5,)


def test_what_a_server_keeps_beside_the_state_comes_back_too(tmp_path: Path) -> None:
    done = cluster("bsp")
    while not (done.server.waiting and done.rows):
        done.happen(*done.possible()[0])
    saved = done.server.saved()
    tree = {"saved": saved, "rows": [*done.rows, *saved.unanswered], "bytes": {1: 2**40}}
    back = load(Checkpoints(tmp_path).save(tree))
    assert same(tree, back)
    assert isinstance(back["rows"][0], PushRow)
    assert back["rows"][-1] is back["saved"].unanswered[-1]
    assert read_state(tmp_path).equal(done.x)


def local_class() -> object:
    @dataclass
    class Local:
        n: int = 0

    return Local()


def with_attribute() -> Node:
    node = Node()
    node.cache = 1  # type: ignore[attr-defined]
    return node


def without_field() -> Point:
    return object.__new__(Point)


def nested(depth: int) -> object:
    tree: object = None
    for _ in range(depth):
        tree = [tree]
    return tree


WHOLE = torch.zeros(4)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (Own(WHOLE, near=[random.Random()]), "cannot save near[0]: it is a random.Random; use dataclasses"),  # noqa: S311
        ({"a": {(1, 2): len}}, "cannot save a[(1, 2)]: it is a builtins.builtin_function_or_method"),
        ([OrderedDict()], "cannot save [0]: it is a collections.OrderedDict"),
        (object(), "cannot save the whole: it is a builtins.object"),
        (Node(other=b"raw"), "cannot save other: it is a builtins.bytes"),
        ({Path("a"): 1}, "cannot save keys(): it is a pathlib."),
        (WHOLE.numpy().sum(), "it is a numpy.float32"),
        (Node(local_class()), "cannot save value: it is a test_checkpoint:local_class.<locals>.Local, which is not to"),
        (Node(Text(3)), "cannot save value: it is a test_checkpoint:Text, a dataclass that is a built-in type too"),
        ([with_attribute()], "cannot save [0].cache: it is an attribute, but no field of its dataclass"),
        ([without_field()], "cannot save [0].x: it is a field of a dataclass and has no value"),
        (Node([torch.nn.Parameter(WHOLE)]), "cannot save value[0]: it is a torch.nn.parameter.Parameter"),
        ([torch.zeros(2, requires_grad=True)], "cannot save [0]: it is a tensor that is part of a computation"),
        ([torch.zeros(2, dtype=torch.complex64)], "cannot save [0]: it is a torch.complex64 tensor"),
        ([torch.zeros(2, device="meta")], "on meta; use a dense one"),
        ([torch.zeros(2).to_sparse()], "torch.sparse_coo) on cpu; use a dense one"),
        ({"x": WHOLE, "near": [WHOLE[1:3]]}, "cannot save x and near[0]: one shares memory with the other"),
        (nested(DEEPEST + 1), f"it stands in {DEEPEST} others"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(tree: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsavableError) as caught:
        Checkpoints(tmp_path).save(tree)
    assert words in str(caught.value)
    assert names(tmp_path) == []


def test_parts_of_one_vector_that_do_not_overlap_can_be_saved() -> None:
    assert same([WHOLE[:2], WHOLE[2:]], there_and_back([WHOLE[:2], WHOLE[2:]]))


def test_a_tree_may_be_as_deep_as_it_is_said() -> None:
    assert same(nested(DEEPEST), there_and_back(nested(DEEPEST)))


def write_three(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder)
    for n in (1, 2, 3):
        checkpoints.save(Round(torch.full((3,), float(n)), early={n: torch.ones(3)}))
    return checkpoints


def test_two_are_kept_and_other_files_left_alone(tmp_path: Path) -> None:
    others = ["1.json", "000001.json.bak", "state.json", "state.safetensors", "notes"]
    for name in (*others, "000001.safetensors.tmp", "000002.json.tmp", "000007.safetensors.tmp"):
        (tmp_path / name).write_text("something")
    write_three(tmp_path)
    kept = ["000002.json", "000002.safetensors", "000003.json", "000003.safetensors"]
    assert names(tmp_path) == sorted([*others, *kept])
    (tmp_path / "000003.json.tmp").write_text("left by a process that was killed")
    Checkpoints(tmp_path).save(1)
    kept = ["000003.json", "000003.safetensors", "000004.json", "000004.safetensors"]
    assert names(tmp_path) == sorted([*others, *kept])


def test_a_whole_one_is_not_given_up_for_a_damaged_one(tmp_path: Path) -> None:
    write_three(tmp_path)
    (tmp_path / "000003.safetensors").write_bytes(b"")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load().newest is not None
    assert checkpoints.save([]) == tmp_path / "000004.json"
    assert names(tmp_path) == ["000002.json", "000002.safetensors", "000004.json", "000004.safetensors"]
    assert checkpoints.save([]) == tmp_path / "000005.json"
    assert names(tmp_path) == ["000004.json", "000004.safetensors", "000005.json", "000005.safetensors"]


def test_numbers_may_have_more_digits(tmp_path: Path) -> None:
    (tmp_path / "999999.json").write_text("")
    assert Checkpoints(tmp_path).save(7) == tmp_path / "1000000.json"
    found, skipped = load_newest(tmp_path)
    assert found is not None
    assert (found.tree, skipped) == (7, [])


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def a_byte_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def of_the_one_before(file: Path) -> None:
    file.write_bytes(file.with_name("000002" + file.suffix).read_bytes())


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (half, "is torn"),
        (a_byte_short, "is torn"),
        (longer, "is torn"),
        (zeros, "is torn"),
        (empty, "is torn"),
        (of_the_one_before, "is torn"),
        (Path.unlink, "is missing"),
        (a_folder, "cannot be read: Is a directory"),
    ],
)
def test_a_torn_one_is_skipped(damage: Callable[[Path], None], words: str, kind: str, tmp_path: Path) -> None:
    write_three(tmp_path)
    damage(tmp_path / f"000003.{kind}")
    found, skipped = load_newest(tmp_path)
    assert found is not None
    if (damage, kind) == (of_the_one_before, "json"):
        # The text is whole; it is the other file that is not the one it tells of.
        kind = "safetensors"
    assert found.path == tmp_path / "000002.json"
    assert same(found.tree, Round(torch.full((3,), 2.0), early={2: torch.ones(3)}))
    assert len(skipped) == 1
    assert skipped[0].startswith(f"{tmp_path / '000003'}.{kind}: {words}")
    assert read_state(tmp_path).tolist() == [2, 2, 2]


def test_every_byte_counts(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save({"x": torch.arange(2.0)})
    for file in (path, path.with_suffix(".safetensors")):
        whole = file.read_bytes()
        for i in range(len(whole)):
            file.write_bytes(whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :])
            with pytest.raises(DamagedFileError, match="is torn or was changed: its checksum does not fit"):
                load(path)
        file.write_bytes(whole)
    assert load(path)["x"].tolist() == [0, 1]


def test_nothing_there_is_told_from_nothing_whole(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none") == (None, [])
    with pytest.raises(UserError, match=r"no checkpoint in .*none: there is no file such as 000001\.json"):
        read_state(tmp_path / "none")
    (tmp_path / "000001.safetensors").write_bytes(b"")
    (tmp_path / "000002.json").write_bytes(b"")
    found, skipped = load_newest(tmp_path)
    assert found is None
    assert [line[len(str(tmp_path)) :] for line in skipped] == [
        "/000002.json: is torn or was changed: its checksum does not fit",
        "/000001.json: is missing, so the checkpoint was not finished",
    ]
    with pytest.raises(DamagedFileError, match=r"is torn or was changed.*; .*was not finished"):
        read_state(tmp_path)


def forge(path: Path, tree: str, head: str = '"format": 1', more: str = "") -> None:
    """A checkpoint whose checksums are right."""
    binary = path.with_suffix(".safetensors").read_bytes()
    tensors = f'{{"bytes": {len(binary)}, "crc32": "{zlib.crc32(binary):08x}"}}'
    rest = f'{head}, "tensors": {tensors}, "tree": {tree}{more}}}\n'.encode()
    path.write_bytes(f'{{"crc32": "{zlib.crc32(rest):08x}",\n'.encode() + rest)


def class_node(name: str, **values: object) -> str:
    return json.dumps({"class": name, "fields": values})


FORGED = [
    (class_node("os:system"), "names 'os:system', which is no class"),
    (class_node("subprocess:Popen", args="true"), "names subprocess:Popen, which is no dataclass"),
    (
        class_node("antigravity:geohash"),
        "names 'antigravity:geohash', but there is no such module among those imported",
    ),
    (class_node("builtins:eval"), "no class"),
    (class_node("builtins:object"), "no dataclass"),
    (class_node("os:path.join"), "no class"),
    (class_node("os:PathLike.register"), "no class"),
    (class_node("lazy_module:Anything"), "no class"),
    (class_node("test_checkpoint"), "no class"),
    (class_node(""), "no such module"),
    (class_node("test_checkpoint:Two", one=1, two=2), "no dataclass"),
    (class_node("test_checkpoint:Text", n=1), "TypeError"),
    ('{"namedtuple": "test_checkpoint:Node", "fields": {}}', "no named tuple"),
    ('{"namedtuple": "builtins:tuple", "fields": {}}', "no named tuple"),
    (
        '{"namedtuple": "test_checkpoint:Two", "fields": {"one": 1}}',
        "version: test_checkpoint:Two differs in the field",
    ),
    (
        class_node("test_checkpoint:Node", value=1),
        "is of another version: test_checkpoint:Node differs in the field 'o",
    ),
    (class_node("test_checkpoint:Node", value=1, other=2, third=3), "differs in the field 'third'"),
    (class_node("test_checkpoint:Node", value=1, other=2, __class__=3), "differs in the field '__class__'"),
    ('{"list": [' * 100_000 + "]}" * 100_000, "is not the JSON of a checkpoint: "),
    ('{"list": [' * (DEEPEST + 2) + "]}" * (DEEPEST + 2), f"nested deeper than {DEEPEST}"),
    ("9" * 5000, "is not the JSON of a checkpoint: "),
    (str(2**63), f"does not hold a state: what is {2**63}?"),
    ("1e999", "the number '1e999' is out of range"),
    ("NaN", "the number 'NaN' is out of range"),
    ("-Infinity", "out of range"),
    ('{"float": "1"}', "what is ['float']?"),
    ('{"int": "zz"}', "ValueError"),
    ('{"int": 3}', "what is ['int']?"),
    ('{"tensor": "y"}', "what is ['tensor']?"),
    ('{"tensor": ["x"]}', "what is ['tensor']?"),
    ('{"again": 1}', "what is ['again']?"),
    ('{"list": [{"list": [], "id": 1}, {"list": [], "id": 1}]}', "1 is no id, or stands there twice"),
    ('{"list": [], "id": "one"}', "'one' is no id"),
    ('{"list": {}}', "what is ['list']?"),
    ('{"list": [], "more": 1}', "what is ['list', 'more']?"),
    ("[1, 2]", "what is [1, 2]?"),
    ("{}", "what is []?"),
    ('{"set": [{"list": []}]}', "TypeError: unhashable type: 'list'"),
    ('{"set": [1, 1]}', "stands there twice"),
    ('{"frozenset": [1, 1]}', "stands there twice"),
    ('{"dict": [[1, 2], [1, 3]]}', "stands there twice"),
    ('{"dict": [[1, 2, 3]]}', "ValueError"),
    ('{"dict": [1]}', "TypeError"),
    ('{"deque": [1, 2], "maxlen": 1}', "what is ['deque', 'maxlen']?"),
    ('{"deque": [], "maxlen": -1}', "what is ['deque', 'maxlen']?"),
    (f'{{"deque": [], "maxlen": {10**30}}}', "OverflowError"),
    ('{"set": [' + class_node("test_checkpoint:Point", x={"list": []}, y=1) + "]}", "TypeError: unhashable"),
]


@pytest.mark.parametrize(("tree", "words"), FORGED, ids=[words[:40] for _, words in FORGED])
def test_a_forged_one_runs_nothing(tree: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, asked = types.ModuleType("lazy_module"), []

    def make(name: str) -> type:
        asked.append(name)
        return Node

    lazy.__getattr__ = make  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(ServerState(torch.zeros(2)))
    forge(checkpoints.save(ServerState(torch.ones(2))), tree)
    found, skipped = load_newest(tmp_path)
    assert found is not None
    assert found.tree.x.tolist() == [0, 0]
    assert len(skipped) == 1
    assert words in skipped[0]
    assert len(skipped[0]) < 400
    assert "antigravity" not in sys.modules
    assert "Anything" not in asked


@pytest.mark.parametrize(
    ("head", "more", "words"),
    [
        ('"format": 2', "", "has format 2, this sapus reads 1"),
        ('"format": 1' + "0" * 400, "", "has format 1000000"),
        ('"format": "1"', "", "is not the JSON of a checkpoint"),
        ('"version": 1', "", "is not the JSON of a checkpoint"),
        ('"format": 1', ', "more": 1', "is not the JSON of a checkpoint"),
        ('"format": 1', ', "tensors": {"bytes": 1e3, "crc32": "0"}', "is not the JSON of a checkpoint"),
        ('"format": 1', f', "tensors": {{"bytes": {10**40}, "crc32": "0"}}', "is torn: it has 80 bytes, not 10000"),
    ],
)
def test_another_format_is_told(head: str, more: str, words: str, tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(ServerState(torch.ones(2)))
    forge(path, "1", head, more)
    with pytest.raises(DamagedFileError, match=words):
        load(path)


def test_a_file_of_tensors_that_is_none_is_told(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(ServerState(torch.ones(2)))
    path.with_suffix(".safetensors").write_bytes(b"\xff" * 20)
    forge(path, "1")
    with pytest.raises(DamagedFileError, match=r"000001\.safetensors: is no safetensors file"):
        load(path)


def test_the_global_state_is_read_without_the_classes(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(ServerState(torch.ones(2)))
    forge(path, class_node("gone:Strategy"))
    assert load_newest(tmp_path).newest is None
    assert read_state(tmp_path).tolist() == [1, 1]
    path = Checkpoints(tmp_path).save([torch.ones(2)])
    path.with_name("000001.json").unlink()
    with pytest.raises(DamagedFileError, match=r"000002\.json: holds no global state; .*000001\.json: is missing"):
        read_state(tmp_path)


@pytest.mark.parametrize(
    "tree", [ServerState(torch.zeros(5000)), Own(torch.zeros(2), near=[1] * 5000)], ids=["safetensors", "json"]
)
def test_a_full_disk_leaves_the_earlier_ones_and_no_part(tree: object, tmp_path: Path) -> None:
    checkpoints = write_three(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoints.save(tree)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert checkpoints.save(tree) == tmp_path / "000004.json"
    found = load_newest(tmp_path).newest
    assert found is not None
    assert same(found.tree, tree)


def test_a_checkpoint_that_cannot_be_named_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = write_three(tmp_path)
    before = names(tmp_path)
    replace = Path.replace

    def refuse_text(path: Path, target: Path) -> Path:
        if target.suffix == ".json":
            assert target.with_suffix(".safetensors").exists(), "the text is what makes it whole, so it comes last"
            raise OSError(5, "Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse_text)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.save(1)
    assert names(tmp_path) == before


def test_a_folder_that_is_not_there_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Checkpoints(tmp_path / "none").save(1)


@pytest.mark.slow
def test_a_process_killed_while_it_saves_can_be_followed(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        import torch
        from sapus_cli.checkpoint import Checkpoints
        from sapus_cli.strategy import ServerState
        checkpoints = Checkpoints(Path(sys.argv[1]))
        for n in range(1, 1_000_000):
            checkpoints.save(ServerState(torch.full((300_000,), float(n)), pending=n))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while max((int(path.stem) for path in tmp_path.glob("*.json")), default=0) < 20:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(random.random() / 100)  # noqa: S311 - no secret
    finally:
        process.kill()
        process.wait()
    checkpoints = Checkpoints(tmp_path)
    found, skipped = checkpoints.load()
    assert found is not None
    assert found.tree.pending == int(found.path.stem) >= 19
    assert found.tree.x.unique().tolist() == [found.tree.pending]
    assert all("was not finished" in line for line in skipped), skipped
    path = checkpoints.save(found.tree)
    assert {name.partition(".")[0] for name in names(tmp_path)} == {found.path.stem, path.stem}
    assert len(names(tmp_path)) == 4


def test_to_encode_copies_no_vector() -> None:
    x = torch.ones(3)
    node, tensors = encode({"x": x})
    assert node == {"dict": [["x", {"tensor": "x"}]]}
    assert tensors["x"] is x
