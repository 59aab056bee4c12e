# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): a malicious host: it chooses states, requests and cohorts to have single samples or devices.

``imprint``: each neuron of the first layer measures the same of a picture, a projection of its pixels, and is
excited from another value on. The difference of the gradients of two neurons is of the samples between the
two alone (Fowl et al. 2022, arXiv:2110.13057, with thresholds from data of the same kind; Boenisch et al.
2023, arXiv:2112.02918). In ``imprint8`` each of eight states has its neurons for an eighth of the samples.
``minus``: the sums of two cohorts at one state that differ by one device (Pasquini et al.
2022 name it), and the same from one round to the next. ``states``: all devices but one have a state at which
their updates are 0 (Pasquini et al. 2022, arXiv:2111.07380).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.experiment import Experiment, Run
from bench.privacy import inversion
from bench.privacy.federation import whole
from bench.privacy.levels import HIDDEN, ROUND_LEVELS, Level, fleet, mlp, one_step, public_part
from bench.privacy.measures import Floats, rebuilt, told
from bench.privacy.target import PIXELS, Digits, Model, TargetDevice, Vector, digits, rounds_work, sum_of
from bench.rows import Row, summary
from millpond.aggregate.masking.exchange import CohortFailed
from millpond.base.errors import Refused

EACH = 40
_WEIGHT = HIDDEN * PIXELS
Seen = dict[str, list[tuple[int, int]]]


def measure(run: Run) -> list[Row]:
    """Rows ``aimed.ATTACK.LEVEL``: shares of samples that are rebuilt, of exchanges that isolate a device,
    and how like a device's update a difference is.
    """
    torch.set_num_threads(1)
    seen: Seen = defaultdict(list)
    like: dict[str, list[float]] = defaultdict(list)
    levels = (*ROUND_LEVELS[:2], ROUND_LEVELS[-1]) if run.quick else ROUND_LEVELS
    for seed in range(run.repeats):
        for level in levels:
            with tempfile.TemporaryDirectory() as folder:
                _imprint(level, seed, Path(folder) / "imprint", seen)
                if level.secure:
                    _minus(level, seed, Path(folder) / "minus", seen, like)
                    _minus_pinned(level, seed, Path(folder) / "pinned", seen)
                    _states(level, seed, Path(folder) / "states", seen)
        run.say(f"seed {seed}: " + ", ".join(f"{name[6:]} {seen[name][-1][0]}" for name in seen))
    return [row for level in levels for row in _rows(level, seen, like)]


def _rows(level: Level, seen: Seen, like: dict[str, list[float]]) -> list[Row]:
    words = {
        "imprint": "samples rebuilt by a state with a neuron for each value of a projection",
        "imprint8": "samples rebuilt by eight such states, each for an eighth of the samples",
        "imprint_chance": "samples rebuilt by any samples of the same kind",
        "minus": "samples of one device rebuilt from two sums at one state",
        "minus_pinned": "second sums at one state that devices with a pinned cohort tell",
        "states": "exchanges with one device's update as the sum, by other states for the others",
    }
    rows = list[Row]()
    for attack, text in words.items():
        if counts := seen.get(f"aimed.{attack}.{level.name}"):
            right, of = (sum(column) for column in zip(*counts, strict=True))
            what = f"{text}: {level.told}; {told(right, of)}"
            shares = [100 * found / each for found, each in counts]
            rows.append(summary(f"aimed.{attack}.{level.name}", what, shares, "%"))
    for when, text in (("same", "at one state"), ("next", "in two rounds that follow each other")):
        if values := like.get(f"aimed.minus_{when}.{level.name}"):
            what = f"cosine of a device's update and the difference of two sums {text}: {level.told}"
            rows.append(summary(f"aimed.minus_{when}.{level.name}", what, values, ""))
    return rows


def _fleet(
    level: Level, seed: int, folder: Path, *, pinned: bool = False
) -> tuple[Digits, Model, list[TargetDevice]]:
    data, model = digits(seed), Model(mlp, seed)
    work, _ = one_step(level)
    if not level.secure:  # an answer about a whole folder
        work = rounds_work()
    return data, model, fleet(level, data, EACH, model, work, folder, pinned=pinned)


def _imprint(level: Level, seed: int, folder: Path, seen: Seen) -> None:
    data, model, devices = _fleet(level, seed, folder)
    known = public_part(data)
    truth = np.concatenate([device.data.images for device in devices])

    def guesses(low: float, high: float) -> Floats:
        state = imprinted(model.first, known, low, high)
        requests = {device.name: whole(device, 0) for device in devices}
        found = sum_of(devices, requests, dict.fromkeys(requests, state), level.rho)
        return between(found[:_WEIGHT].reshape(HIDDEN, PIXELS), found[_WEIGHT:][:HIDDEN])

    seen[f"aimed.imprint.{level.name}"].append((rebuilt(guesses(0, 1), truth), len(truth)))
    eight = np.concatenate([guesses(part / 8, (part + 1) / 8) for part in range(8)])
    seen[f"aimed.imprint8.{level.name}"].append((rebuilt(eight, truth), len(truth)))
    chance = known.images[np.random.default_rng(seed).permutation(len(known))[:HIDDEN]]
    seen[f"aimed.imprint_chance.{level.name}"].append((rebuilt(chance, truth), len(truth)))


