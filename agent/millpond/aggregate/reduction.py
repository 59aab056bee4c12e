# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, threads): the mean of vectors, pulled from all sources range by range.

Sources hold their vectors until the next exchange, so no memory is needed for them: one range of all vectors
is summed, and its mean is written, before the next one is read. A vector counts whole or not at all: if a
source is lost or refused in the middle, the ranges that had its values are pulled again from the others.

Threads divide the vector by ranges. Values of a source come in order, so a thread reads its range from one
source while another thread reads the range before it from the next source: each sum belongs to one thread,
and no sum needs a lock.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from millpond.aggregate.exact import RefusedUpdate, refusing
from millpond.aggregate.kernels import Totals, Vector, kernels
from millpond.aggregate.rules.mean import MEAN
from millpond.aggregate.rules.rule import CombinationRule, RangeRule
from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.base.sizes import SLOWEST

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0
"""Time without a range of a vector, after which its source is lost."""
GRACE_SECONDS = 0.25
"""Time for a range of a source that had as much time before, while another one was waited for."""
TRANSFER_SECONDS = 10.0
MOST_THREADS = 4
_LEAST_THREADED = 1 << 19  # values, below which threads cost more memory than they save time
NORM_ERROR = 1e-3


class Source(Protocol):
    """The holder of one vector. Both calls may raise MillpondError or OSError; then it is lost."""

    @property
    def name(self) -> str:
        """The name for messages."""

    def fetch(self, stop: int, deadline: Deadline) -> None:
        """Ask for the first ``stop`` values, all of which are then to be read."""

    def read(self, out: Vector, deadline: Deadline) -> None:
        """Fill ``out`` with the next values that were asked for."""


class Addend:
    """A vector with the bounds that its head has announced: no value of a parameter is beyond ``largest``,
    ``norm`` is their L2 norm, no value of a buffer is beyond ``shift``. The vector counts ``weight`` in the
    divisor. With ``most`` it is scaled down to this norm. ``apart`` is added to its values of buffers, unless
    the addend is ``even``: then no value is so large that it could not be added in one unit with all others.
    Values are rounded to multiples of ``1 / scale`` at least.
    """

    __slots__ = (
        "_heard", "_longest", "_spent", "_squares", "apart", "even",
        "factor", "largest", "norm", "scale", "shift", "source", "weight",
    )  # fmt: skip

    def __init__(
        self,
        source: Source,
        weight: float,
        largest: float,
        norm: float,
        most: float = math.inf,
        shift: float = 0.0,
    ) -> None:
        self.source, self.weight, self.largest, self.norm = source, weight, largest, norm
        self.shift, self.scale = shift, math.inf
        self.apart: Totals | None = None
        self.even = False
        self.factor = most / norm if norm > most else 1.0
        self._longest = max(norm, most) * (1 + NORM_ERROR)
        self._heard = self._spent = 0.0
        self._squares: dict[int, float] | None = {} if most < math.inf else None

    def fetch(self, stop: int) -> None:
        """Ask for the first ``stop`` values."""
        self._spent = 0.0
        self.source.fetch(stop, Deadline.after(STALL_SECONDS))
        self._heard = time.monotonic()

    def read(self, out: Vector, allowed: float) -> None:
        """Read the next values. A source that is stuck must not keep the others waiting: only the time that
        is spent on it counts, ``allowed`` seconds in all, and all that are stuck are waited for together.
        """
        began = time.monotonic()
        stall = max(GRACE_SECONDS, self._heard + STALL_SECONDS - began) + out.nbytes / SLOWEST
        try:
            self.source.read(out, Deadline.after(min(allowed - self._spent, stall)))
        finally:
            self._heard = time.monotonic()
            self._spent += self._heard - began

    def add_to(self, computation: RangeRule, values: Vector, start: int, buffers: slice) -> None:
        """Add the values from ``start`` on, the last ones of ``buffers``. Raises RefusedUpdate."""
        with refusing(self.source.name):
            computation.add(self, values, None if self.apart is None else self.apart[buffers])
        if self._squares is not None:
            own = values[: len(values) - (buffers.stop - buffers.start)]
            self._squares[start] = kernels().squares(own) if len(own) else 0.0

    @property
    def norm_is_wrong(self) -> bool:
        """Whether the values have a larger norm than announced, where that matters: not below ``most``, as a
        worker's float32 has no squares of values below 1e-22.
        """
        return math.sqrt(sum((self._squares or {}).values())) > self._longest


@dataclass(frozen=True, slots=True)
class LostAddend:
    """An excluded addend, and the error that excluded it."""

    addend: Addend
    error: Exception


class _Pull:
    """One pull of the first ``stop`` values of all ``addends`` by ``threads`` threads. In ``turns`` a
    thread finds one token for each source whose values of the range before have been read.
    """

    def __init__(self, addends: Sequence[Addend], stop: int, threads: int) -> None:
        self.addends, self.stop = tuple(addends), stop
        self.turns = [queue.SimpleQueue[None]() for _ in range(threads)]
        for _ in self.addends:
            self.turns[0].put(None)
        self.summed: dict[int, int] = {}  # how many addends were to be summed, by the end of a range
        self.failed = False

    def fail(self) -> None:
        """End the pull in all threads."""
        self.failed = True
        for turns in self.turns:
            for _ in self.addends:
                turns.put(None)


