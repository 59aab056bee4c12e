# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): asks devices a question, and adds up what they answer, masked for each other or not."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from millpond.aggregate.kernels import Words
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.member import threshold_of
from millpond.aggregate.masking.messages import Agreed, Offered, OffersTaken, Shares, ShownShares
from millpond.aggregate.masking.stream import mask_add
from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, ProtocolError, Refused, RemoteError
from millpond.base.sizes import SLOWEST
from millpond.host.api.questions import AskFleet, FleetAnswer
from millpond.host.fleet.device import Device
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.records.failures import listed, reason_of
from millpond.host.workers.masked_reduction import fresh_session
from millpond.privacy.accounting import sigma_of_sum
from millpond.train.job.files import JobFile, contents
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import FileContents, Folder, MissingFiles, WarmUp
from millpond.train.questions.messages import Answer, AskDevice, Counted, GetAnswer
from millpond.train.questions.question import check
from millpond.wire.channel import Channel, FileSlice
from millpond.wire.messages import Message, Ok

ASK_SECONDS = 30.0
_LARGEST_GROUP = 1 << 32
_MOST_THREADS, _MOST_TRIES = 32, 3
PUBLIC = "public"
R = TypeVar("R", bound=Message)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AskedModel:
    """The model that a question is about: the ``work`` that builds it, its code's ``files`` and their
    ``signature``, and the file of its ``values``, all of which lie at ``path``.
    """

    work: WorkSpec
    files: dict[str, JobFile]
    signature: str
    values: JobFile
    path: Callable[[JobFile], Path]


def ask(devices: Mapping[str, Device], request: AskFleet, model: AskedModel | None = None) -> FleetAnswer:
    """Ask these devices. Raises ConfigError, and RemoteError if too few answer."""
    check(request.question)
    with contextlib.ExitStack() as connections:
        asked = _Asked(request, connections, model)
        asked.count(devices)
        if request.masked:
            words, names = asked.masked_sums()
            return FleetAnswer(_whole(words), names, {}, asked.left_out, asked.noise(names))
        by_device = asked.plain_sums()
        names = tuple(sorted(by_device))
        total = _added(by_device)
        told = {name: _whole(by_device[name]) for name in names}
        return FleetAnswer(_whole(total), names, told, asked.left_out, asked.noise(names))


