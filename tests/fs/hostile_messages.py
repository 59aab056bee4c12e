# SPDX-License-Identifier: Apache-2.0
"""The messages of a hostile client or device: each, with every value a number or a name can have."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from millpond.fs.proto import bulk_copy as c
from millpond.fs.proto import bulk_read as f
from millpond.fs.proto import delegations, status
from millpond.fs.proto import extended as x
from millpond.fs.proto import file_locks as r
from millpond.fs.proto import file_ops as p
from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.path_api import Attributes, Owner, Statistics
from millpond.wire import messages as registry
from millpond.wire.messages import Message

M = TypeVar("M")
NUMBERS = (
    *(-(1 << 63), -(1 << 31), -1, 0, 1, 2, 7, 512, 99_999),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)
BITS = (
    *(1 << bit for bit in range(32)),
    *(os.O_PATH, os.O_TMPFILE | os.O_RDWR, os.O_CREAT | os.O_EXCL | os.O_TRUNC, os.O_ACCMODE),
    *(0o7777, 0o177777, stat.S_IFDIR | 0o777, stat.S_IFIFO | 0o666, stat.S_IFLNK | 0o777),
    *(stat.S_IFCHR | 0o666, stat.S_IFBLK | 0o666, stat.S_IFSOCK | 0o666),
)
NAMES = (
    *(b"", b".", b"..", b"/", b"../private", b"private", b"public", b"private/", b"\0", b"f\0g"),
    *(b"/etc/passwd", b"n" * 255, b"n" * 256, b"\xff\xfe", b"p" * 5000, b"d/g", b"private\0"),
)
FLOATS = (float("nan"), float("-inf"), -1.0, 0.0)
OWNERS = (Owner(-1, -1), Owner(0, 0), Owner(-5, 1 << 40), Owner((1 << 32) - 1, 1 << 63))
_ALLOCATED = tuple(number for number in NUMBERS if not 1 << 13 < number < 1 << 63)  # the disk is others', too

ATTRIBUTES = Attributes(77, stat.S_IFREG | 0o644, 1, 0, 0, 5, 8, 4096, 0, 0, 0)
FOUND = p.FoundIs(5, ATTRIBUTES)
REPLIES: tuple[Message, ...] = (
    p.Recall((1,), 1),
    p.Recalled((1,)),
    p.SessionWelcome(1, 0, 1, 1.0, Owner(5, 5)),
    p.Done(),
    p.Error(2),
    FOUND,
    p.AttributesAre(ATTRIBUTES),
    p.Changed((p.AttributesAre(ATTRIBUTES),)),
    p.Link(b"f"),
    p.Opened(5, True, FOUND),
    p.Data(),
    p.OffsetIs(5),
    p.Written(5, p.AttributesAre(ATTRIBUTES)),
    p.StatisticsAre(Statistics(4096, 4096, 9, 9, 9, 9, 9, 255)),
    x.XattrIs(),
    x.XattrsAre(p.AttributesAre(ATTRIBUTES)),
    f.Fetched(1),
    c.EntriesPlus(True),
    c.FilesStored((0,)),
    r.LocksDropped(1),
    r.LockIs(0),
    r.LockSet(0),
    status.StatusIs(None, None, None, 1.0, (), False, 0, ""),
)
"""One of each that only a server says, or that answers it."""


def kinds() -> list[type[Message]]:
    """All messages that host and device know for the volume, but for those that stay on the device."""
    kinds = (kind for kind in registry._registry.values() if kind.__module__.startswith("millpond.fs."))
    return [kind for kind in kinds if kind.__module__ != delegations.__name__]


def others(name: str, value: object, numbers: Sequence[int] = NUMBERS) -> Sequence[Any]:
    """What may stand where ``value`` does, in the field of this name."""
    if isinstance(value, bool):
        return (not value,)
    if name == "length":
        return _ALLOCATED
    if isinstance(value, int):
        return (*numbers, *BITS) if name in ("mode", "flags", "whence", "errno") else numbers
    if isinstance(value, float):
        return FLOATS
    if isinstance(value, bytes):
        return NAMES
    if isinstance(value, Owner):
        return OWNERS
    if dataclasses.is_dataclass(value):
        return list(varied(value, numbers))
    if isinstance(value, tuple):
        return _lists(name, value, numbers)
    return ()


def _lists(name: str, value: tuple[Any, ...], numbers: Sequence[int]) -> Sequence[Any]:
    if name == "names":
        return ((), *((each,) for each in NAMES), (b"f", *NAMES[:3]), (b"..",) * 4, (b"d",) * 100_000)
    each = value[0] if value else 0
    return ((), tuple(others(name, each, numbers)), (each,) * 3, (each,) * 5_000)


def varied(message: M, numbers: Sequence[int] = NUMBERS) -> Iterator[M]:
    """The message with one of its fields another, for all fields and all that may stand there."""
    for field in dataclasses.fields(message):  # type: ignore[arg-type]
        for value in others(field.name, getattr(message, field.name), numbers):
            yield dataclasses.replace(message, **{field.name: value})  # type: ignore[type-var]


_ints = st.sampled_from(NUMBERS) | st.integers(-(1 << 63), (1 << 64) - 1) | st.integers(0, 40)
_times = st.none() | _ints | st.just("now")
_changes = st.builds(SetAttr, *[st.none() | _ints] * 4, _times, _times)  # type: ignore[arg-type]
_STRATEGIES: dict[str, st.SearchStrategy[object]] = {
    "int": _ints,
    "int | None": st.none() | _ints,
    "bool": st.booleans(),
    "float": st.sampled_from(FLOATS),
    "bytes": st.sampled_from(NAMES) | st.binary(max_size=20) | st.sampled_from([b"f", b"d", b"g"]),
    "Owner | None": st.none() | st.sampled_from(OWNERS),
    "tuple[int, ...]": st.lists(_ints, max_size=20).map(tuple),
    "tuple[bytes, ...]": st.lists(st.sampled_from([*NAMES, b"f", b"d", b"g"]), max_size=4).map(tuple),
    "SetAttr": _changes,
    "SetAttr | None": st.none() | _changes,
    "tuple[Attributes, ...]": st.just(()),
    "length": st.sampled_from((-1, 0, 1, 4096, 1 << 63)),  # the disk is others', too
    "rdev": st.sampled_from((0, -1, (1 << 64) - 1)),  # no device has these
}


def any_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Any message of this kind."""
    fields = {f.name: _STRATEGIES.get(f.name, _STRATEGIES.get(str(f.type))) for f in dataclasses.fields(kind)}
    return st.builds(kind, **fields)  # type: ignore[arg-type]
