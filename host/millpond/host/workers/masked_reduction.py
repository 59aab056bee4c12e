# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, threads): the sums of masked updates of a cohort, see ``millpond.aggregate.masking``.

A masked update says nothing until all of a cohort that have answered are in the sum. An update counts as a
whole or not at all, as without masks, and the sum has the same bits.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np

from millpond.aggregate.kernels import Vector, kernels
from millpond.aggregate.masking import fixed_point, keys
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.messages import Agreed, Offered, OffersTaken, Shares, ShownShares
from millpond.aggregate.masking.stream import MaskedVector
from millpond.aggregate.masking.word_sums import WordSums
from millpond.aggregate.masking.words import FIGURE_BYTES
from millpond.aggregate.reduction import GRACE_SECONDS, Addend, Reduction
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, MillpondError, Refused
from millpond.host.records.failures import FOR_GOOD, listed, reason_of
from millpond.host.workers.node_reduction import NodeReduction
from millpond.host.workers.worker import DeviceWorker
from millpond.wire.messages import Message

ASK_SECONDS = 10.0
_NO_KEY = "its key in the cohort is none"
_MOST_OVER = 1.001
"""Norms, by which updates are scaled down to the clip, are rounded."""
_FAR = 8.0
"""The standard deviations by which the norm of noise is at most above that of the mean one."""
R = TypeVar("R", bound=Message)
Losses = dict[str, tuple[str, bool]]
"""Why workers are lost, by name, and whether for good."""


def fresh_session() -> bytes:
    """Return the number of a new exchange, which is above those before: devices open each once."""
    return time.time_ns().to_bytes(8) + os.urandom(8)


class WrongMasks(LocalError):
    """A sum is none of updates within their bounds. Nothing tells which of the devices has masked wrongly:
    that takes sums of fewer of them.
    """


