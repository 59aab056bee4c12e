# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, processes): what differential privacy costs in accuracy, beside Opacus; its accounting; its
noise.

The devices are those of the attacks: local training, clipping, rounding, noise and masks are the product's
own, in one process. Opacus trains centrally on the same units of the same samples with the same model: with
all units in each step, as our devices do, and with batches that it draws. Drawing hides units, too, which no
device can count on, as the host chooses.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from bench.experiment import Experiment, Findings, Run, Unmeasured
from bench.installed import installed
from bench.privacy.dp_settings import CENTRAL, PEERS, SETTINGS, Central, Setting, model
from bench.privacy.federation import accuracy, whole
from bench.privacy.target import Model, TargetDevice, digits, rounds_work, sum_of
from bench.rows import Row, summary
from millpond.agent.policy.settings import Policy
from millpond.privacy.accounting import epsilon_of
from millpond.privacy.discrete_gaussian import discrete_gaussian
from millpond.privacy.spec import PrivacySpec

EPSILONS, DELTA, SEEDS = (8.0, 3.0, 1.0), 1e-5, 3
TEST, VALUES = 360, 2_029_642
_PEER, _OPACUS = Path(__file__).with_name("opacus_peer.py"), "opacus==1.6.0"
_EMULATION = "devices in one process"
Accuracies = dict[tuple[str, float], list[float]]
"""By the name of a setting and epsilon, those of all seeds in percent."""


def measure(run: Run) -> Findings:
    """Rows ``dp_SETTING_EPSILON``, ``dp_opacus_MODE_EPSILON``, ``dp_below_opacus_SETTING_EPSILON``,
    ``dp_accounting`` and ``dp_noise``; the short form has no peer, and the fastest setting alone.
    """
    if run.quick:
        (fastest,) = (setting for setting in SETTINGS if setting.name == "device6")
        short = replace(fastest, training=replace(fastest.training, rounds=1, steps=1))
        found = {(short.name, 8.0): [_accuracy(short, 8.0, 0)]}
        return Findings((_accounting(), _noise(run), *_own([short], found), *_not_central("the short form")))
    run.say(f"{len(SETTINGS)} settings, {len(EPSILONS)} epsilons, {SEEDS} seeds")
    ours = _accuracies()
    rows = [_accounting(), _noise(run), *_own(SETTINGS, ours)]
    try:
        run.say(f"{len(CENTRAL)} settings by Opacus")
        theirs = _centrally(installed("opacus", "torch==2.13.0", _OPACUS, figures=()))
    except Unmeasured as error:
        return Findings((*rows, *_not_central(str(error))))
    return Findings((*rows, *_central(theirs), *_below(ours, theirs)))


EXPERIMENT = Experiment("dp", "Differential privacy: accuracy, accounting and noise", measure)


def _accuracies() -> Accuracies:
    """Return the accuracies of all settings, seeds side by side on all processors."""
    cases = list(product(SETTINGS, EPSILONS, range(SEEDS)))
    found: Accuracies = {}
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), fresh, torch.set_num_threads, (1,)) as pool:
        values = pool.map(_accuracy, *zip(*cases, strict=True))
        for (setting, epsilon, _), value in zip(cases, values, strict=True):
            found.setdefault((setting.name, epsilon), []).append(value)
    return found


def _accuracy(setting: Setting, epsilon: float, seed: int) -> float:
    """Return the accuracy in percent on digits that no device has, after all rounds."""
    data, own = digits(seed), setting.training.at(epsilon)
    net = Model(partial(model, own.model), seed)
    train, test = data.part(slice(0, -TEST)), data.part(slice(-TEST, None))
    work = rounds_work(own.steps, 0, secure=True, rate=own.rate, clip=own.clip)
    work = replace(work, privacy=PrivacySpec(epsilon, DELTA, setting.unit), total=own.rounds, seed=seed)
    policy = Policy(least_samples=setting.group, answers_per_state=0)
    with tempfile.TemporaryDirectory() as folder:
        parts = np.array_split(np.arange(len(train)), setting.devices)
        devices = [
            TargetDevice(f"csd{rank:02}", train.part(part), net, work, Path(folder), policy)
            for rank, part in enumerate(parts)
        ]
        units = len(devices) if setting.unit == "device" else len(train) / setting.group
        state, velocity = net.first.copy(), np.zeros(len(net.first))
        for number in range(own.rounds):
            requests = {device.name: whole(device, number) for device in devices}
            total = sum_of(devices, requests, dict.fromkeys(requests, state))
            velocity = own.momentum * velocity + total / units  # as FedAvgM
            state = (state - velocity).astype(np.float32)
    return accuracy(net, state, test)


def _rows(settings: Sequence[Setting | Central], found: Accuracies, prefix: str, **told: str) -> list[Row]:
    """Return a row for each setting and epsilon of which there are accuracies."""
    return [
        summary(f"{prefix}{one.name}_{epsilon:g}", one.training.told(one.what, epsilon), values, "%", **told)
        for one in settings
        for epsilon in EPSILONS
        if (values := found.get((one.name, epsilon)))
    ]


def _own(settings: Sequence[Setting], found: Accuracies) -> list[Row]:
    return _rows(settings, found, "dp_", emulation=_EMULATION)


def _centrally(python: str) -> Accuracies:
    """Return the accuracies of all central settings."""
    cases = list(product(CENTRAL, EPSILONS, range(SEEDS)))
    asked = [
        asdict(replace(one, training=one.training.at(epsilon))) | {"epsilon": epsilon, "seed": seed}
        for one, epsilon, seed in cases
    ]
    data = [digits(seed) for seed in range(SEEDS)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "digits.npz")
        images = np.stack([each.images for each in data]).astype(np.float32)
        np.savez(file, images=images, labels=np.stack([each.labels for each in data]))
        command = [python, str(_PEER), str(file), str(TEST), str(DELTA)]
        done = subprocess.run(command, input=json.dumps(asked), check=True, capture_output=True, text=True)
    found: Accuracies = {}
    for (one, epsilon, _), value in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        found.setdefault((one.name, epsilon), []).append(value)
    return found


def _central(found: Accuracies) -> list[Row]:
    return _rows(CENTRAL, found, "dp_opacus_", peer=_OPACUS)


def _below(ours: Accuracies, theirs: Accuracies) -> list[Row]:
    """Return by how much ours is below Opacus on the same units, seed by seed."""
    rows = []
    for (name, peer), epsilon in product(PEERS, EPSILONS):
        pairs = zip(ours[name, epsilon], theirs[peer, epsilon], strict=True)
        told = f"'{name}' below Opacus' '{peer}' at epsilon {epsilon:g}, in points"
        values = [other - mine for mine, other in pairs]
        rows.append(summary(f"dp_below_opacus_{name}_{epsilon:g}", told, values, "points", peer=_OPACUS))
    return rows


def _not_central(why: str) -> list[Row]:
    names = [f"dp_opacus_{one.name}_{epsilon:g}" for one in CENTRAL for epsilon in EPSILONS]
    return [Row(name, f"not measured: {why}", None, None, None, "%", _OPACUS, 0, None) for name in names]


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
