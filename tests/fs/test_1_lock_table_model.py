# SPDX-License-Identifier: Apache-2.0
"""Random histories of file locks, against a model that owns each byte, and against the kernel."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millpond.fs.filelocks.table import LockAnswer, LockOutcome, LockTable
from millpond.fs.vfs.lock_types import OFFSET_MAX, Family, Lock, LockOwner, Mode

from ..effort import scaled

SIZE = 6
"""Bytes in a modelled file. The last one stands for all that follow, too."""

Place = tuple[int, Family]
Cells = list[Mode | None]
Range = tuple[int, int]

ranges = some.tuples(some.integers(0, SIZE - 1), some.integers(0, SIZE - 1)).map(lambda r: (min(r), max(r)))
places = some.sampled_from([(1, Family.POSIX), (2, Family.POSIX), (1, Family.FLOCK)])
owners = some.builds(LockOwner, some.integers(0, 1), some.integers(0, 1))
modes = some.sampled_from([Mode.READ, Mode.WRITE])


def last(end: int) -> int:
    return OFFSET_MAX if end == SIZE - 1 else end


def runs(cells: Cells) -> list[tuple[Mode, int, int]]:
    """What locks the cells make: as few as can be."""
    found: list[tuple[Mode, int, int]] = []
    for place, mode in enumerate(cells):
        if mode is None:
            continue
        if found and found[-1][0] is mode and found[-1][2] == place - 1:
            found[-1] = (mode, found[-1][1], place)
        else:
            found.append((mode, place, place))
    return found


class Model:
    """The same as FileLocks, slow and plain."""

    def __init__(self, most_locks: int, most_waiters: int) -> None:
        self.most_locks, self.most_waiters = most_locks, most_waiters
        self.held: dict[tuple[Place, LockOwner], Cells] = {}
        self.queue: list[tuple[int, Place, LockOwner, Mode, Range]] = []

    def cells(self, place: Place, owner: LockOwner) -> Cells:
        return self.held.setdefault((place, owner), [None] * SIZE)

    def blockers(self, place: Place, owner: LockOwner, mode: Mode, span: Range) -> set[LockOwner]:
        return {
            other
            for (where, other), cells in self.held.items()
            if where == place and other != owner
            for cell in cells[span[0] : span[1] + 1]
            if cell is Mode.WRITE or (cell is Mode.READ and mode is Mode.WRITE)
        }

    def deadlocks(self, place: Place, owner: LockOwner, mode: Mode, span: Range) -> bool:
        """Whether somebody for whom this request would wait waits, in the end, for its owner."""
        first, edges = self.blockers(place, owner, mode, span), set[tuple[LockOwner, LockOwner]]()
        for _, where, waiting, wanted, wide in self.queue:
            if where[1] is Family.POSIX:
                edges |= {(waiting, other) for other in self.blockers(where, waiting, wanted, wide)}
        for _ in range(len(edges)):
            edges |= {(a, d) for a, b in edges for c, d in edges if b == c}
        return any((other, owner) in edges for other in first)

    def paint(self, place: Place, owner: LockOwner, mode: Mode, span: Range) -> int:
        before = self.cells(place, owner)
        after = list(before)
        after[span[0] : span[1] + 1] = [None if mode is Mode.UNLOCK else mode] * (span[1] + 1 - span[0])
        others = sum(
            len(runs(cells))
            for (where, other), cells in self.held.items()
            if other.holder == owner.holder and (where, other) != (place, owner)
        )
        if len(runs(after)) > len(runs(before)) and others + len(runs(after)) > self.most_locks:
            return errno.ENOLCK
        self.held[place, owner] = after
        return 0

    def setlk(
        self, place: Place, owner: LockOwner, mode: Mode, span: Range, ticket: int | None
    ) -> LockOutcome:
        if place[1] is Family.FLOCK:
            span = (0, SIZE - 1)
            if self.cells(place, owner)[0] is not mode:
                self.held[place, owner] = [None] * SIZE
        error: int | None
        if mode is Mode.UNLOCK or not self.blockers(place, owner, mode, span):
            error = self.paint(place, owner, mode, span)
        elif ticket is None:
            error = errno.EAGAIN
        elif place[1] is Family.POSIX and self.deadlocks(place, owner, mode, span):
            error = errno.EDEADLK
        elif sum(other.holder == owner.holder for _, _, other, _, _ in self.queue) >= self.most_waiters:
            error = errno.ENOLCK
        else:
            error = None
            self.queue.append((ticket, place, owner, mode, span))
        return LockOutcome(error, tuple(self.settle()))

    def settle(self) -> Iterator[LockAnswer]:
        progress = True
        while progress:
            progress = False
            for request in list(self.queue):
                ticket, place, owner, mode, span = request
                if not self.blockers(place, owner, mode, span):
                    self.queue.remove(request)
                    progress = True
                    yield LockAnswer(owner.holder, ticket, self.paint(place, owner, mode, span))

    def end(self, holder: int) -> Iterator[LockAnswer]:
        for request in [request for request in self.queue if request[2].holder == holder]:
            self.queue.remove(request)
            yield LockAnswer(holder, request[0], errno.EIO)
        self.held = {key: cells for key, cells in self.held.items() if key[1].holder != holder}
        yield from self.settle()


class Histories(RuleBasedStateMachine):
    """FileLocks beside the model."""

    @initialize(most_locks=some.integers(2, 12), most_waiters=some.integers(1, 4))
    def begin(self, most_locks: int, most_waiters: int) -> None:
        self.table, self.model = LockTable(most_locks, most_waiters), Model(most_locks, most_waiters)
        self.tickets = 0

    def request(self, place: Place, owner: LockOwner, mode: Mode, span: Range, ticket: int | None) -> None:
        lock = Lock(owner, mode, span[0], last(span[1]))
        expected = self.model.setlk(place, owner, mode, span, ticket)
        assert self.table.setlk(*place, lock, ticket) == expected

    @rule(place=places, owner=owners, mode=modes, span=ranges)
    def lock(self, place: Place, owner: LockOwner, mode: Mode, span: Range) -> None:
        self.request(place, owner, mode, span, None)

    @rule(place=places, owner=owners, mode=modes, span=ranges)
    def wait(self, place: Place, owner: LockOwner, mode: Mode, span: Range) -> None:
        self.tickets += 1
        self.request(place, owner, mode, span, self.tickets)

    @rule(place=places, owner=owners, span=ranges)
    def unlock(self, place: Place, owner: LockOwner, span: Range) -> None:
        self.request(place, owner, Mode.UNLOCK, span, None)

    @rule(inode=some.integers(1, 2), owner=owners, mode=modes, span=ranges)
    def test(self, inode: int, owner: LockOwner, mode: Mode, span: Range) -> None:
        found = self.table.getlk(inode, Lock(owner, mode, span[0], last(span[1])))
        blockers = self.model.blockers((inode, Family.POSIX), owner, mode, span)
        assert found.owner in blockers if found else not blockers

    @rule(place=places, owner=owners)
    def close(self, place: Place, owner: LockOwner) -> None:
        self.model.held.pop((place, owner), None)
        assert self.table.release(*place, owner) == tuple(self.model.settle())

    @rule(holder=some.integers(0, 1))
    def end(self, holder: int) -> None:
        def key(answer: LockAnswer) -> tuple[int, int, int]:
            return answer.holder, answer.ticket, answer.error

        expected = sorted(self.model.end(holder), key=key)
        assert sorted(self.table.end(holder), key=key) == expected

    @rule(holder=some.integers(0, 1), number=some.integers(0, 5))
    def cancel(self, holder: int, number: int) -> None:
        ticket = self.tickets - number
        kept = [r for r in self.model.queue if (r[0], r[2].holder) != (ticket, holder)]
        assert self.table.cancel(holder, ticket) == (kept != self.model.queue)
        self.model.queue = kept

    @invariant()
    def same(self) -> None:
        held = {
            (*place, Lock(owner, mode, start, last(end)))
            for (place, owner), cells in self.model.held.items()
            for mode, start, end in runs(cells)
        }
        found = list(self.table.locks())
        assert len(found) == len(held) and set(found) == held
        assert [(inode, family, lock.owner) for inode, family, lock in self.table.waiting()] == [
            (*place, owner) for _, place, owner, _, _ in self.model.queue
        ]

    def teardown(self) -> None:
        if hasattr(self, "table"):
            for holder in (0, 1):
                self.table.end(holder)
            assert not any(value for value in vars(self.table).values() if not isinstance(value, int))


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    deadline=None, max_examples=scaled(quick=30, full=100), stateful_step_count=30
)


@given(some.lists(some.tuples(owners, some.integers(1, 2), modes, ranges), max_size=40))
@settings(deadline=None, max_examples=scaled(quick=30, full=100))
def test_whoever_waits_waits_for_one_who_does_not(steps: list[tuple[LockOwner, int, Mode, Range]]) -> None:
    """Processes of one thread, which wait for each lock until they have it, are never all stuck."""
    model, table, waiting = Model(99, 99), LockTable(), set[LockOwner]()
    for ticket, (owner, inode, mode, span) in enumerate(steps):
        if owner in waiting:
            continue
        outcome = table.setlk(inode, Family.POSIX, Lock(owner, mode, span[0], last(span[1])), ticket)
        assert outcome == model.setlk((inode, Family.POSIX), owner, mode, span, ticket)
        waiting = {lock.owner for _, _, lock in table.waiting()}
        for _, place, waiter, wanted, wide in model.queue:
            assert not model.deadlocks(place, waiter, wanted, wide)


_WORKER = """
import fcntl, json, os, struct, sys

