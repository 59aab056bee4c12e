# SPDX-License-Identifier: Apache-2.0
"""Frames and messages: whole or refused, in any pieces, before anything large is allocated."""

from __future__ import annotations

import dataclasses
import math
import os
import tracemalloc
from collections.abc import Iterable
from typing import ClassVar

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.base.errors import ConfigError, LimitExceeded, ProtocolError, VersionMismatch
from millpond.wire.control_messages import GetLog, Load, Log, Welcome
from millpond.wire.framing import MAGIC, PREFIX, PROTOCOL, Head, Limits, Receiver, encode
from millpond.wire.messages import Failure, Kind, Message, Ok, message, message_base

GIB = 1 << 30
uint64 = st.integers(0, 2**64 - 1)
number = st.floats(allow_nan=False)

loads = st.builds(
    Load,
    cpu=number,
    memory_used=uint64,
    flash_used=uint64,
    temperature=st.none() | number,
    jobs=st.lists(st.text(st.characters(exclude_categories=["Cs"]))).map(tuple),
)
welcomes = st.builds(
    Welcome,
    *(st.text(st.characters(exclude_categories=["Cs"])) for _ in range(4)),
    *(uint64 for _ in range(3)),
)


def feed(receiver: Receiver, data: bytes, sizes: Iterable[int] = ()) -> list[Head]:
    """Give ``data`` to the receiver in pieces of at most ``sizes``, then as it asks."""
    heads, rest, pieces = [], memoryview(data), iter(sizes)
    while rest:
        buffer = receiver.buffer()
        assert buffer
        count = min(len(buffer), len(rest), next(pieces, len(rest)))
        buffer[:count] = rest[:count]
        rest = rest[count:]
        if head := receiver.received(count):
            heads.append(head)
    return heads


def receiver(**limits: int) -> Receiver:
    return Receiver(Limits(**limits), "csd0")


def prefix(head: int = 1, payload: int = 0, magic: bytes = MAGIC, version: int = PROTOCOL) -> bytes:
    return PREFIX.pack(magic, version, head, payload)


def framed(head: object) -> bytes:
    packed = msgpack.packb(head)
    return prefix(len(packed)) + packed


@given(loads | welcomes, st.integers(0, GIB))
def test_what_is_sent_arrives(sent: Message, payload: int) -> None:
    assert feed(receiver(), encode(sent, payload)) == [Head(sent, payload)]


@given(st.lists(st.integers(1, 40)))
def test_any_pieces(sizes: list[int]) -> None:
    sent = [Log(("one", "two")), GetLog(3), Ok()]
    heads = feed(receiver(), b"".join(map(encode, sent)), sizes)
    assert [head.message for head in heads] == sent


def test_idle_only_between_frames() -> None:
    taker = receiver()
    data = encode(Ok())
    assert taker.idle
    for count in range(1, len(data)):
        feed(taker, data[count - 1 : count])
        assert not taker.idle
    feed(taker, data[-1:])
    assert taker.idle


@given(st.binary(max_size=200))
def test_garbage_is_an_error_or_waits_for_more(data: bytes) -> None:
    try:
        heads = feed(receiver(), data)
    except ProtocolError as error:
        assert "\n" not in str(error)
    else:
        assert heads == []


@given(st.recursive(uint64 | st.text(max_size=5), lambda inner: st.lists(inner, max_size=4), max_leaves=20))
def test_any_plain_data_as_head(head: object) -> None:
    with pytest.raises(ProtocolError):
        feed(receiver(), framed(head))


