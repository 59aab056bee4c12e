# SPDX-License-Identifier: Apache-2.0
"""Edge (a shared library): noise of differential privacy in a job's updates, and those that leave without
masks.

An update counts as one, or as its groups, and not by its samples: what a unit can add to a sum has then the
same bound on all devices, the clip, and so has the noise. Where updates leave in masked sums each device
adds a share: the fewest shares that a sum can have together are the noise that the job needs. Else each
device adds all of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from millpond.agent.config import AgentConfig
from millpond.aggregate.exact import BITS, OutOfBounds, scale_of
from millpond.aggregate.kernels import Vector, kernels
from millpond.aggregate.masking.fixed_point import Quantiser
from millpond.aggregate.reduction import NORM_ERROR
from millpond.base.errors import ProtocolError, Refused
from millpond.privacy.accounting import sigma_of_sum
from millpond.privacy.discrete_gaussian import Integers, discrete_gaussian
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import Update, Work
from millpond.train.task.sums import LOSS
from millpond.train.update_bounds import UpdateBounds
from millpond.wire.channel import Buffer

_PART = 1 << 16


class UpdateNoise:
    """The noise in updates of ``size`` values of a job with ``work.privacy``."""

    def __init__(self, config: AgentConfig, work: WorkSpec, size: int) -> None:
        assert work.privacy is not None
        self._clip, self._size, self._spec = work.clip, size, work.privacy
        self._rho, self.reach = work.privacy.rho(work.total), work.privacy.reach(work.total)
        self._group = config.policy.least_samples

    def divisor(self, samples: int) -> int:
        """Return by what a sum over so many samples is divided, so that no unit adds more than the clip."""
        return samples if self._spec.unit == "device" else self._group

    def sigma(self, scale: float, shares: int) -> int:
        """Return the standard deviation of a device's noise in an update that is rounded to multiples of
        ``1 / scale``, if ``shares`` devices add as much, in these units. Raises Refused for noise that nobody
        can draw.
        """
        # Rounding moves each value of a sum, and of its neighbour, by half a unit.
        sensitivity = self._clip * scale * (1 + NORM_ERROR) + math.sqrt(self._size)
        try:
            return sigma_of_sum(self._rho, sensitivity, shares, self._size)
        except (ValueError, OverflowError) as error:
            raise Refused("", "model", f"privacy: {error}") from None

    def share(self, scale: float, shares: int) -> Callable[[int], Integers]:
        """Return what draws the noise of parts of such an update. Raises Refused, as ``sigma``."""
        sigma = self.sigma(scale, shares)
        return lambda count: discrete_gaussian(sigma, count, os.urandom)

    def counted(self, update: Update, request: Work, values: Buffer) -> tuple[Update, Buffer]:
        """Return an update and its values, all of them 0 for one that cannot count, as its values are not
        finite: the host chooses the state, and a refusal would tell it without noise for which samples.
        """
        if not UpdateBounds(unit="round").refusal(request, update):
            return update, values
        return replace(update, largest=0.0, norm=0.0, metrics={LOSS: (0.0, 0.0)}), bytes(4 * self._size)

    def head(self, update: Update) -> Update:
        """Return the head of an update without its loss, and without figures that follow from values."""
        weight = update.samples / self.divisor(update.samples)
        return replace(update, weight=weight, largest=0.0, norm=0.0, metrics={LOSS: (0.0, 0.0)})


class NoisyUpdates:
    """The updates of a job that leave with all its noise, and without masks."""

    def __init__(self, config: AgentConfig, work: WorkSpec, size: int) -> None:
        self._noise, self._clip, self._size = UpdateNoise(config, work, size), work.clip, size

    def write(self, update: Update, request: Work, values: Buffer, out: memoryview) -> Update:
        """Write the clipped ``values`` of an update with noise to ``out``. Returns its head. Raises Refused
        for an update that is not what its head says.
        """
        update, values = self._noise.counted(update, request, values)
        most, divisor = self._clip * update.samples, self._noise.divisor(update.samples)
        factor = min(1.0, most / update.norm if update.norm else 1.0) / divisor
        scale = scale_of(most / divisor + self._noise.reach * self._clip, 1, BITS)
        own, found = np.frombuffer(bytes(values), np.float32), np.frombuffer(out, np.float32)
        if math.sqrt(kernels().squares(own)) > max(update.norm, most) * (1 + NORM_ERROR):
            raise ProtocolError("the worker sent an update that is not what its head says")
        try:
            self._write(Quantiser(64, scale, factor, update.largest, 1), scale, own, found)
        except OutOfBounds:
            raise Refused("", "model", "its update is beyond what its head says") from None
        largest = float(np.abs(found).max(initial=0.0))
        head, norm = self._noise.head(update), math.sqrt(kernels().squares(found))
        return replace(head, largest=largest, norm=norm * (1 + NORM_ERROR))

    def _write(self, quantiser: Quantiser, scale: float, values: Vector, out: Vector) -> None:
        share = self._noise.share(scale, 1)
        for start in range(0, self._size, _PART):
            part = values[start : start + _PART]
            whole = np.empty(len(part), np.uint64)
            quantiser.write(part, whole)
            out[start : start + len(part)] = (whole.view(np.int64) + share(len(part))) / scale