class _Asked:
    """The devices that have counted, on their ``connections``."""

    def __init__(
        self, request: AskFleet, connections: contextlib.ExitStack, model: AskedModel | None
    ) -> None:
        self._request, self._connections, self._model = request, connections, model
        self._name = os.urandom(8).hex()
        self._channels, self._counted = dict[str, Channel](), dict[str, Counted]()
        self._groups = dict[str, int]()
        self.left_out = dict[str, str]()
        self._terms = 1  # devices whose noise together is as much as the question needs

    def count(self, devices: Mapping[str, Device]) -> None:
        """Have all devices count that are ready."""
        ready = {}
        for name, device in devices.items():
            status = device.status
            if status.state is DeviceState.READY:
                ready[name] = device
            else:
                self.left_out[name] = status.reason or str(status.state)
        self._counted = self._each(ready, lambda name: self._count(ready[name]))
        self._groups = {name: max(1, each.group) for name, each in self._counted.items()}
        self._check_any(self._counted)

    def _check_any(self, found: Mapping[str, object]) -> None:
        if not found:
            raise RemoteError(f"no device answers: {listed(self.left_out.items()) or 'there is none'}")

    def _count(self, device: Device) -> Counted:
        deadline = Deadline.after(ASK_SECONDS)
        control = self._connections.enter_context(device.control(deadline))
        self._channels[device.name] = control
        control.call(WarmUp(), Ok, deadline)
        question = self._question(device.name)
        missing = control.call(question, MissingFiles, deadline)
        known = contents(question.needed)
        if not known.keys() >= set(missing.digests) or len(missing.digests) > len(known):
            raise ProtocolError(f"{device.name} asks for a file that the question does not have")
        for digest in missing.digests:
            self._send(control, digest, known[digest])
        counted = control.expect(Counted, Deadline.after(self._request.deadline))
        if not 0 <= counted.group <= _LARGEST_GROUP:
            raise ProtocolError(f"{device.name} says that it has groups of {counted.group} samples")
        return counted

    def _question(self, device: str) -> AskDevice:
        request, model = self._request, self._model
        folders = tuple(Folder(path, device, path.split("/")[0] == PUBLIC) for path in request.folders)
        found = AskDevice(self._name, request.question, folders, request.masked, request.rho)
        if model is None:
            return found
        return replace(
            found, work=model.work, files=model.files, signature=model.signature, model=model.values
        )

    def _send(self, control: Channel, digest: str, file: JobFile) -> None:
        assert self._model is not None
        with self._model.path(file).open("rb") as opened:
            deadline = Deadline.after(ASK_SECONDS + file.size / SLOWEST)
            control.call(FileContents(digest), Ok, deadline, FileSlice(opened.fileno(), 0, file.size))

    def noise(self, names: Iterable[str]) -> float:
        """Return the standard deviation of the noise of these devices in each sum, by their word."""
        rho, question = self._request.rho, self._request.question
        if not rho:
            return 0.0
        sizes = (question.sensitivity * self._groups[name] for name in names)
        try:
            sigmas = [sigma_of_sum(rho, size, self._terms, question.words) for size in sizes]
        except ValueError:
            raise ProtocolError("a device says that it has larger groups than noise can protect") from None
        return math.hypot(*sigmas)

    def plain_sums(self) -> dict[str, Words]:
        """Return the sums of each device."""
        found = self._each(self._counted, self._sums)
        self._check_any(found)
        return found

    def _sums(self, name: str) -> Words:
        control, deadline = self._channels[name], Deadline.after(ASK_SECONDS)
        size = 8 * self._request.question.words
        control.send(GetAnswer(), deadline)
        control.expect(Answer, deadline, payload=size)
        return np.frombuffer(control.receive_payload(size, deadline), np.uint64).copy()

    def masked_sums(self) -> tuple[Words, tuple[str, ...]]:
        """Return the sums over the devices, which mask them for each other, and the names of these. Raises
        RemoteError if too few are left.
        """
        for tries_left in reversed(range(_MOST_TRIES)):
            self._check_least()
            exchange = MaskedExchange(
                {name: each.cohort_key for name, each in self._counted.items()},
                fresh_session(),
                {name: each.cohort_certificate for name, each in self._counted.items()},
            )
            try:
                return self._exchange(exchange)
            except CohortFailed as error:
                self._leave_out(error.wrong)
                if not tries_left:
                    raise RemoteError(f"no masked sum: {error}{self._reasons}") from None
        raise AssertionError("unreachable")

    def _check_least(self) -> None:
        least = max((each.least_devices for each in self._counted.values()), default=2)
        if len(self._counted) < least:
            has = f"{len(self._counted)} can answer"
            raise RemoteError(f"least_devices: a masked sum is of {least} devices; {has}{self._reasons}")
        groups = {each.group for each in self._counted.values()}
        if self._request.rho and len(groups) > 1:
            told = "devices share noise for groups of one size, and policy.least_samples of these differ"
            raise RemoteError(f"{told}: ask those with the same by --devices, or use --plain")

    @property
    def _reasons(self) -> str:
        return f": {listed(self.left_out.items())}" if self.left_out else ""

    def _exchange(self, exchange: MaskedExchange) -> tuple[Words, tuple[str, ...]]:
        for name, offer in self._call(dict.fromkeys(self._counted, exchange.opening()), Offered).items():
            if fault := exchange.offered(name, offer):
                self._leave_out({name: fault})
        dealt = exchange.dealing(1.0)
        self._terms = threshold_of(len(dealt))
        for name, taken in self._call(dealt, OffersTaken).items():
            if fault := exchange.taken(name, taken):
                self._leave_out({name: fault})
        for name, shown in self._call(exchange.showing(), ShownShares).items():
            exchange.shown(name, shown)
        self._call(exchange.handing(), OffersTaken)
        masked = self._each(dict(self._counted), self._sums)
        survivors = tuple(sorted(masked))
        for name, word in self._call(dict.fromkeys(survivors, exchange.agreeing(survivors)), Agreed).items():
            if fault := exchange.agreed(name, word):
                self._leave_out({name: fault})
        for name, shares in self._call(exchange.unmasking(), Shares).items():
            if fault := exchange.shared(name, shares):
                self._leave_out({name: fault})
        total = _added(masked)
        mask_add(total, list(exchange.masks()))
        return total, survivors

    def _call(self, requests: Mapping[str, Message], reply: type[R]) -> dict[str, R]:
        """Send each device its request. Returns the answers of those that give one."""
        return self._each(
            requests,
            lambda name: self._channels[name].call(requests[name], reply, Deadline.after(ASK_SECONDS)),
        )

    def _leave_out(self, reasons: Mapping[str, str]) -> None:
        for name, reason in reasons.items():
            self.left_out[name] = reason
            self._counted.pop(name, None)

    def _each(self, names: Iterable[str], action: Callable[[str], T]) -> dict[str, T]:
        """Do something for each device, several at a time. Returns what came of it; others are left out."""
        found, lost = dict[str, T](), dict[str, str]()

        def attempt(name: str) -> None:
            try:
                found[name] = action(name)
            except (Refused, MillpondError, OSError) as error:
                lost[name] = reason_of(error, name)

        with ThreadPoolExecutor(_MOST_THREADS, "question") as pool:
            for done in [pool.submit(attempt, name) for name in list(names)]:
                done.result()
        self._leave_out(dict(sorted(lost.items())))
        return found


def _added(sums: Mapping[str, Words]) -> Words:
    """Return the sums over all devices, modulo 2**64."""
    total = np.zeros_like(next(iter(sums.values())))
    for each in sums.values():
        total += each
    return total


def _whole(words: Words) -> tuple[int, ...]:
    return tuple(words.view(np.int64).tolist())
