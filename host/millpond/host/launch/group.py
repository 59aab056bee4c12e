# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the exchanges of a confined launch: the host collects those of all ranks, and answers all.

Each rank's channel has a thread of its own, which brings its rank's requests here and waits. The last one to
come reads the vectors of all, range by range, and adds them exactly: the order of ranks does not matter, and
no more than one range of a rank is kept. Then every thread sends its rank the answer.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from millpond.aggregate.exact import ExactSum, OutOfBounds, scale_of
from millpond.aggregate.kernels import Vector
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ProtocolError, RemoteError
from millpond.train.distributed.group_messages import (
    MOST_COUNT,
    MOST_GROUPS,
    MOST_SAMPLES,
    PART_BYTES,
    Contribution,
    Gather,
    Gathered,
    GroupJoined,
    GroupPart,
    GroupRequest,
    JoinGroup,
    MeanOfStep,
    ReportedMetric,
    ReportMetric,
    SharedState,
    ShareState,
    VectorWanted,
    parts,
)
from millpond.wire.channel import Channel
from millpond.wire.framing import Head
from millpond.wire.messages import Message

PART_SECONDS = 60.0
MOST_STATE = 1 << 34
_RANGE = PART_BYTES // 4
_DOES = {
    JoinGroup: "begins a group",
    Gather: "gathers counts",
    ShareState: "shares a model",
    Contribution: "is in a step",
    ReportMetric: "reports a metric",
}


class RankFault(RemoteError):
    """The worker ``rank`` is at fault, and its launch is over."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass(frozen=True, slots=True)
class _Call:
    """A rank's request, behind which its parts come: by themselves, or when they are ``asked`` for."""

    channel: Channel
    request: Message
    asked: bool


class LaunchGroup:
    """The exchanges of ``ranks`` workers. ``note`` is told each reported metric, ``fail`` the first fault: a
    rank and a text; then all threads are released.
    """

    def __init__(self, ranks: int, note: Callable[[str], None], fail: Callable[[int, str], None]) -> None:
        self._ranks, self._note, self._fail = ranks, note, fail
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._left: set[int] = set()
        self._turn = 0
        self._over = False
        self._answer: Message | None = None
        self._bulk: dict[int, memoryview] = {}
        self._sum = ExactSum(_RANGE)
        self._buffer = np.empty(_RANGE, np.float32)
        self._means: dict[int, Vector] = {}

    def end(self, seconds: float = PART_SECONDS) -> None:
        """Release all threads: the launch is over. Waits for one that reads a vector ``seconds`` long; it
        releases the others when it is done.
        """
        self._over = True  # without the lock, which that thread holds
        if self._changed.acquire(timeout=seconds):
            self._changed.notify_all()
            self._changed.release()

    def leave(self, rank: int) -> None:
        """Note that a rank's script has ended: ranks that wait for it would never end."""
        with self._changed:
            self._left.add(rank)
            self._check_left()

    def serve(self, rank: int, channel: Channel, head: Head, *, asked: bool = False) -> bool:
        """Answer a rank's request once all ranks have made theirs; a vector is ``asked`` for then, or comes
        by itself. Returns False if the launch is over.
        """
        with self._changed:
            turn = self._turn
            self._calls[rank] = _Call(channel, head.message, asked)
            self._check_left()
            if head.payload_size:
                self._fault(RankFault(rank, "it sent a payload where none belongs"))
            if len(self._calls) == self._ranks and not self._over:
                self._perform()
            self._changed.wait_for(lambda: self._over or self._turn != turn)
            if self._over:
                return False
            answer, bulk = self._answer, self._bulk.get(rank, memoryview(b""))
        assert answer
        channel.send(answer, Deadline.after(PART_SECONDS))
        for start, stop in parts(len(bulk)):
            channel.send(GroupPart(start), Deadline.after(PART_SECONDS), bulk[start:stop])
        return True

    def _check_left(self) -> None:
        if self._calls and self._left and not self._over:
            self._fault(
                RankFault(min(self._left), "its script has ended, and others wait for it in an exchange")
            )

    def _perform(self) -> None:
        """Make the answer of this turn from the calls of all ranks."""
        calls, self._calls = self._calls, {}
        try:
            for rank in range(self._ranks):
                _check_alike(rank, calls[rank].request, calls[0].request)
            self._answer, self._bulk = self._answered(calls)
        except RankFault as error:
            self._fault(error)
        self._turn += 1
        self._changed.notify_all()

    def _fault(self, error: RankFault) -> None:
        if not self._over:
            self._over = True
            self._fail(error.rank, str(error))
        self._changed.notify_all()

    def _answered(self, calls: Mapping[int, _Call]) -> tuple[Message, dict[int, memoryview]]:
        requests = [calls[rank].request for rank in range(self._ranks)]
        bulk: dict[int, memoryview] = {}
        answer: Message
        match requests[0]:
            case JoinGroup():
                answer = GroupJoined(tuple(each.least for each in requests if isinstance(each, JoinGroup)))
            case Gather():
                answer = Gathered(tuple(each.value for each in requests if isinstance(each, Gather)))
            case ShareState(size):
                state = self._state(calls[0].channel, size)
                answer, bulk = SharedState(size), dict.fromkeys(range(1, self._ranks), state)
            case ReportMetric(name):
                found = [each for each in requests if isinstance(each, ReportMetric)]
                answer = ReportedMetric(
                    sum(each.total for each in found), sum(each.samples for each in found)
                )
                mean = answer.total / answer.samples if answer.samples else math.nan
                self._note(f"{name} {mean:.6g} of {answer.samples} samples")
            case _:
                steps = {rank: each for rank, each in enumerate(requests) if isinstance(each, Contribution)}
                mean_of_all = self._mean(calls, steps)
                answer = MeanOfStep(
                    tuple(step.samples for step in steps.values()),
                    tuple(step.seconds for step in steps.values()),
                )
                bulk = dict.fromkeys(range(self._ranks), mean_of_all.data.cast("B"))
        return answer, bulk

    def _state(self, channel: Channel, size: int) -> memoryview:
        if not 0 <= size <= MOST_STATE:
            raise RankFault(0, f"its model has {size} bytes")
        state = memoryview(bytearray(size))
        for start, stop in parts(size):
            _receive(0, channel, state[start:stop])
        return state

    def _mean(self, calls: Mapping[int, _Call], steps: Mapping[int, Contribution]) -> Vector:
        """Return the mean over the counts of all, which lives until the group's next step."""
        for rank, step in steps.items():
            _check_step(rank, step)
        first, giving = steps[0], [rank for rank, step in steps.items() if step.samples]
        mean = self._means.get(first.group)
        if mean is None or len(mean) != first.size:
            mean = self._means[first.group] = np.empty(first.size, np.float32)
        count = sum(step.divisor for step in steps.values())
        scale = scale_of(max((steps[rank].largest for rank in giving), default=0.0), max(len(giving), 1))
        for rank in giving:
            _ask(rank, calls[rank])
        for start in range(0, first.size, _RANGE):
            out = mean[start : start + _RANGE]
            self._sum.begin(scale)
            for rank in giving:
                buffer = self._buffer[: len(out)]
                _receive(rank, calls[rank].channel, buffer.data.cast("B"))
                try:
                    self._sum.add(buffer, bound=steps[rank].largest)
                except OutOfBounds:
                    text = "its gradients are not finite, or beyond those it has announced"
                    raise RankFault(rank, text) from None
            self._sum.divide(max(count, 1), out)
        return mean


