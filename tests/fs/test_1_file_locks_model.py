# SPDX-License-Identifier: Apache-2.0
"""File locks of a backing directory as Linux has them: random requests of owners in two processes' places,
against a model of single bytes.
"""

from __future__ import annotations

import errno
import os
import timeit
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.file_locks import FileLocks
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, HeldLocks, Lock, Mode

BYTES = 8
OWNERS = (0, 1, (1 << 64) - 1)
Holder = tuple[int, int]


@dataclass(frozen=True)
class Wish:
    """What an owner of a mount wants; ``mode`` None: it closes the file."""

    holder: Holder
    family: Family
    mode: Mode | None
    start: int
    end: int


class Model:
    """Who holds which byte, and how. The byte ``BYTES`` stands for all that follow."""

    def __init__(self) -> None:
        self.held: dict[tuple[Family, int], dict[Holder, Mode]] = {}

    def span(self, wish: Wish) -> range:
        return range(BYTES + 1) if wish.family is Family.FLOCK else range(wish.start, wish.end + 1)

    def rivals(self, wish: Wish, byte: int) -> list[Holder]:
        held = self.held.get((wish.family, byte), {})
        return [h for h, mode in held.items() if h != wish.holder and Mode.WRITE in (mode, wish.mode)]

    def perform(self, wish: Wish) -> int:
        if wish.mode is None or wish.mode is Mode.UNLOCK:
            span = range(BYTES + 1) if wish.mode is None else self.span(wish)
            for byte in span:
                self.held.get((wish.family, byte), {}).pop(wish.holder, None)
            return 0
        blocked = any(self.rivals(wish, byte) for byte in self.span(wish))
        for byte in self.span(wish):
            owners = self.held.setdefault((wish.family, byte), {})
            if not blocked:
                owners[wish.holder] = wish.mode
            elif wish.family is Family.FLOCK:  # changing the mode loses the lock
                owners.pop(wish.holder, None)
        return errno.EAGAIN if blocked else 0


def lock_of(wish: Wish) -> Lock:
    assert wish.mode is not None
    start, end = (0, BYTES) if wish.family is Family.FLOCK else (wish.start, wish.end)
    return Lock(wish.holder[1], wish.mode, start, OFFSET_MAX if end == BYTES else end, 100 + wish.holder[0])


wishes = some.builds(
    lambda mount, owner, family, mode, one, other: Wish(
        (mount, owner), family, mode, min(one, other), max(one, other)
    ),
    some.integers(0, 1),
    some.sampled_from(OWNERS),
    some.sampled_from(Family),
    some.sampled_from([None, *Mode]),
    some.integers(0, BYTES),
    some.integers(0, BYTES),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackingFs]:
    top = tmp_path_factory.mktemp("locks")
    (top / "f").touch()
    root = os.open(top, os.O_PATH)
    made = BackingFs(root)
    yield made
    made.close()
    os.close(root)


@given(some.lists(wishes, max_size=40))
@settings(deadline=None, max_examples=200)
def test_locks_are_as_in_linux(tree: BackingFs, history: list[Wish]) -> None:
    """What each request is answered, what is in the way of others, and that nothing is left."""
    node, model, mounts = tree.lookup(ROOT, b"f").node, Model(), (FileLocks(tree), FileLocks(tree))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for wish in history:
        mine = mounts[wish.holder[0]]
        expected = model.perform(wish)
        if wish.mode is None:
            mine.release(node, wish.family, wish.holder[1])
        else:
            assert mine.lock(node, wish.family, lock_of(wish)) == expected, wish
        for mount in (0, 1):
            _compare_conflicts(model, mounts[mount], node, Wish((mount, 7), Family.POSIX, Mode.WRITE, 0, 0))
    for one in mounts:
        one.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def _compare_conflicts(model: Model, locks: FileLocks, node: int, stranger: Wish) -> None:
    for byte in range(BYTES + 1):
        asked = Lock(7, Mode.WRITE, byte, OFFSET_MAX if byte == BYTES else byte)
        found, rivals = locks.first_conflict(node, asked), model.rivals(stranger, byte)  # type: ignore[arg-type]
        assert bool(found) == bool(rivals)
        if found:
            here = [rival for rival in rivals if rival[0] == stranger.holder[0]]
            assert found.start <= byte <= found.end
            assert found.pid in {
                100 + stranger.holder[0] if here else 0,
                0 if len(here) < len(rivals) else -1,
            }


def test_a_lock_needs_no_more_of_a_file_than_its_program(tmp_path: Path) -> None:
    """A file that nobody may write, or is executed, is locked for reading."""
    for name, mode in (("read", 0o444), ("write", 0o200)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    root = os.open(tmp_path, os.O_PATH)
    tree = BackingFs(root)
    for name in (b"read", b"write"):
        node = tree.lookup(ROOT, name).node
        assert tree.locks.lock(node, Family.FLOCK, Lock(1, Mode.WRITE)) == 0
        assert tree.locks.lock(node, Family.POSIX, Lock(1, Mode.READ if name == b"read" else Mode.WRITE)) == 0
    tree.locks.close()
    (tmp_path / "d").mkdir()
    assert tree.locks.lock(tree.lookup(ROOT, b"d").node, Family.FLOCK, Lock(1, Mode.READ)) == errno.EPERM
    tree.close()
    os.close(root)


def test_a_lock_that_a_dead_process_may_have_released_is_not_kept(tree: BackingFs) -> None:
    node, other = tree.lookup(ROOT, b"f").node, FileLocks(tree)
    ready, asked = False, list[str]()
    locks = FileLocks(tree, lambda: asked.append("before"), lambda: ready)
    assert locks.lock(node, Family.POSIX, Lock(1, Mode.WRITE)) == errno.EAGAIN
    assert other.lock(node, Family.POSIX, Lock(1, Mode.WRITE)) == 0
    other.close()
    ready = True
    assert locks.lock(node, Family.POSIX, Lock(1, Mode.WRITE)) == 0
    assert other.lock(node, Family.POSIX, Lock(1, Mode.WRITE)) == errno.EAGAIN
    assert locks.lock(node, Family.POSIX, Lock(1, Mode.UNLOCK)) == 0 and len(asked) == 2
    locks.close()


def test_what_a_count_of_locks_costs_does_not_grow_with_them() -> None:
    def seconds(locks: int) -> float:
        held = HeldLocks()
        for number in range(locks):
            held.add((number, Family.POSIX), Lock(1, Mode.READ))
        assert len(held) == locks
        return min(timeit.repeat(lambda: len(held), number=100, repeat=5))

    assert seconds(4000) < 20 * seconds(10)
