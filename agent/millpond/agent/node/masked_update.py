# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): the updates of a job as they leave in a cohort: clipped, rounded, and masked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from millpond.agent.cohort.member import DeviceMember
from millpond.agent.cohort.told_sums import ToldSums
from millpond.agent.config import AgentConfig
from millpond.agent.node.update_noise import UpdateNoise
from millpond.aggregate.exact import OutOfBounds
from millpond.aggregate.kernels import Vector, kernels
from millpond.aggregate.masking import fixed_point, keys
from millpond.aggregate.masking.messages import WIDTHS, Unmask
from millpond.aggregate.masking.stream import MaskedVector, MaskStream, mask_stream
from millpond.aggregate.masking.words import PART_BYTES
from millpond.aggregate.reduction import NORM_ERROR
from millpond.base.errors import ProtocolError, Refused
from millpond.privacy.discrete_gaussian import Integers
from millpond.train.protocol import PrepareWorker, Ready, Update, Work, state_digest
from millpond.train.task.sums import LOSS
from millpond.train.update_bounds import UpdateBounds
from millpond.wire.channel import Buffer
from millpond.wire.messages import Message


class MaskedUpdates:
    """The device's part in the masked exchanges of the job that a worker was prepared for, whose updates have
    ``size`` values.
    """

    def __init__(self, config: AgentConfig, prepared: PrepareWorker, size: int) -> None:
        work, policy = prepared.work, config.policy
        self._policy = policy
        self._clip, self._size, self.written = work.clip, size, 0  # bytes of the update that was masked last
        self._job, self._what, self._at = _job_of(prepared), b"", b""
        self._masked_at = b""
        self._told = ToldSums(Path(config.state)) if policy.cohort else None
        self._noise = UpdateNoise(config, work, size) if work.privacy else None
        self.member = DeviceMember(config)

    def described(self, answer: Ready) -> Ready:
        """Return the answer to the host with what it needs for a cohort."""
        member, policy = self.member, self._policy
        return replace(
            answer,
            cohort_key=member.public,
            cohort_certificate=member.certificate,
            pinned=bool(policy.cohort),
            roster=member.roster.number,
            least_devices=policy.least_devices,
        )

    @property
    def bytes(self) -> int:
        """The most bytes of a masked update."""
        return max(MaskedVector.bytes_of(self._size, bits) for bits in WIDTHS)

    def answer(self, request: Message) -> Message | None:
        """Answer a request about the present exchange, None for another one. Raises Refused."""
        return self._unmask(request) if isinstance(request, Unmask) else self.member.answer(request)

    def _unmask(self, request: Unmask) -> Message:
        """Give the shares of the present exchange, after it is noted durably whose sum is told with them."""
        shares = self.member.unmask(request)
        if self._told:
            self._told.note(self._masked_at, self.member.survivors)
        return shares

    def begin(self, request: Work, state: memoryview) -> None:
        """Note what the next update is of: those of the other devices must be of the same. Requests without
        an update change nothing. The digest of a state that was spread is in the request.
        """
        if request.held_out or request.synthetic:
            return
        digest = request.spread or state_digest(state)
        self._at = digest.encode()
        self._what = keys.digest(self._job, str(request.epoch), digest)

    def write(self, update: Update, request: Work, values: Buffer, out: memoryview) -> Update:
        """Write the masked ``values`` of an update to ``out``. Returns its head without what its values are
        like. Raises Refused for an update that no sum can have.
        """
        if self._noise:
            update, values = self._noise.counted(update, request, values)
        elif fault := UpdateBounds(unit="round").refusal(request, update):
            raise Refused("", "model", fault)
        (scale, terms), bits = self.member.rounding, self.member.bits
        most = self._clip * update.samples
        divisor = self._noise.divisor(update.samples) if self._noise else 1
        self._check_fits(scale * (most / divisor) * terms, bits)
        factor = most / update.norm if update.norm > most else 1.0
        share, figures = None, update.metrics[LOSS]
        if self._noise:
            factor, figures = factor / divisor, (0.0, 0.0)
            share = self._noise.share(scale, self.member.fewest)
        what = keys.digest(self._what, repr(scale))  # in other units the noise of others would be less
        self._masked_at = self._at  # later requests do not change what a sum of this exchange is of
        words, stream = MaskedVector(self._size, bits, out), mask_stream(self.member.masks(what))
        self.written = words.data.nbytes
        try:
            masked = np.array([fixed_point.whole_figure(each) for each in figures], np.uint64)
            stream.add(masked)
            words.figures[:] = masked
            quantiser = fixed_point.Quantiser(bits, scale, factor, update.largest, terms)
            squares = self._masked(quantiser, stream, np.frombuffer(values, np.float32), words, share)
        except OutOfBounds:
            text = f"its update or its loss is beyond what a sum of {terms} devices can have"
            raise Refused("", "model", text) from None
        # Below the clip a norm may be less: float32 has no squares of values below 1e-22.
        longest = max(update.norm, most) * (1 + NORM_ERROR)
        if update.weight != update.samples or math.sqrt(squares) > longest:
            raise ProtocolError("the worker sent an update that is not what its head says")
        head = replace(update, largest=0.0, norm=0.0, metrics={LOSS: (0.0, 0.0)})
        return self._noise.head(head) if self._noise else head

    def _check_fits(self, largest: float, bits: int) -> None:
        """Raise Refused unless words hold the ``largest`` sum that the clip allows, whatever the values are:
        by units in which some fit and others do not a host would learn their size.
        """
        if not largest <= 2.0 ** fixed_point.bits_of_sum(bits):
            raise Refused("", "policy", "policy.cohort: values within limits.clip are too large in this unit")

    @staticmethod
    def _masked(
        quantiser: fixed_point.Quantiser,
        stream: MaskStream,
        values: Vector,
        words: MaskedVector,
        share: Callable[[int], Integers] | None,
    ) -> float:
        """Write the masked words of values, with the ``share`` of noise if there is one, part by part, and
        return the sum of the values' squares.
        """
        squares, longest = 0.0, PART_BYTES // words.values.itemsize
        copied, rounded = np.empty(longest, np.float32), np.empty(longest, words.values.dtype)
        for place in words.parts():
            count = len(values[place])
            part, whole = copied[:count], rounded[:count]  # what leaves is never there without masks
            part[:] = values[place]  # the worker may go on writing to its memory
            squares += kernels().squares(part)
            quantiser.write(part, whole)
            if share:
                whole += share(len(part)).astype(whole.dtype)
            stream.add(whole)
            words.values[place] = whole
        return squares


def _job_of(prepared: PrepareWorker) -> bytes:
    """Return a digest of what all devices of a job have in common, as it decides on their updates."""
    files = sorted((name, file.sha256) for name, file in prepared.files.items())
    folders = [(folder.path, folder.public) for folder in prepared.folders]
    return keys.digest(repr((prepared.work, prepared.tensors, prepared.unsent, files, folders)))
