# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, a process): what differential privacy costs in accuracy, beside Opacus; its accounting; its
noise.

The devices are those of the attacks: local training, clipping, rounding, noise and masks are the product's
own, in one process. Opacus trains the same model centrally on the same samples, without and with batches
that it draws: drawing hides samples, too, which no device can count on, as the host chooses.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from bench.experiment import Experiment, Findings, Run, Unmeasured
from bench.installed import installed
from bench.privacy.federation import accuracy, whole
from bench.privacy.target import Model, TargetDevice, digits, rounds_work, sum_of
from bench.rows import Row, summary
from millpond.agent.policy.settings import Policy
from millpond.privacy.accounting import epsilon_of
from millpond.privacy.discrete_gaussian import discrete_gaussian
from millpond.privacy.spec import PrivacySpec
from millpond.train.zoo.models import digits_cnn

EPSILONS, DELTA = (8.0, 3.0, 1.0), 1e-5
TEST, VALUES = 360, 2_029_642
_PEER, _OPACUS = Path(__file__).with_name("opacus_peer.py"), "opacus==1.6.0"
_EMULATION = "devices in one process"


@dataclass(frozen=True, slots=True)
class Setting:
    """A job over ``devices``: rounds, the largest difference of a unit, and the rate of local steps."""

    name: str
    what: str
    unit: Literal["device", "group"]
    devices: int
    group: int
    rounds: int
    clip: float
    rate: float
    passes: int = 1
    batch: int = 0


SETTINGS = (
    Setting("sample6", "6 devices, each sample a group", "group", 6, 1, 10, 1.0, 1.0),
    Setting("group6", "6 devices, groups of 8", "group", 6, 8, 10, 1.0, 1.0),
    Setting("group20", "20 devices, groups of 8", "group", 20, 8, 10, 1.0, 1.0),
    Setting("device6", "6 devices, each a unit", "device", 6, 8, 5, 0.5, 0.1, 3, 16),
    Setting("device20", "20 devices, each a unit", "device", 20, 8, 5, 0.5, 0.1, 3, 16),
)


def measure(run: Run) -> Findings:
    """Rows ``dp_SETTING_EPSILON``, ``dp_opacus_MODE_EPSILON``, ``dp_accounting`` and ``dp_noise``; the short
    form has no peer, and the fastest setting alone.
    """
    settings = (replace(SETTINGS[3], rounds=1, passes=1),) if run.quick else SETTINGS
    rows = [_accounting(), _noise(run)]
    for setting in settings:
        for epsilon in EPSILONS[:1] if run.quick else EPSILONS:
            run.say(f"{setting.what}, epsilon {epsilon:g}")
            found = [_accuracy(setting, epsilon, seed) for seed in range(run.repeats)]
            told = (
                f"accuracy of the demo's task: {setting.what}, epsilon {epsilon:g}, {setting.rounds} rounds"
            )
            rows.append(summary(f"dp_{setting.name}_{epsilon:g}", told, found, "%", emulation=_EMULATION))
    return Findings((*rows, *_opacus(run)))


EXPERIMENT = Experiment("dp", "Differential privacy: accuracy, accounting and noise", measure)


def _accuracy(setting: Setting, epsilon: float, seed: int) -> float:
    """Return the accuracy in percent on digits that no device has, after all rounds."""
    data, model = digits(seed), Model(digits_cnn, seed)
    train, test = data.part(slice(0, -TEST)), data.part(slice(-TEST, None))
    work = rounds_work(setting.passes, setting.batch, secure=True, rate=setting.rate, clip=setting.clip)
    work = replace(work, privacy=PrivacySpec(epsilon, DELTA, setting.unit), total=setting.rounds, seed=seed)
    policy = Policy(least_samples=setting.group, answers_per_state=0)
    with tempfile.TemporaryDirectory() as folder:
        parts = np.array_split(np.arange(len(train)), setting.devices)
        devices = [
            TargetDevice(f"csd{rank:02}", train.part(part), model, work, Path(folder), policy)
            for rank, part in enumerate(parts)
        ]
        count = len(devices) if setting.unit == "device" else len(train) / setting.group
        state = model.first.copy()
        for number in range(setting.rounds):
            requests = {device.name: whole(device, number) for device in devices}
            total = sum_of(devices, requests, dict.fromkeys(requests, state))
            state = (state - total / count).astype(np.float32)
    return accuracy(model, state, test)


def _accounting() -> Row:
    """Return the largest error of epsilon, in percent of that of dp-accounting 0.6.0."""
    known = {  # see tests/privacy/test_accounting.py
        (0.0001, 1e-5): 0.0450474621,
        (0.01, 1e-5): 0.545725548,
        (0.1, 1e-8): 2.53843221,
        (1.0, 1e-5): 7.0771967,
        (10.0, 1e-8): 35.9533186,
    }
    errors = [100 * (epsilon_of(*given) / epsilon - 1) for given, epsilon in known.items()]
    told = "epsilon above that of dp-accounting by Renyi orders: its numbers are in the code"
    return summary("dp_accounting", told, errors, "%", peer="dp-accounting 0.6.0")


def _noise(run: Run) -> Row:
    """Return the seconds for the noise of a large model."""
    found = []
    for _ in range(run.repeats):
        began = time.process_time()
        discrete_gaussian(1 << 24, VALUES, os.urandom)
        found.append(time.process_time() - began)
    return summary("dp_noise", f"CPU seconds for the noise of {VALUES:,} values", found, "s")


def _opacus(run: Run) -> Iterator[Row]:
    """Yield the accuracy of central training, or rows that say why there is none."""
    modes = ("full", "drawn")
    names = [f"dp_opacus_{mode}_{epsilon:g}" for mode in modes for epsilon in EPSILONS]
    try:
        if run.quick:
            raise Unmeasured("not measured: the short form installs nothing", *names)
        python = installed("opacus", "torch==2.13.0", _OPACUS, figures=names)
    except Unmeasured as error:
        for name in names:
            yield Row(name, str(error), None, None, None, "%", _OPACUS, 0, None)
        return
    for mode in modes:
        for epsilon in EPSILONS:
            run.say(f"Opacus, batches {mode}, epsilon {epsilon:g}")
            found = [_central(python, mode, epsilon, seed) for seed in range(run.repeats)]
            told = f"accuracy of central training on single samples, epsilon {epsilon:g}, batches {mode}"
            yield summary(f"dp_opacus_{mode}_{epsilon:g}", told, found, "%", peer=_OPACUS)


def _central(python: str, mode: str, epsilon: float, seed: int) -> float:
    data = digits(seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "digits.npz")
        np.savez(file, images=data.images.astype(np.float32), labels=data.labels)
        command = [python, str(_PEER), str(file), str(TEST), mode, str(epsilon), str(DELTA), str(seed)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["accuracy"])
