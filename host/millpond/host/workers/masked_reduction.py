# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the sums of masked updates of a cohort of devices, see ``millpond.aggregate.masking``.

A masked update says nothing until all of a cohort that have answered are in the sum, so an update is added as
a whole when all of it is here. The sum has the bits of the sum without masks.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from millpond.aggregate.kernels import Vector, kernels
from millpond.aggregate.masking import fixed_point, keys
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.messages import Agreed, Offered, OffersTaken, Shares, ShownShares
from millpond.aggregate.masking.stream import MaskedVector
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, MillpondError, Refused
from millpond.base.sizes import SLOWEST
from millpond.host.records.failures import FOR_GOOD, listed, reason_of
from millpond.host.workers.worker import DeviceWorker
from millpond.wire.messages import Message

ASK_SECONDS = 10.0
_NO_KEY = "its key in the cohort is none"
_MOST_OVER = 1.001
"""Norms, by which updates are scaled down to the clip, are rounded."""
_FAR = 8.0
"""The standard deviations by which the norm of noise is at most above that of the mean one."""
_MOST_THREADS = 4
"""Whole updates that are read at the same time, each into memory of its own."""
R = TypeVar("R", bound=Message)
T = TypeVar("T")
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
    """Writes means of masked updates to ``mean``, float32 [size], from words of so many ``bits``. Updates,
    and so their mean, have at most the norm ``clip`` per unit that counts; each value of a sum has noise of
    the standard deviation ``noise`` at most.
    """

    def __init__(self, mean: Vector, bits: int, clip: float, noise: float = 0.0) -> None:
        self._mean, self._bits, self._exchange = mean, bits, MaskedExchange({}, b"")
        self._clip, self._noise = clip, noise * (math.sqrt(len(mean)) + _FAR)
        self._scale, self._adding = 1.0, threading.Lock()
        self._sum, self._spare = self._made(), list[MaskedVector]()

    def begin(self, workers: Mapping[str, DeviceWorker], scale: float) -> tuple[Losses, str]:
        """Have these workers mask their next updates for each other, of values rounded to multiples of
        ``1 / scale``. Returns those that are lost, and why nobody masks if too few are left, else "".
        """
        members = {name: worker.cohort_key for name, worker in workers.items()}
        lost: Losses = {name: (_NO_KEY, True) for name, key in members.items() if not keys.is_lasting(key)}
        known = {name: key for name, key in members.items() if name not in lost}
        exchange = self._exchange = MaskedExchange(
            known, fresh_session(), {name: workers[name].cohort_certificate for name in known}
        )
        self._scale = scale
        offered, more = self._ask(workers, dict.fromkeys(known, exchange.opening()), Offered)
        lost |= more
        for name, offer in offered.items():
            if fault := exchange.offered(name, offer):
                lost[name] = fault, True
        try:
            taken, more = self._ask(workers, exchange.dealing(scale), OffersTaken)
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

    def read(self, workers: Mapping[str, DeviceWorker]) -> Losses:
        """Add up the masked updates of these workers. Returns those whose updates cannot be had, which are
        not in the sum.
        """
        self._sum.data[:] = 0
        return _each(workers, lambda name: self._add(workers[name]), workers)[1]

    def _made(self) -> MaskedVector:
        return MaskedVector(len(self._mean), self._bits)

    def _add(self, worker: DeviceWorker) -> None:
        with self._adding:  # memory that is used again has its pages already
            words = self._spare.pop() if self._spare else self._made()
        values = words.data.view(np.float32)  # a worker's parts are of 4 bytes
        deadline = Deadline.after(ASK_SECONDS + values.nbytes / SLOWEST)
        worker.fetch(len(values), deadline)
        worker.read(values, deadline)
        with self._adding:
            self._sum.add(words)
            self._spare.append(words)

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
        """Send each worker its request. Returns the answers, and the workers that are lost."""
        return _each(
            requests,
            lambda name: workers[name].ask(requests[name], reply, Deadline.after(ASK_SECONDS)),
            workers,
        )


def _each(
    names: Iterable[str], action: Callable[[str], T], workers: Mapping[str, DeviceWorker]
) -> tuple[dict[str, T], Losses]:
    """Do something for each worker, several at a time. Returns what came of it, and the workers that are
    lost: those are closed but for a refusal, behind which a connection is as it was.
    """
    found, lost = dict[str, T](), Losses()

    def attempt(name: str) -> None:
        try:
            found[name] = action(name)
        except Refused as error:
            lost[name] = reason_of(error, name), error.code in FOR_GOOD
        except (MillpondError, OSError) as error:
            workers[name].close()
            lost[name] = reason_of(error, name), False

    with ThreadPoolExecutor(_MOST_THREADS, "masked") as pool:
        for done in [pool.submit(attempt, name) for name in names]:
            done.result()
    return found, lost
