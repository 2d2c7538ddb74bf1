"""Whatever the bytes are: a message that keeps its rules, or RemoteProtocolError, and nothing else."""

from __future__ import annotations

import contextlib
import pickle
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sapus_cli.codec import (
    MAX_HEADER_BYTES,
    Alive,
    Beat,
    Dropped,
    Evaluated,
    Hello,
    Leave,
    Pull,
    Push,
    Raw,
    Refused,
    Snapshot,
    State,
    Stop,
    Welcome,
    check_payload,
    decode_from_client,
    decode_from_server,
    encode,
)
from sapus_cli.errors import RemoteProtocolError

if TYPE_CHECKING:
    from sapus_cli import codec

PUSH = Push(seq=1, version=0, n_steps=2, n_samples=64, loss=0.5, step_s=0.1, exchange_s=0.0, info={"reason": "last"})
FROM_CLIENT: list[codec.FromClient] = [
    Hello(protocol=1, role="worker", rank=3, incarnation=7),
    Beat(incarnation=7),
    Pull(fingerprint="ab"),
    PUSH,
    Leave(reason="done"),
    Snapshot(),
    Evaluated(t_s=1.5, version=3, samples=96, loss=0.1, accuracy=0.9, final=False),
]
FROM_SERVER: list[codec.FromServer] = [
    Welcome(protocol=1, rank=0, elements=5, fingerprint="ab", beat_s=1.0, config=b"{}"),
    Alive(),
    Dropped(),
    State(version=7, t_s=2.5, samples=9, held_s=0.5, hint={"h_min": 4.0}, final=True),
    Stop(flush=True),
    Refused(reason="no"),
]

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=5),
    max_leaves=12,
)


@pytest.mark.parametrize("message", FROM_CLIENT, ids=lambda m: type(m).__name__)
def test_what_a_client_says_arrives_as_it_was(message: codec.FromClient) -> None:
    assert decode_from_client(encode(message)) == message


@pytest.mark.parametrize("message", FROM_SERVER, ids=lambda m: type(m).__name__)
def test_what_the_server_says_arrives_as_it_was(message: codec.FromServer) -> None:
    assert decode_from_server(encode(message)) == message


def test_neither_side_takes_the_other_side_s_messages() -> None:
    for message in FROM_CLIENT:
        with pytest.raises(RemoteProtocolError):
            decode_from_server(encode(message))
    for reply in FROM_SERVER:
        with pytest.raises(RemoteProtocolError):
            decode_from_client(encode(reply))


@given(st.binary(max_size=400))
def test_any_bytes_decode_or_raise_the_one_error(data: bytes) -> None:
    for decode in (decode_from_client, decode_from_server):
        with contextlib.suppress(RemoteProtocolError):
            assert isinstance(decode(data), msgspec.Struct)


@given(anything)
def test_any_messagepack_decodes_or_raises_the_one_error(value: object) -> None:
    test_any_bytes_decode_or_raise_the_one_error.hypothesis.inner_test(msgspec.msgpack.encode(value))  # type: ignore[attr-defined]


@given(st.sampled_from(FROM_CLIENT), st.data())
def test_a_message_with_bytes_changed_decodes_or_raises_the_one_error(
    message: codec.FromClient, data: st.DataObject
) -> None:
    header = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    for damaged in (bytes(header), bytes(header[:cut])):
        with contextlib.suppress(RemoteProtocolError):
            decode_from_client(damaged)


@given(st.dictionaries(st.sampled_from(sorted(PUSH.__struct_fields__)), anything, min_size=1))
def test_a_push_with_fields_of_any_kind_keeps_its_ranges(fields: dict[str, object]) -> None:
    header = msgspec.msgpack.encode(msgspec.to_builtins(PUSH) | fields)
    try:
        push = decode_from_client(header)
    except RemoteProtocolError:
        return
    assert isinstance(push, Push)
    assert 1 <= push.seq <= 2**62
    assert push.n_steps >= 1
    assert push.version >= 0
    assert push.step_s >= 0
    assert len(push.info) <= 32


@pytest.mark.parametrize(
    "header",
    [
        b"",
        pickle.dumps({"kind": "push"}),
        encode(PUSH)[:-1],
        encode(PUSH) + b"\0",
        b"\x91" * 5000 + b"\x90",
        b"\xdb\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        msgspec.msgpack.encode({"kind": "snapshot", "extra": 1}),
        msgspec.msgpack.encode({"kind": "hello", "protocol": 1, "role": "launcher"}),
        msgspec.msgpack.encode({"kind": "leave", "reason": "x" * 1001}),
        msgspec.msgpack.encode({"kind": "leave", "reason": "x" * MAX_HEADER_BYTES}),
    ],
    ids=lambda header: header[:12].hex(),
)
def test_these_are_no_messages(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_from_client(header)


def test_the_bytes_of_a_vector_follow_it_to_other_memory() -> None:
    raw, vector = Raw(), torch.zeros(2)
    known = raw.of(vector)
    vector[1] = 1.0
    assert raw.of(vector) is known
    assert bytes(known) == bytes(6) + bytes([0x80, 0x3F])
    vector.data = torch.ones(2)
    assert bytes(raw.of(vector)) == 2 * bytes([0, 0, 0x80, 0x3F])
    assert bytes(raw.of(torch.zeros(2))) == bytes(8)


def test_only_push_and_state_carry_a_vector_of_exactly_d_elements() -> None:
    check_payload(PUSH, 40, [40])
    check_payload(State(version=7, t_s=2.5), 40, [40])
    check_payload(Leave(), 40, [])
    check_payload(PUSH, 0, [])
    for sizes in ([], [36], [44], [40, 40], [40, 0]):
        with pytest.raises(RemoteProtocolError, match="must carry 40 bytes"):
            check_payload(PUSH, 40, sizes)
    with pytest.raises(RemoteProtocolError, match="must carry 0 bytes"):
        check_payload(Leave(), 40, [40])
    with pytest.raises(RemoteProtocolError, match="must carry 0 bytes"):
        check_payload(PUSH, 0, [40])