def test_not_our_protocol() -> None:
    with pytest.raises(ProtocolError, match=r"^csd0 does not speak millpond's protocol$"):
        feed(receiver(), b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(("theirs", "older"), [(PROTOCOL - 1, "csd0"), (PROTOCOL + 1, "this side")])
def test_another_version_names_both(theirs: int, older: str) -> None:
    with pytest.raises(VersionMismatch) as caught:
        feed(receiver(), prefix(version=theirs))
    text = f"csd0 speaks protocol {theirs}, this side {PROTOCOL}: update millpond on {older}"
    assert str(caught.value) == text
    assert (caught.value.theirs, caught.value.ours) == (theirs, PROTOCOL)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (prefix(head=0), "csd0 announced a head of 0 bytes; 1 to 1048576 are accepted"),
        (prefix(head=2**32 - 1), "csd0 announced a head of 4294967295 bytes; 1 to 1048576 are accepted"),
        (prefix(payload=4 * GIB), "csd0 announced 4294967296 bytes; at most 1073741824 are accepted"),
        (prefix(payload=2**64 - 1), "csd0 announced 18446744073709551615 bytes; at most"),
    ],
)
def test_too_much_is_refused_before_it_is_allocated(data: bytes, text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LimitExceeded) as caught:
            feed(receiver(), data)
        assert str(caught.value).startswith(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_limits_are_inclusive() -> None:
    data = encode(Ok(), 8)
    head = len(data) - PREFIX.size
    assert feed(receiver(head=head, payload=8), data) == [Head(Ok(), 8)]
    with pytest.raises(LimitExceeded):
        feed(receiver(head=head - 1, payload=8), data)
    with pytest.raises(LimitExceeded):
        feed(receiver(head=head, payload=7), data)


def test_nested_headers_of_huge_lists_stay_small() -> None:
    # Five bytes announce a list of almost a million; each level may allocate that before it sees the lie.
    levels = 190_000
    head = b"\x92\xa2ok" + (b"\xdd" + (levels * 5 - 100).to_bytes(4, "big")) * levels
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            feed(receiver(), prefix(len(head)) + head)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (["no.such", {}], "csd0 sent an unknown message: 'no.such'"),
        (["ok"], "csd0 sent a head that cannot be read: not enough values to unpack"),
        (["ok", {}, 1], "csd0 sent a head that cannot be read: too many values to unpack"),
        (7, "csd0 sent a head that cannot be read: "),
        (["ok", []], "csd0 sent a head that cannot be read: ok: expected a table, got list ([])"),
        (["log.get", {}], "csd0 sent a head that cannot be read: log.get: missing key 'lines'"),
        (
            ["log.get", {"lines": "x"}],
            "csd0 sent a head that cannot be read: log.get: lines: expected a whole number, got text ('x')",
        ),
    ],
)
def test_what_is_wrong_with_a_head(head: object, text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        feed(receiver(), framed(head))
    assert str(caught.value).startswith(text)


def test_a_name_that_is_a_list() -> None:
    """The words are the interpreter's: 3.14 has more of them."""
    with pytest.raises(ProtocolError, match=r"^csd0 sent a head that cannot be read: .*\bunhashable type"):
        feed(receiver(), framed([["ok"], {}]))


def test_an_endless_name_does_not_fill_the_log() -> None:
    with pytest.raises(ProtocolError) as caught:
        feed(receiver(), framed(["x" * 500_000, {}]))
    assert len(str(caught.value)) < 300


def test_trailing_bytes_and_other_encodings_in_a_head_are_refused() -> None:
    whole = msgpack.packb(["ok", {}])
    for head in (whole + b"\xc0", whole[:-1], msgpack.packb(["ok", {1: 2}]), b"\x92\xa2\xff\xff\x80"):
        with pytest.raises(ProtocolError):
            feed(receiver(), prefix(len(head)) + head)


def test_fields_of_a_newer_peer_are_ignored() -> None:
    data = framed(["log.get", {"lines": 3, "since": "yesterday"}])
    assert feed(receiver(), data) == [Head(GetLog(3), 0)]


def test_a_name_that_is_not_utf8_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^'caf\\xe9' is not UTF-8, and cannot be sent$"):
        encode(Failure("model", os.fsdecode(b"caf\xe9")))


def test_not_a_number_arrives() -> None:
    (head,) = feed(receiver(), encode(Load(math.nan, 1, 2, None, ())))
    assert isinstance(head.message, Load)
    assert math.isnan(head.message.cpu)


@message_base
class Numbered(Message):
    """The base of a message."""

    number: int


@message("test.example", Kind.VOLUME)
class Example(Numbered):
    """A message."""

    LIMIT: ClassVar[int] = 3
    names: tuple[str, ...] = ()
    store: bool = False


def test_a_message_is_a_frozen_dataclass_with_slots() -> None:
    made = Example(1, store=True)
    assert [field.name for field in dataclasses.fields(made)] == ["number", "names", "store"]
    assert (made.number, made.names, made.store, made.LIMIT) == (1, (), True, 3)
    assert (Example.NAME, Example.KIND, Example.PAYLOAD_KIND) == ("test.example", Kind.VOLUME, Kind.VOLUME)
    assert not hasattr(made, "__dict__")
    for change in (lambda: setattr(made, "number", 2), lambda: delattr(made, "number")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert dataclasses.replace(made, number=2) == Example(2, store=True)


def test_a_dataclass_stays_as_it_is() -> None:
    @message("test.dataclass")
    @dataclasses.dataclass(frozen=True, slots=True)
    class Made(Message):
        """A message that is a dataclass already."""

        parts: list[int] = dataclasses.field(default_factory=list)

    assert Made().parts == []
    assert Made([1]) == Made([1])
    with pytest.raises(ValueError, match=r"two messages are named test\.dataclass"):
        message("test.dataclass")(Made)


def test_a_default_made_for_each_message_is_refused() -> None:
    with pytest.raises(TypeError, match="parts has a default_factory"):

        @message("test.factory")
        class Made(Message):
            """A message."""

            parts: tuple[int, ...] = dataclasses.field(default_factory=tuple)