def _check_alike(rank: int, request: Message, first: Message) -> None:
    """Raise RankFault for a request that is another one than that of rank 0."""
    if type(request) is not type(first):
        raise RankFault(rank, f"it {_does(request)} while rank 0 {_does(first)}")
    if isinstance(request, Contribution) and isinstance(first, Contribution):
        if (request.group, request.size) != (first.group, first.size):
            raise RankFault(rank, "it is in a step of another model than rank 0")
    elif isinstance(request, ReportMetric) and isinstance(first, ReportMetric):
        if request.name != first.name or not math.isfinite(request.total):
            raise RankFault(rank, "it reports another metric than rank 0, or one that is not finite")
    elif isinstance(request, ShareState) and request != first:
        raise RankFault(rank, "its model has another size than that of rank 0")


def _check_step(rank: int, step: Contribution) -> None:
    if not math.isfinite(step.largest) or step.largest < 0:
        raise RankFault(rank, "its gradients are not finite")
    counted = 0 <= step.divisor <= MOST_COUNT * step.samples
    sane = counted and 0 <= step.samples <= MOST_SAMPLES and 0 <= step.group < MOST_GROUPS and step.size > 0
    if not sane or 4 * step.size > MOST_STATE:
        claimed = f"{step.samples} samples, which count {step.divisor},"
        raise RankFault(rank, f"it claims {claimed} of a model of {step.size} values")


def _does(request: Message) -> str:
    return _DOES.get(type(request), f"sends '{request.NAME}'")


def _ask(rank: int, call: _Call) -> None:
    if call.asked:
        try:
            call.channel.send(VectorWanted(), Deadline.after(PART_SECONDS))
        except RemoteError as error:
            raise RankFault(rank, str(error)) from None


def _receive(rank: int, channel: Channel, into: memoryview) -> None:
    try:
        channel.expect(GroupPart, Deadline.after(PART_SECONDS), len(into))
        channel.receive_into(into, Deadline.after(PART_SECONDS))
    except (RemoteError, OSError) as error:
        raise RankFault(rank, str(error)) from None


def serve_channel(group: LaunchGroup, rank: int, channel: Channel) -> None:
    """Serve the exchanges of a rank whose channel carries nothing else, until it ends."""
    try:
        while group.serve(rank, channel, channel.receive(NEVER)):
            pass
    except (ProtocolError, RemoteError, OSError):
        return  # the script has ended, which its own thread sees


def is_group_request(message: Message) -> bool:
    """Return whether a message is a request for the group."""
    return isinstance(message, GroupRequest)
