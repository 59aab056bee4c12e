# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the orders of outer rounds between the connections that bring them and a job's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from millpond.aggregate.kernels import Vector
from millpond.base.errors import Refused
from millpond.host.api.connection import ENDED
from millpond.host.api.outer import OrderKind, OuterAnswer, OuterModel
from millpond.host.records.jobs import ACTIVE, JobRow

LOOK_SECONDS = 1.0
"""Time after which a wait looks whether its peer is still there."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """An order: its kind, its key, and a state, float32 [size]."""

    kind: OrderKind
    key: str
    values: Vector


class OuterMailbox:
    """The last order of one resident job, and its answer. ``ask`` and ``model`` are called by connections,
    the other methods by the job's thread.
    """

    def __init__(self, number: int) -> None:
        self._number, self._changed = number, threading.Condition()
        self._order: Order | None = None
        self._answers: dict[tuple[OrderKind, str], tuple[OuterAnswer, Vector]] = {}
        self._model: tuple[OuterModel, Vector] | None = None
        self._ended = ""

    def model(self, gone: Callable[[], bool]) -> tuple[OuterModel, Vector]:
        """Return the model's layout and a state, float32 [size], once the job has begun. Raises Refused when
        the job ends, or the client is ``gone``.
        """
        with self._changed:
            self._wait(lambda: self._model is not None, gone)
            assert self._model is not None
            return self._model

    def ask(self, order: Order, gone: Callable[[], bool]) -> tuple[OuterAnswer, Vector]:
        """Return the answer to an order, with its values. Raises Refused when the job ends before that, a
        newer order replaces this one, or the client is ``gone``.
        """
        own = order.kind, order.key
        with self._changed:
            if own not in self._answers and not self._is_present(own):
                self._order = order
                self._changed.notify_all()
            self._wait(lambda: own in self._answers or not self._is_present(own), gone)
            if own not in self._answers:
                raise Refused("", "state", f"job {self._number}: a newer order has replaced '{order.key}'")
            return self._answers[own]

    def _is_present(self, own: tuple[OrderKind, str]) -> bool:
        return self._order is not None and (self._order.kind, self._order.key) == own

    def _wait(self, done: Callable[[], bool], gone: Callable[[], bool]) -> None:
        while not self._changed.wait_for(lambda: done() or self._ended, LOOK_SECONDS):
            if gone():
                raise Refused("", "ended", "the client is gone")
        if not done():
            raise Refused("", "ended", self._ended)

    def prepared(self, model: OuterModel, state: Vector) -> None:
        """Note the model of the job."""
        with self._changed:
            self._model = model, state
            self._changed.notify_all()

    def order(self) -> Order | None:
        """Return the order that has no answer yet."""
        with self._changed:
            found = self._order
            return found if found and (found.kind, found.key) not in self._answers else None

    def wait(self, seconds: float) -> None:
        """Wait for an order, so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.order() is not None or self._ended, seconds)

    def answer(self, kind: OrderKind, key: str, answer: OuterAnswer, values: Vector) -> None:
        """Keep the answer to an order, in the place of the last of its kind."""
        with self._changed:
            self._answers = {own: kept for own, kept in self._answers.items() if own[0] != kind}
            self._answers[kind, key] = answer, values
            self._changed.notify_all()

    def has_answer(self, kind: OrderKind, key: str) -> bool:
        """Return whether the answer to an order is kept."""
        return (kind, key) in self._answers

    def end(self, reason: str) -> None:
        """Refuse all that waits, and whatever comes."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()


class OuterMailboxes:
    """The mailboxes of the resident jobs that have not ended; ``row`` returns a job."""

    def __init__(self, row: Callable[[int], JobRow]) -> None:
        self._row, self._lock = row, threading.Lock()
        self._open: dict[int, OuterMailbox] = {}
        self._closed = False

    def of(self, number: int) -> OuterMailbox:
        """Return the mailbox of a job that waits or runs. Raises Refused for another one."""
        row = self._row(number)
        if row.job.outer is None:
            raise Refused("", "state", f"job {number} is not resident: its file has no table [outer]")
        if row.state not in ACTIVE:
            raise Refused("", "ended", f"job {number} is {row.state}")
        with self._lock:
            if self._closed:
                raise Refused("", "ended", ENDED)
            return self._open.setdefault(number, OuterMailbox(number))

    def begun(self, row: JobRow) -> OuterMailbox | None:
        """Return the mailbox of a job that begins, None if it is not resident."""
        with self._lock:
            return self._open.setdefault(row.id, OuterMailbox(row.id)) if row.job.outer else None

    def end(self, number: int) -> None:
        """Close the mailbox of a job that has ended."""
        with self._lock:
            mailbox = self._open.pop(number, None)
        if mailbox:
            mailbox.end(f"job {number} has ended")

    def close(self) -> None:
        """Close all of them: the daemon ends."""
        with self._lock:
            self._closed, found, self._open = True, self._open, {}
        for mailbox in found.values():
            mailbox.end(ENDED)
