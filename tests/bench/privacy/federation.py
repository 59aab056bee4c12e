# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): a job of rounds over target devices, as a host runs it: what it sees, and the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.privacy.levels import ROUNDS, Level
from bench.privacy.measures import Floats
from bench.privacy.target import Digits, Model, TargetDevice, Vector, request_of, sum_of
from millpond.train.protocol import Work


@dataclass(frozen=True, slots=True)
class Trained:
    """The states before each round and after the last one, and what each device's own model is at the end:
    where no masks hide it, the host has it.
    """

    states: list[Vector]
    own: list[Vector]


def train(devices: Sequence[TargetDevice], model: Model, level: Level, seed: int) -> Trained:
    """Average the updates of the devices in ROUNDS rounds at a level. Devices without masks are an attacker's
    own: it clips and adds noise itself.
    """
    samples, rng = sum(len(device.data) for device in devices), np.random.default_rng(seed)
    state, states, own = model.first.copy(), [model.first.copy()], list[Vector]()
    for number in range(ROUNDS):
        requests = {device.name: whole(device, number) for device in devices}
        if devices[0].masked:
            mean = sum_of(devices, requests, dict.fromkeys(requests, state), level.rho) / samples
        else:
            own = [_alone(device, requests[device.name], state) for device in devices]
            mean = noisy(np.array([state - each for each in own]).astype(float), level, rng).mean(0)
        state = (state - mean).astype(np.float32)
        states.append(state)
    return Trained(states, own)


def noisy(updates: Floats, level: Level, rng: np.random.Generator) -> Floats:
    """Return updates per sample [n, size] of as many samples each, clipped and with their shares of the noise
    of a level.
    """
    if not level.epsilon:
        return updates
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    deviation = level.clip / np.sqrt(2 * level.rho * level.devices)
    found: Floats = updates * np.minimum(1, level.clip / norms) + rng.normal(0, deviation, updates.shape)
    return found


def whole(device: TargetDevice, epoch: int) -> Work:
    """Return the request about all samples of a device."""
    return request_of((0, len(device.data)), epoch=epoch, exchange=epoch + 1)


def _alone(device: TargetDevice, request: Work, state: Vector) -> Vector:
    """Return the model that a device has trained, which its update tells."""
    _, values = device.answer(request, state)
    found: Vector = state - np.frombuffer(bytes(values), np.float32) / np.float32(len(device.data))
    return found


def logits_of(model: Model, state: Vector, data: Digits) -> Floats:
    """Return the logits [n, 10] of the model at a state."""
    net = model.loaded(state).eval()
    with torch.no_grad():
        found: Floats = net(torch.tensor(data.images, dtype=torch.float32).view(-1, 1, 8, 8)).numpy()
    return found.astype(float)


def accuracy(model: Model, state: Vector, data: Digits) -> float:
    """Return the accuracy of the model at a state, in percent."""
    return float(100 * (logits_of(model, state, data).argmax(1) == data.labels).mean())
