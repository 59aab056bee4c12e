# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the levels of privacy that the attacks are tried at, and fleets of devices at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from bench.privacy.target import CLIP, PIXELS, RATE, Digits, Model, TargetDevice, rounds_work, steps_work
from millpond.agent.cohort.cohort_key import make_key
from millpond.agent.policy.settings import Policy
from millpond.privacy.accounting import rho_of
from millpond.train.job.spec import WorkSpec

HIDDEN = 128
ROUNDS, DELTA = 8, 1e-5
NOISY_CLIP, NOISY_RATE = 0.3, 1.0
"""With noise an attacker takes a rate by which updates reach the clip."""
PUBLIC = 300
"""Digits that are nobody's: what an attacker knows of their kind."""


@dataclass(frozen=True, slots=True)
class Level:
    """Sums of ``devices`` devices, masked if more than one, each answer about ``group`` samples or more; with
    noise by which ROUNDS sums are (``epsilon``, DELTA)-private, and a device is the unit.
    """

    name: str
    devices: int = 1
    group: int = Policy().least_samples
    epsilon: float = 0.0

    @property
    def secure(self) -> bool:
        """Whether updates are masked."""
        return self.devices > 1

    @property
    def cohort(self) -> int:
        """The number of devices that train: where each is seen alone, as many as in the largest sum."""
        return self.devices if self.secure else 16

    @property
    def rho(self) -> float:
        """What one sum may cost, 0 without noise."""
        return rho_of(self.epsilon, DELTA) / ROUNDS if self.epsilon else 0.0

    @property
    def clip(self) -> float:
        """The largest norm of an update per sample: half of them are larger where there is noise."""
        return NOISY_CLIP if self.epsilon else CLIP

    @property
    def told(self) -> str:
        """What a person calls it."""
        if self.epsilon:
            return f"masked sums of {self.devices} devices, epsilon {self.epsilon:g} of a device"
        if not self.secure:
            return f"policy alone, least_samples {self.group}"
        return f"masked sums of {self.devices} devices, least_samples {self.group}"


ALONE, GROUPS = Level("policy"), Level("policy64", group=64)
SUMS = tuple(Level(f"sum{count}", count) for count in (3, 8, 16))
NOISY = tuple(Level(f"epsilon{epsilon}", 16, epsilon=epsilon) for epsilon in (8, 3, 1))
ROUND_LEVELS = (ALONE, *SUMS, *NOISY)
LEVELS = (ALONE, GROUPS, *SUMS, *NOISY)
PASSES, BATCH = 3, 8
"""The local training of a round."""


def mlp() -> nn.Module:
    """Return a network of linear layers: the first one is that of the analytic attack."""
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def one_step(level: Level) -> tuple[WorkSpec, float]:
    """Return the work by which a host has gradients at a level, and what an answer is times a gradient."""
    if not level.secure:
        return steps_work(), 1.0
    rate = NOISY_RATE if level.epsilon else RATE
    return rounds_work(secure=True, rate=rate, clip=level.clip), rate


def fleet(
    level: Level, data: Digits, each: int, model: Model, work: WorkSpec, folder: Path, *, pinned: bool = False
) -> list[TargetDevice]:
    """Return the devices of a level, with ``each`` samples of ``data``: the first ones are the first's. If
    ``pinned``, each has the keys of the others in its policy.
    """
    cohort = tuple(_key(folder / level.name, f"csd{rank:02}") for rank in range(level.devices * pinned))
    policy = Policy(least_samples=level.group, answers_per_state=0, cohort=cohort)
    return [
        TargetDevice(f"csd{rank:02}", part, model, work, folder / level.name, policy)
        for rank, part in enumerate(_parts(data, each, level.devices))
    ]


def _key(folder: Path, name: str) -> str:
    """Return the line by which others pin a device, whose key is made."""
    (folder / name).mkdir(parents=True)
    make_key(folder / name, name)
    return (folder / name / "cohort.pub").read_text().strip()


def round_devices(
    level: Level, data: Digits, each: int, model: Model, folder: Path, *, secure: bool = False
) -> list[TargetDevice]:
    """Return the devices of a job of rounds at a level, with ``each`` samples of ``data``."""
    work = rounds_work(PASSES, BATCH, secure=secure, clip=level.clip)
    policy = Policy(least_samples=level.group, answers_per_state=0)
    return [
        TargetDevice(f"csd{rank:02}", part, model, work, folder, policy)
        for rank, part in enumerate(_parts(data, each, level.cohort))
    ]


def _parts(data: Digits, each: int, devices: int) -> Iterator[Digits]:
    assert devices * each <= len(data)
    for rank in range(devices):
        yield data.part(slice(rank * each, (rank + 1) * each))


def public_part(data: Digits) -> Digits:
    """Return the samples that no device has."""
    return data.part(np.arange(len(data) - PUBLIC, len(data)))