def imprinted(first: Vector, known: Digits, low: float, high: float) -> Vector:
    """Return a state whose first layer has neurons for quantiles from ``low`` to ``high`` of a projection of
    the pixels of ``known``.
    """
    state = first.copy()
    direction = np.random.default_rng(0).normal(size=PIXELS) / PIXELS
    cuts = np.quantile(known.images @ direction, np.linspace(low, high, HIDDEN))
    state[:_WEIGHT] = np.tile(direction, HIDDEN)
    state[_WEIGHT:][:HIDDEN] = -cuts
    last = state[_WEIGHT + HIDDEN :][: 10 * HIDDEN].reshape(10, HIDDEN)
    last[:] = np.linspace(-0.1, 0.1, 10)[:, None]  # all neurons have the same gradient from behind
    return state


def between(weight: Floats, bias: Floats) -> Floats:
    """Return the mean picture of the samples between each two neurons, without those of none."""
    weights, biases = -np.diff(weight, axis=0, append=0), -np.diff(bias, append=0)
    is_some = np.abs(biases) > 1e-6 * np.abs(bias).max()
    found: Floats = weights[is_some] / biases[is_some, None]
    return found


def _minus(level: Level, seed: int, folder: Path, seen: Seen, like: dict[str, list[float]]) -> None:
    """The first device is in one sum, and not in the other one."""
    _, model, devices = _fleet(replace(level, devices=level.devices + 1), seed, folder)
    requests = {device.name: whole(device, 0) for device in devices}
    state = model.first
    with_one, without = (
        sum_of(each, requests, dict.fromkeys(requests, state), level.rho) for each in (devices, devices[1:])
    )
    samples = sum(len(device.data) for device in devices)
    later = (state - with_one / samples).astype(np.float32)
    following = sum_of(devices[1:], requests, dict.fromkeys(requests, later), level.rho)
    own = _own(devices[0], model, state)
    like[f"aimed.minus_same.{level.name}"].append(_cosine(with_one - without, own))
    like[f"aimed.minus_next.{level.name}"].append(_cosine(with_one - following, own))
    difference = with_one - without
    guesses = inversion.analytic(difference[:_WEIGHT].reshape(HIDDEN, PIXELS), difference[_WEIGHT:][:HIDDEN])
    truth = devices[0].data
    seen[f"aimed.minus.{level.name}"].append((rebuilt(guesses, truth.images), len(truth)))


def _minus_pinned(level: Level, seed: int, folder: Path, seen: Seen) -> None:
    """The same, of devices that have pinned each other."""
    _, model, devices = _fleet(replace(level, devices=level.devices + 1), seed, folder, pinned=True)
    requests = {device.name: whole(device, 0) for device in devices}
    told = 0
    for each in (devices, devices[1:]):
        with contextlib.suppress(Refused, CohortFailed):
            sum_of(each, requests, dict.fromkeys(requests, model.first), level.rho)
            told += 1
    assert told
    seen[f"aimed.minus_pinned.{level.name}"].append((told - 1, 1))


def _own(device: TargetDevice, model: Model, state: Vector) -> Floats:
    """Return the update of a device, which no attack is told."""
    net = model.loaded(state)
    net.zero_grad()
    images = torch.tensor(device.data.images, dtype=torch.float32).view(-1, 1, 8, 8)
    torch.nn.functional.cross_entropy(net(images), torch.from_numpy(device.data.labels)).backward()  # type: ignore[no-untyped-call]
    parts = [each.grad.reshape(-1).numpy() for each in net.parameters() if each.grad is not None]
    net.zero_grad()
    return np.concatenate(parts).astype(float)


def _cosine(one: Floats, other: Floats) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other) or 1.0))


def _states(level: Level, seed: int, folder: Path, seen: Seen) -> None:
    """All but the first device have a state without a live neuron: of the first layer they answer with 0."""
    _, model, devices = _fleet(level, seed, folder)
    dead = model.first.copy()
    dead[_WEIGHT:][:HIDDEN] = -1e3
    requests = {device.name: whole(device, 0) for device in devices}
    states = dict.fromkeys(requests, dead) | {devices[0].name: model.first}
    try:
        found = sum_of(devices, requests, states, level.rho)
    except (Refused, CohortFailed):
        seen[f"aimed.states.{level.name}"].append((0, 1))
        return
    own = _own(devices[0], model, model.first)
    is_own = _cosine(found[:_WEIGHT], own[:_WEIGHT]) > 0.99
    seen[f"aimed.states.{level.name}"].append((int(is_own), 1))


EXPERIMENT = Experiment("aimed", "A malicious host that chooses states and cohorts", measure)