class MaskedReduction:
    """Writes means of masked updates to ``mean``, float32 [size]. Updates, and so their mean, have at most
    the norm ``clip`` per unit that counts; each value of a sum has noise of the standard deviation ``noise``
    at most. Where there are ``nodes`` they add the updates, if they can.
    """

    def __init__(
        self, mean: Vector, clip: float, noise: float = 0.0, nodes: NodeReduction | None = None
    ) -> None:
        self._mean, self._exchange, self._nodes = mean, MaskedExchange({}, b""), nodes
        self._clip, self._noise = clip, noise * (math.sqrt(len(mean)) + _FAR)
        self._scale, self._bits = 1.0, 64
        self._sum = MaskedVector(0, 64)
        self._pull = Reduction(mean[:0])

    def begin(self, workers: Mapping[str, DeviceWorker], scale: float, bits: int) -> tuple[Losses, str]:
        """Have these workers mask their next updates for each other, of values rounded to multiples of
        ``1 / scale``, in words of so many ``bits``. Returns those that are lost, and why nobody masks if too
        few are left, else "".
        """
        members = {name: worker.cohort_key for name, worker in workers.items()}
        lost: Losses = {name: (_NO_KEY, True) for name, key in members.items() if not keys.is_lasting(key)}
        known = {name: key for name, key in members.items() if name not in lost}
        exchange = self._exchange = MaskedExchange(
            known, fresh_session(), {name: workers[name].cohort_certificate for name in known}
        )
        self._scale = scale
        if not len(self._sum.values) or bits != self._bits:
            self._bits, self._sum = bits, MaskedVector(len(self._mean), bits)
            self._pull = Reduction(self._sum.values.view(np.float32), 0, WordSums(bits))
        offered, more = self._ask(workers, dict.fromkeys(known, exchange.opening()), Offered)
        lost |= more
        for name, offer in offered.items():
            if fault := exchange.offered(name, offer):
                lost[name] = fault, True
        try:
            taken, more = self._ask(workers, exchange.dealing(scale, bits), OffersTaken)
            lost |= more
            for name, answer in taken.items():
                if fault := exchange.taken(name, answer):
                    lost[name] = fault, True
            shown, more = self._ask(workers, exchange.showing(), ShownShares)
            lost |= more
            for name, shares in shown.items():
                exchange.shown(name, shares)
            lost |= self._ask(workers, exchange.handing(), OffersTaken)[1]
        except CohortFailed as error:
            return lost | {name: (why, True) for name, why in error.wrong.items()}, str(error)
        return lost, ""

    def read(self, workers: Mapping[str, DeviceWorker], number: int) -> Losses:
        """Add up the masked updates of these workers in exchange ``number``. Returns those whose updates
        cannot be had, which are not in the sum: what devices have added is of all, or is not used.
        """
        if self._nodes and self._nodes.add_words(workers, self._sum, number):
            return {}
        sources, lost = {name: _MaskedUpdate(worker) for name, worker in workers.items()}, Losses()
        for each in self._pull.run([Addend(source, 1.0, 0.0, 0.0) for source in sources.values()]):
            name = each.addend.source.name
            lost[name] = _loss_of(each.error, workers[name])
        self._sum.figures[:] = 0
        for name in sources.keys() - lost.keys():
            self._sum.figures += sources[name].figures
        return lost

    def finish(
        self, workers: Mapping[str, DeviceWorker], divisor: float
    ) -> tuple[Mapping[str, str], float, float]:
        """Remove the masks from the sum of these workers' updates, all that are in it, and write it over
        ``divisor`` to the mean. Returns the workers that are at fault, which are in it, and why, and the sums
        of the loss and its count. Raises CohortFailed if too few workers are left, and WrongMasks.
        """
        exchange, wrong = self._exchange, dict[str, str]()
        requests = dict.fromkeys(workers, exchange.agreeing(workers))
        found, silent = self._ask(workers, requests, Agreed)
        for name, word in found.items():
            if fault := exchange.agreed(name, word):
                wrong[name] = fault
        try:
            given, more = self._ask(workers, exchange.unmasking(), Shares)
            silent |= more
            for name, shares in given.items():
                if fault := exchange.shared(name, shares):
                    wrong[name] = fault
            self._sum.add_masks(list(exchange.masks()))
        except CohortFailed as error:
            reasons = listed((name, reason) for name, (reason, _) in silent.items())
            told = f"{error} ({reasons})" if reasons else str(error)
            raise CohortFailed(told, wrong | dict(error.wrong)) from None
        figures = fixed_point.divide(self._sum, self._scale, divisor, self._mean)
        most = self._clip + self._noise / divisor
        if not math.sqrt(kernels().squares(self._mean)) <= _MOST_OVER * most:
            raise WrongMasks(
                f"the sum of the masked updates of {', '.join(workers)} is beyond limits.clip: one of them"
                " has masked wrongly; leave out one after the other by 'devices' in the job file"
            )
        return wrong, *figures

    def _ask(
        self, workers: Mapping[str, DeviceWorker], requests: Mapping[str, Message], reply: type[R]
    ) -> tuple[dict[str, R], Losses]:
        """Send each worker its request; all answer side by side. Returns the answers, and the workers that
        are lost: those that are silent keep no other waiting for longer than one would.
        """
        found, lost, began = dict[str, R](), Losses(), time.monotonic()
        for name, request in requests.items():
            with _losing(workers[name], lost):
                workers[name].ask(request, Deadline.after(ASK_SECONDS))
        for name in requests.keys() - lost.keys():
            left = max(GRACE_SECONDS, began + ASK_SECONDS - time.monotonic())
            with _losing(workers[name], lost):
                found[name] = workers[name].answer(reply, Deadline.after(left))
        return found, lost


class _MaskedUpdate:
    """The source of a worker's masked values, before which its ``figures`` come."""

    def __init__(self, worker: DeviceWorker) -> None:
        self.name, self._worker, self._is_first = worker.name, worker, True
        self.figures = np.zeros(FIGURE_BYTES // 8, np.uint64)

    def fetch(self, stop: int, deadline: Deadline) -> None:
        self._is_first = True
        self._worker.fetch(FIGURE_BYTES // 4 + stop, deadline)

    def read(self, out: Vector, deadline: Deadline) -> None:
        if self._is_first:
            self._worker.read(self.figures.view(np.float32), deadline)
        self._is_first = False
        self._worker.read(out, deadline)


def _loss_of(error: Exception, worker: DeviceWorker) -> tuple[str, bool]:
    """Return the loss of a worker, which is closed but for a refusal, behind which a connection is as it
    was.
    """
    if isinstance(error, Refused):
        return reason_of(error, worker.name), error.code in FOR_GOOD
    worker.close()
    return reason_of(error, worker.name), False


@contextlib.contextmanager
def _losing(worker: DeviceWorker, lost: Losses) -> Iterator[None]:
    """Add the worker to the ``lost`` ones if it fails."""
    try:
        yield
    except (MillpondError, OSError) as error:
        lost[worker.name] = _loss_of(error, worker)
