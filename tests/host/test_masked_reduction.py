# SPDX-License-Identifier: Apache-2.0
"""Sums of masked updates at the host: a device that masks wrongly spoils no model unseen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from millpond.aggregate.exact import scale_of
from millpond.aggregate.masking import fixed_point, keys
from millpond.aggregate.masking.member import CohortMember
from millpond.aggregate.masking.messages import NO_CERTIFICATE, Agree, OpenCohort, TakeOffers
from millpond.aggregate.masking.roster import CohortRoster
from millpond.aggregate.masking.stream import MaskedVector, mask_stream
from millpond.host.workers.masked_reduction import MaskedReduction, WrongMasks
from millpond.host.workers.worker import DeviceWorker

SIZE, SAMPLES, CLIP = 64, 8, 1.0


@dataclass
class Device:
    """A device that answers as an agent does, for an update of ones; ``spoil`` changes what it has masked."""

    name: str
    bits: int
    spoil: np.ndarray[Any, Any] | None = None
    secret: bytes = field(default_factory=lambda: os.urandom(32))

    def __post_init__(self) -> None:
        self.cohort_key = keys.LastingKey(self.secret).public
        self.cohort_certificate = NO_CERTIFICATE
        self.member = CohortMember(self.name, self.secret, CohortRoster(2), os.urandom, set[bytes]().add)

    def ask(self, request: Any, _reply: type, _deadline: object) -> Any:
        steps = {OpenCohort: self.member.open, TakeOffers: self.member.take, Agree: self.member.agree}
        return cast(Any, steps.get(type(request), self.member.unmask))(request)

    def fetch(self, _stop: int, _deadline: object) -> None:
        scale, terms = self.member.rounding
        words = MaskedVector(SIZE, self.bits)
        values = np.full(SIZE, CLIP * SAMPLES / np.sqrt(SIZE), np.float32)  # its norm is the clip
        quantiser = fixed_point.Quantiser(self.bits, scale, 1.0, float(values.max()), terms)
        quantiser.write(values, words.values)
        stream = mask_stream(self.member.masks(b"update"))
        stream.add(words.figures)
        stream.add(words.values)
        if self.spoil is not None:
            words.values += self.spoil
        self.words = words

    def read(self, out: np.ndarray[Any, Any], _deadline: object) -> None:
        out[:] = self.words.data.view(np.float32)

    def close(self) -> None:
        raise AssertionError


def mean_of(bits: int, spoil: np.ndarray[Any, Any] | None, noise: float = 0.0) -> np.ndarray[Any, Any]:
    """Return the mean of three devices' updates, of which one is spoilt."""
    devices = {name: Device(name, bits) for name in ("csd0", "csd1", "csd2")}
    devices["csd1"].spoil = spoil
    workers = cast(Mapping[str, DeviceWorker], devices)
    mean = np.empty(SIZE, np.float32)
    reduction = MaskedReduction(mean, bits, CLIP, noise)
    assert reduction.begin(workers, scale_of(CLIP * SAMPLES, 3, fixed_point.bits_of_sum(bits))) == ({}, "")
    assert not reduction.read(workers)
    assert not reduction.finish(workers, 3 * SAMPLES)[0]
    return mean


@pytest.mark.parametrize("bits", [64, 32])
def test_a_sum_beyond_the_clip_is_none(bits: int) -> None:
    """Wrong masks cannot be told from right ones. What is left of them after all others are removed can."""
    kind = np.uint32 if bits == 32 else np.uint64
    random = np.frombuffer(os.urandom(SIZE * bits // 8), kind)
    large = np.full(SIZE, 1 << (bits - 4), kind)
    for spoil in (random, large):
        with pytest.raises(WrongMasks, match=r"csd0, csd1, csd2 is beyond limits\.clip"):
            mean_of(bits, spoil)
    np.testing.assert_allclose(mean_of(bits, None), CLIP / np.sqrt(SIZE), rtol=1e-4)


def test_a_sum_with_noise_may_be_beyond_the_clip_by_the_noise() -> None:
    noise, scale = 2.0 * CLIP * SAMPLES, scale_of(CLIP * SAMPLES, 3, fixed_point.bits_of_sum(64))
    drawn = np.random.default_rng(1).normal(0.0, noise, SIZE)
    spoil = np.rint(drawn * scale).astype(np.int64).view(np.uint64)
    assert np.linalg.norm(mean_of(64, spoil, noise)) > CLIP
    for junk in (3 * spoil.view(np.int64)).view(np.uint64), np.frombuffer(os.urandom(SIZE * 8), np.uint64):
        with pytest.raises(WrongMasks):
            mean_of(64, junk, noise)