class Reduction:
    """Writes means of vectors to ``mean``, float32 [size], with up to ``threads`` threads, by default one
    for each processor if the vectors are long. ``rule`` is for other combinations than the mean. The first
    ``parameters`` values, by default all, are of parameters, the others of buffers.
    """

    def __init__(
        self,
        mean: Vector,
        threads: int = 0,
        rule: CombinationRule = MEAN,
        parameters: int | None = None,
    ) -> None:
        self._mean, self._rule = mean, rule
        self._parameters = len(mean) if parameters is None else parameters
        usual = min(len(os.sched_getaffinity(0)), MOST_THREADS) if len(mean) >= _LEAST_THREADED else 1
        self._most_threads, self._range = threads or usual, 0
        self._present: dict[Addend, None] = {}
        self._lost: list[LostAddend] = []
        self._losing = threading.Lock()

    def _set_range(self, vectors: int) -> None:
        """Have the ranges that the rule wants for so many vectors."""
        wanted = self._rule.range_values(len(self._mean), vectors, self._most_threads)
        if wanted != self._range:
            self._range = wanted
            self._threads = min(self._most_threads, max(1, -(-len(self._mean) // wanted)))
            self._computations = [self._rule.computation(wanted) for _ in range(self._threads)]
            self._buffers = [np.empty(wanted, np.float32) for _ in range(self._threads)]

    def run(self, addends: Iterable[Addend]) -> list[LostAddend]:
        """Write the mean of the addends, by default their sum over the sum of their weights. Returns those
        that do not count; ``mean`` is of no meaning if none does.
        """
        self._present, self._lost = dict.fromkeys(addends), []
        self._set_range(len(self._present))
        stop = whole = len(self._mean)
        while stop and self._present:
            before, again = len(self._lost), self._pull(stop)
            again = whole if stop < whole and len(self._lost) > before else again
            stop = whole if not again and self._lose_wrong_norms() else again
        return self._lost

    def _pull(self, stop: int) -> int:
        """Write the first ``stop`` values of the mean. Returns how many of them must be written again: those
        until the last range with values of a source that was lost. (Those behind ``stop`` have them, too.)
        """
        for each in tuple(self._present):
            self._attempt(each, partial(each.fetch, stop))
        pull = _Pull(tuple(self._present), stop, self._threads)
        with ThreadPoolExecutor(self._threads, "reduction") as pool:
            for done in [pool.submit(self._sum_ranges, pull, thread) for thread in range(self._threads)]:
                done.result()
        return max((end for end, count in pull.summed.items() if count > len(self._present)), default=0)

    def _sum_ranges(self, pull: _Pull, thread: int) -> None:
        """Sum the ranges of a thread."""
        turns, following = pull.turns[thread], pull.turns[(thread + 1) % self._threads]
        try:
            for start in range(thread * self._range, pull.stop, self._threads * self._range):
                self._sum_range(pull, thread, start, turns, following)
                if pull.failed:
                    return
        except Exception:
            pull.fail()
            raise

    def _sum_range(
        self,
        pull: _Pull,
        thread: int,
        start: int,
        turns: queue.SimpleQueue[None],
        following: queue.SimpleQueue[None],
    ) -> None:
        """Write one range of the mean. It is of no use if a source is lost meanwhile."""
        out = self._mean[start : min(start + self._range, pull.stop)]
        values, present = self._buffers[thread][: len(out)], self._present
        pull.summed[start + len(out)] = len(present)
        computation = self._computations[thread]
        first, last = (max(place - self._parameters, 0) for place in (start, start + len(out)))
        computation.begin(present.keys(), len(out), len(out) - (last - first))
        allowed = TRANSFER_SECONDS + 4 * len(self._mean) / SLOWEST
        for each in pull.addends:
            turns.get()
            if each in self._present:
                self._attempt(each, partial(each.read, values, allowed))
            following.put(None)
            if each in self._present:
                self._attempt(each, partial(each.add_to, computation, values, start, slice(first, last)))
        computation.finish(out)

    def _attempt(self, addend: Addend, action: Callable[[], None]) -> None:
        """Do something with a source, which is lost if that fails."""
        try:
            action()
        except Exception as error:
            if not isinstance(error, (MillpondError, OSError)):
                log.exception("%s: internal error", addend.source.name)
            self._lose(addend, error)

    def _lose(self, addend: Addend, error: Exception) -> None:
        with self._losing:
            if addend in self._present:
                self._present = {each: None for each in self._present if each is not addend}
                self._lost.append(LostAddend(addend, error))

    def _lose_wrong_norms(self) -> bool:
        """Lose the addends whose norms are not as announced. Returns whether there are any."""
        wrong = [each for each in self._present if each.norm_is_wrong]
        for each in wrong:
            self._lose(each, RefusedUpdate(each.source.name, "its norm is not as announced"))
        return bool(wrong)