HOW = fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN

def setlk(mode, start, length):
    fcntl.lockf(file, HOW[mode], length, start)

def getlk(mode, start, length):
    asked = struct.pack("hhqqi0q", (fcntl.F_RDLCK, fcntl.F_WRLCK)[mode], os.SEEK_SET, start, length, 0)
    kind, _, start, length, pid = struct.unpack("hhqqi0q", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else [kind, start, length, pid]

def flock(mode):
    fcntl.flock(file, HOW[mode])

def close_another():
    os.close(os.open(path, os.O_RDONLY))

file = None
for line in sys.stdin:
    name, *rest = json.loads(line)
    if name == "open":
        if file is not None:
            os.close(file)
        [path] = rest
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        answer = 0
    else:
        try:
            answer = globals()[name](*rest) or 0
        except OSError as error:
            answer = error.errno
    print(json.dumps(answer), flush=True)
"""


class Process:
    """A process that locks as it is told to."""

    def __init__(self) -> None:
        argv = [sys.executable, "-c", _WORKER]
        self.running = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *command: object) -> Any:
        assert self.running.stdin and self.running.stdout
        print(json.dumps(command), file=self.running.stdin, flush=True)
        return json.loads(self.running.stdout.readline())

    def end(self) -> None:
        with self.running:
            assert self.running.stdin
            self.running.stdin.close()
        assert self.running.returncode == 0


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    made = [Process() for _ in range(3)]
    yield made
    for process in made:
        process.end()


GETLK = ("getlk", Mode.WRITE, (0, SIZE - 1))
requests = some.one_of(
    some.tuples(some.just("setlk"), some.sampled_from(Mode), ranges),
    some.tuples(some.just("getlk"), modes, ranges),
    some.tuples(some.just("flock"), some.sampled_from(Mode)),
    some.tuples(some.just("close_another")),
)


def to_the_kernel(span: Range) -> list[int]:
    start, end = span
    return [start, 0 if end == SIZE - 1 else end + 1 - start]  # 0 is to the end of the file


def to_the_table(table: LockTable, owner: LockOwner, command: list[Any]) -> object:
    name, *rest = command
    if name == "close_another":
        table.release(1, Family.POSIX, owner)
        return 0
    mode, (start, end) = rest[0], rest[1] if rest[1:] else (0, SIZE - 1)
    lock = Lock(owner, mode, start, last(end), pid=owner.number)
    if name != "getlk":
        return table.setlk(1, Family.POSIX if name == "setlk" else Family.FLOCK, lock).error
    found = table.getlk(1, lock)
    if found is None:
        return 0
    return [found.mode, found.start, 0 if found.end == OFFSET_MAX else found.end + 1 - found.start, found.pid]


def test_as_the_kernel_locks(processes: list[Process], tmp_path: Path) -> None:
    files = iter(range(1 << 30))

    @given(some.lists(some.tuples(some.integers(0, 2), requests), max_size=40))
    @settings(deadline=None, max_examples=scaled(quick=50, full=150))
    @example([(n, ("setlk", Mode.READ, (m, m))) for n, m in ((0, 4), (1, 2), (0, 0))] + [(2, GETLK)])
    def check(history: list[tuple[int, tuple[Any, ...]]]) -> None:
        table, file = LockTable(), tmp_path / str(next(files))
        for process in processes:
            assert process("open", str(file)) == 0
        for number, (name, *rest) in history:
            kernel = [rest[0], *to_the_kernel(rest[1])] if rest[1:] else rest
            owner = LockOwner(0, processes[number].running.pid)
            expected = processes[number](name, *kernel)
            assert to_the_table(table, owner, [name, *rest]) == expected
        file.unlink()

    check()


def test_modes_are_the_kernels_numbers() -> None:
    assert (Mode.READ, Mode.WRITE, Mode.UNLOCK) == (fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK)
