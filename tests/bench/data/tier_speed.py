# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): time and bytes of mini-epochs over a slow tier, against plain training over it.

The slow tier is a data set whose reads take as long as its bandwidth says. The consumer takes eight times as
many samples per second, and sleeps as long as its batches would take, so that both are what they are said to
be whatever else the machine does.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import millpond.data
from bench.experiment import Run
from bench.rows import Row, summary

TITLE = "time and bytes of repeated mini-epochs over a slow tier"
EMULATION = "the slow tier sleeps as its bandwidth says, the consumer as long as its batches would take"
_SAMPLES, _VALUES, _BATCH = 2048, 1024, 32
_CONSUMED, _RATIO = 8000.0, 8
"""Samples per second of the consumer, and how many times as fast it is as the slow tier."""


class SlowTier(Dataset[Tensor]):
    """Samples that come at ``rate`` per second; counts the bytes that were read."""

    def __init__(self, rate: float) -> None:
        self._seconds, self._at = 1 / rate, 0.0
        self.read = 0

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self._at = max(self._at + self._seconds, time.monotonic() - 0.01)
        if (wait := self._at - time.monotonic()) > 0.002:
            time.sleep(wait)
        self.read += 4 * _VALUES
        return torch.full((_VALUES,), float(index))


def measure(run: Run) -> list[Row]:
    """Alternate plain training with a reading process and mini-epochs, for as many visits of samples."""
    visits = 8 if run.quick else 32
    speedups, stalls, reads = [], [], []
    for repeat in range(run.repeats):
        plain = _plain(2) / 2
        ours, _, read = _repeated(16, visits)
        _, stall, _ = _repeated(_RATIO + 2, visits)
        speedups.append(plain / ours)
        stalls.append(100 * stall)
        reads.append(read)
        run.say(f"{repeat + 1}: an epoch {plain:.2f} s, {ours:.3f} s with rf 16; rf 10 waits {stall:.1%}")
    plainly = "a torch DataLoader with a process that reads ahead"
    return [
        summary(
            "met_speedup",
            "epoch time of plain training over that of mini-epochs with rf 16",
            speedups,
            "x",
            peer=plainly,
            emulation=EMULATION,
        ),
        summary(
            "met_stall",
            f"share of the time without a mini-epoch, rf {_RATIO + 2} where the slow tier gives 1/{_RATIO}",
            stalls,
            "%",
            emulation=EMULATION,
        ),
        summary(
            "slow_reads_rf16",
            "bytes read from the slow tier with rf 16, over those of plain training",
            reads,
            "x",
            peer="plain training, by its number of visits",
            emulation=EMULATION,
        ),
    ]


def _plain(epochs: int) -> float:
    """Return the seconds of plain training, which reads every sample in each epoch."""
    slow = SlowTier(_CONSUMED / _RATIO)
    began = time.monotonic()
    for _ in range(epochs):
        for batch in DataLoader(slow, batch_size=_BATCH, shuffle=True, num_workers=1, prefetch_factor=4):
            _consume(len(batch))
    return time.monotonic() - began


def _repeated(times: int, visits: int) -> tuple[float, float, float]:
    """Return the seconds of an epoch's visits, the share of them without a mini-epoch once training has
    begun, and the bytes read over those of plain training.
    """
    slow, seen = SlowTier(_CONSUMED / _RATIO), 0
    passes = max(visits // times, 1)
    began = time.monotonic()
    with millpond.data.mini_epochs(slow, size=_SAMPLES // 8, repeat=times, passes=passes) as mini_epochs:
        first = 0.0
        for mini_epoch in mini_epochs:
            first = first or mini_epochs.waited
            for batch in DataLoader(mini_epoch, batch_size=_BATCH, shuffle=True):
                _consume(len(batch))
                seen += len(batch)
        waited = mini_epochs.waited - first
    seconds = time.monotonic() - began
    epochs = seen / _SAMPLES
    return seconds / epochs, waited / (seconds - first), slow.read / (4 * _VALUES * seen)


_debt = 0.0


def _consume(samples: int) -> None:
    """Take as long as a training step; what a sleep was too long is taken off the next one."""
    global _debt
    wanted = samples / _CONSUMED - _debt
    began = time.monotonic()
    if wanted > 0:
        time.sleep(wanted)
    _debt = min(time.monotonic() - began - wanted, 0.05) if wanted > 0 else -wanted
