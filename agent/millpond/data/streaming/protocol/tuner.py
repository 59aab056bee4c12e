# SPDX-License-Identifier: Apache-2.0
"""Pure: how many samples a chunk of a stream has, and how many bytes are on the way, from what is measured.

A sample has s bytes and is trained on in t seconds; the link, or the reading server, carries B bytes a second
and takes c seconds more for each chunk; credit needs L seconds to get there and to come back as samples. So
chunks of k samples are supplied at

    k / (c + k s / B) samples per second at most.

*Chunk.* Over the N samples of an epoch a consumer idles for

    I(k) = L + ceil(b / k) (c + k s / B)  +  N max(0, c / k + s / B - t)  +  N h / k  +  k t / 8

seconds: until its first batch of b samples is whole; in the steady state; while its own processor takes in
chunks, h seconds each, instead of training; and at the end, where others wait for its last lease, see
``leases``. The first and the last term grow with k, the others fall. The chunk is
the k, of b times powers of two, for which I is least.

*Depth.* With r samples per second flowing, the slower of supply and demand, r (L + c + k s / B) samples have
to be on the way so that the next chunk is there in time, k more are in the chunk that is used up, whose
credit comes back when it is, and another k are being sent. The window is twice that, as steps and links are
uneven, within the memory bound. A chunk whose window is larger than the bound is not considered.

c and 1 / B are fitted by least squares to the times between chunks of a consumer whose credit was not used
up, in which the link alone was waited for; old ones are forgotten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from millpond.train.protocol import StreamTiming

_KEPT = 0.9
"""What an observation weighs after the next."""
_LATENCY, _CHUNK_COST, _BANDWIDTH = 1e-3, 5e-4, 1e8
"""Seconds, seconds and bytes per second that are assumed before anything is measured."""
_LEAST_COST = 3e-4
"""Seconds in which both sides handle a chunk, at the least: of chunks of one size the fit cannot tell."""
_TAKING = 1e-4
"""Seconds of the consumer's processor for a chunk, h."""
_PRIOR = 0.3
"""Observations that these assumptions are worth."""
_MARGIN, _HEADROOM = 2.0, 0.9
_TAIL = 8
_SMALLEST_WINDOW = 64 << 10


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """Samples of a chunk, bytes on the way, and the seconds of idle time that are predicted for an epoch."""

    chunk: int
    window: int
    idle: float


@dataclass(frozen=True, slots=True)
class StreamCosts:
    """The costs by which a choice is made: bytes of a sample, bytes per second, seconds of a round trip, of a
    chunk beside its bytes, and of a sample's training.
    """

    sample_bytes: float
    bandwidth: float = _BANDWIDTH
    latency: float = _LATENCY
    chunk_cost: float = _CHUNK_COST
    sample_seconds: float = 0.0

    def transfer(self, chunk: int) -> float:
        """Return the seconds of a chunk on the link."""
        return self.chunk_cost + chunk * self.sample_bytes / self.bandwidth

    def idle(self, chunk: int, batch: int, samples: int) -> float:
        """Return the seconds that a consumer idles in an epoch of so many samples, I(k) above."""
        first = self.latency + math.ceil(batch / chunk) * self.transfer(chunk)
        steady = samples * max(0.0, self.transfer(chunk) / chunk - _HEADROOM * self.sample_seconds)
        return first + steady + samples * _TAKING / chunk + chunk * self.sample_seconds / _TAIL

    def window(self, chunk: int) -> int:
        """Return the bytes that have to be on the way."""
        rate = chunk / max(self.transfer(chunk), chunk * self.sample_seconds)
        samples = rate * (self.latency + self.transfer(chunk)) + 2 * chunk
        return max(_SMALLEST_WINDOW, math.ceil(_MARGIN * samples * self.sample_bytes))


def choose(costs: StreamCosts, batch: int, samples: int, memory: int) -> StreamChoice:
    """Return the chunk, and the window, with the least idle time in ``memory`` bytes."""
    powers = range(-batch.bit_length() + 1, 16)
    chunks = sorted({max(1, math.ceil(batch * 2.0**power)) for power in powers})
    fitting = [chunk for chunk in chunks if costs.window(chunk) <= memory] or chunks[:1]
    best = min(fitting, key=lambda chunk: costs.idle(chunk, batch, samples))
    return StreamChoice(best, min(memory, costs.window(best)), costs.idle(best, batch, samples))


class _Line:
    """Fits seconds = c + size / B to observations, of which the last ones count most."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, sizes, seconds, sizes squared, sizes times seconds
        for size in (1e4, 1e6):
            self._add(size, _CHUNK_COST + size / _BANDWIDTH, _PRIOR / 2)

    def observe(self, size: float, seconds: float) -> None:
        """Take in a chunk of ``size`` bytes."""
        self._sums = [_KEPT * each for each in self._sums]
        self._add(size, seconds, 1.0)

    def _add(self, size: float, seconds: float, weight: float) -> None:
        values = (1.0, size, seconds, size * size, size * seconds)
        self._sums = [each + weight * value for each, value in zip(self._sums, values, strict=True)]

    def costs(self) -> tuple[float, float]:
        """Return c in seconds and B in bytes per second."""
        weight, size, seconds, squares, products = self._sums
        spread = squares - size * size / weight
        slope = (products - size * seconds / weight) / spread if spread > 1e-9 * squares else 0.0
        slope = min(max(slope, 0.0), seconds / size)
        return max(_LEAST_COST, (seconds - slope * size) / weight), 1 / max(slope, 1e-12)


class StreamTuner:
    """Follows what is measured of a stream in batches of ``batch`` samples; at most ``memory`` bytes are on
    the way. A ``chunk`` that is given is kept.
    """

    def __init__(self, batch: int, memory: int, chunk: int | None = None) -> None:
        self._batch, self._memory, self._chunk = batch, memory, chunk
        self._samples = 1 << 16
        self._line = _Line()
        self._latency = _LATENCY
        self._sizes, self._steps = (0.0, 0.0), (0.0, 0.0)
        self.costs = StreamCosts(1.0)
        self.choice = StreamChoice(chunk or batch, min(memory, _SMALLEST_WINDOW), 0.0)

    @property
    def timing(self) -> StreamTiming:
        """The choice, and the costs by which it was made, as a worker tells them."""
        costs, choice = self.costs, self.choice
        whole = choice.idle + self._samples * costs.sample_seconds
        idle = round(100 * choice.idle / whole) if whole else 0
        step = costs.sample_seconds
        return StreamTiming(choice.chunk, choice.window, costs.bandwidth, costs.latency, step, idle)

    def opened(self, samples: int, sample_bytes: int, latency: float) -> None:
        """Note the size of the data set and of a sample, and the seconds of a round trip."""
        self._samples, self._sizes = samples, (float(sample_bytes), 1)
        self._latency = latency + _LATENCY
        self._choose()

    def observe_chunk(self, samples: int, size: int, seconds: float | None) -> None:
        """Note a chunk; the ``seconds`` since the one before it if the link alone was waited for."""
        bytes_, count = self._sizes
        self._sizes = (_KEPT * bytes_ + size, _KEPT * count + samples)
        if seconds is not None:
            self._line.observe(size, seconds)

    def observe_step(self, samples: int, seconds: float) -> None:
        """Note the seconds of a step with ``samples`` samples, without those in which it waited for them."""
        self._steps = (_KEPT * self._steps[0] + seconds, _KEPT * self._steps[1] + samples)
        self._choose()

    def _choose(self) -> None:
        """Choose anew; what is hardly better than the present choice does not replace it."""
        chunk_cost, bandwidth = self._line.costs()
        each = self._sizes[0] / max(self._sizes[1], 1e-9)
        step = self._steps[0] / self._steps[1] if self._steps[1] else 0.0
        self.costs = StreamCosts(max(1.0, each), bandwidth, self._latency, chunk_cost, step)
        if self._chunk:
            window = min(self._memory, self.costs.window(self._chunk))
            idle = self.costs.idle(self._chunk, self._batch, self._samples)
            self.choice = StreamChoice(self._chunk, window, idle)
            return
        found = choose(self.costs, self._batch, self._samples, self._memory)
        now = self.costs.idle(self.choice.chunk, self._batch, self._samples)
        fits = self.costs.window(self.choice.chunk) <= self._memory
        chunk = self.choice.chunk if fits and now <= 1.1 * found.idle else found.chunk
        window = min(self._memory, self.costs.window(chunk))
        if chunk == self.choice.chunk and window < 1.25 * self.choice.window < 2 * window:
            window = self.choice.window
        self.choice = StreamChoice(chunk, window, self.costs.idle(chunk, self._batch, self._samples))
