# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): what the attacks are at: devices that answer as the agent does, in this process.

The rules of the policy, local training, the release buffer, clipping, rounding and masks are the product's
own, in the order of ``millpond.agent.job_worker``; left out are the worker's process, its sandbox and the
network, through which no attack of this benchmark goes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from bench.privacy.measures import Floats
from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.node.masked_update import MaskedUpdates
from millpond.agent.node.release import ReleaseBuffer
from millpond.agent.policy.rules import ExchangeGuard, StateAnswers, check_job
from millpond.agent.policy.settings import Policy
from millpond.aggregate.exact import scale_of
from millpond.aggregate.masking import fixed_point
from millpond.aggregate.masking.exchange import MaskedExchange
from millpond.aggregate.masking.messages import Agreed, Offered, OffersTaken, Shares
from millpond.aggregate.masking.stream import MaskedVector
from millpond.host.fleet.authority import Authority
from millpond.host.workers.masked_reduction import fresh_session
from millpond.privacy.accounting import sigma_of_sum
from millpond.privacy.discrete_gaussian import discrete_gaussian
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.local.local_trainer import LocalTrainer
from millpond.train.local.selection import SampleFolders
from millpond.train.protocol import Folder, PrepareWorker, Update, Work
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.task import Task
from millpond.train.update_bounds import UpdateBounds

Vector = NDArray[np.float32]
Maker = Callable[[], nn.Module]

PIXELS, CLASSES, GROUP = 64, 10, Policy().least_samples
CLIP, RATE = 1.0, 0.1
_NOISY_BITS = 21
"""By so many bits less are values rounded that get noise: the units of the noise are whole."""
IMAGES_FOLDER = "private/digits"


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits of 8x8 pixels within 0 and 1: ``images`` float64 [n, 64], and their ``labels``."""

    images: Floats
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, places: slice | NDArray[np.int64]) -> Digits:
        """Return the samples at ``places``."""
        return Digits(self.images[places], self.labels[places])


def digits(seed: int) -> Digits:
    """Return all 1,797 digits, in an order of this seed."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    return Digits(images[order] / 16.0, labels[order].astype(np.int64))


class DigitsTask:
    """A task on images float32 [n, 1, 8, 8] of the model that ``make`` makes."""

    def __init__(self, make: Maker) -> None:
        self.model = make

    def dataset(self, _folder: Path, _split: str) -> TensorDataset:
        """Return no samples: devices have theirs in memory."""
        return TensorDataset(torch.empty(0))


def samples_of(data: Digits) -> TensorDataset:
    """Return digits as the task's samples."""
    images = torch.tensor(data.images, dtype=torch.float32).view(-1, 1, 8, 8)
    return TensorDataset(images, torch.from_numpy(data.labels))


class Model:
    """The model of a job, which its devices train in turn in this process, and its first state."""

    def __init__(self, make: Maker, seed: int) -> None:
        torch.manual_seed(seed)
        self.task = Task(DigitsTask(make))
        self.parameters = FlatParameters(self.task.model())
        self.first = self.parameters.state.copy()

    def loaded(self, state: Vector) -> nn.Module:
        """Return the model with the values of a state."""
        self.parameters.load(state.copy())
        return self.parameters.model


def steps_work() -> WorkSpec:
    """Return the work of a synchronous step: answers are sums of gradients."""
    return WorkSpec("attack", ModelSpec("net"))


def rounds_work(
    passes: int = 1, batch: int = 0, *, secure: bool = False, rate: float = RATE, clip: float = CLIP
) -> WorkSpec:
    """Return the work of a round: answers are differences, of one step with a ``batch`` of 0. Those that are
    ``secure`` are clipped.
    """
    own = OptimizerSpec("sgd", rate)
    return WorkSpec(
        "attack",
        ModelSpec("net"),
        optimizer=own,
        passes=passes,
        batch=batch,
        secure="cohort" if secure else "",
        clip=clip if secure else 0.0,
    )


class TargetDevice:
    """A device with private samples ``data``, and its agent's state in ``folder``."""

    def __init__(
        self,
        name: str,
        data: Digits,
        model: Model,
        work: WorkSpec,
        folder: Path,
        policy: Policy | None = None,
    ) -> None:
        policy = policy or Policy()
        self.name, self.data, self._parameters = name, data, model.parameters
        self.clip = work.clip
        state = folder / name
        state.mkdir(parents=True, exist_ok=True)
        _authority().issue(name, state)
        link = LinkConfig("10.77.0.2/30", "socket")
        config = AgentConfig(name, link, state=str(state), identity=str(state), policy=policy)
        shown = Folder(IMAGES_FOLDER, name, group=policy.least_samples)
        request = PrepareWorker(work, name, (shown,), {}, model.parameters.tensors)
        check_job(policy, name, request)
        self._seed, self._group = work.seed, policy.least_samples
        own = SampleFolders(model.task, work.seed, [shown], [samples_of(data)], work.held_out)
        self._trainer = LocalTrainer(model.parameters, model.task, own, work)
        answers = StateAnswers(policy.answers_per_state)
        self._guard = ExchangeGuard(policy, answers, (shown,), own.counts, own.held, whole=bool(work.secure))
        self.masked = MaskedUpdates(config, request, len(model.first)) if work.secure else None
        self.size = len(model.first)
        size = 4 * self.size
        released = self.masked.bytes if self.masked else size
        self._release, self._sent = ReleaseBuffer(name, released, self.size), size

    def answer(self, request: Work, state: Vector) -> tuple[Update, memoryview]:
        """Return what leaves for a request: the head of an update, and its bytes. Raises Refused."""
        self._guard.check(request, memoryview(state.tobytes()))
        if self.masked:
            self.masked.begin(request, memoryview(state.tobytes()))
        update = self._trainer.run(request, state.copy())
        assert not UpdateBounds().refusal(request, update)
        values = memoryview(self._parameters.sums.tobytes())
        if masked := self.masked:
            update = self._release.fill(
                request.exchange, lambda out: masked.write(update, request, values, out)
            )
            self._sent = masked.written
        else:
            self._release.release(request.exchange, values)
        return update, self._release.part(0, self._sent)

    def covered(self, request: Work) -> Digits:
        """Return the samples that a request is about, which an attack is not told."""
        own = order(len(self.data), self._seed, request.epoch, self.name, False, self._group)
        return self.data.part(np.concatenate([own[start:stop] for start, stop in request.ranges[0]]))


def request_of(*ranges: tuple[int, int], epoch: int = 0, exchange: int = 1) -> Work:
    """Return the request about these positions of the one folder of a device."""
    own: Ranges = tuple(ranges)
    return Work(exchange, 0, epoch, (own,))


def sum_of(
    devices: Sequence[TargetDevice],
    requests: Mapping[str, Work],
    states: Mapping[str, Vector],
    rho: float = 0.0,
) -> Floats:
    """Return what a host has of an exchange with ``devices``: in a job with masks their sum, else the sum of
    the updates that it has one by one. With ``rho`` each device adds its share of noise (Kairouz et al. 2021,
    arXiv:2102.06387), so that the sum costs so much about each device. Raises what a device refuses.
    """
    if not devices[0].masked:
        answers = (device.answer(requests[device.name], states[device.name]) for device in devices)
        found: Floats = np.sum([np.frombuffer(values, np.float32).astype(float) for _, values in answers], 0)
        return found
    host, most = _begun(devices), devices[0].clip * max(request.samples for request in requests.values())
    scale = scale_of(most, len(devices)) / (2.0**_NOISY_BITS if rho else 1.0)
    _deal(host, devices, scale)
    total = MaskedVector(size := devices[0].size, 64)
    for device in devices:
        _, values = device.answer(requests[device.name], states[device.name])
        total.add(MaskedVector(size, 64, values))
        if rho:  # masked words and noise add up in any order
            sigma = sigma_of_sum(rho, most * scale, len(devices), size)
            total.values += discrete_gaussian(sigma, size, os.urandom).view(np.uint64)
    return _unmasked(host, devices, total, scale)


@functools.cache
def _authority() -> Authority:
    return Authority.make("millpond fleet")


def _begun(devices: Sequence[TargetDevice]) -> MaskedExchange:
    members = {device.name: device.masked.member for device in devices if device.masked}
    certificates = {name: one.certificate for name, one in members.items()}
    host = MaskedExchange({name: one.public for name, one in members.items()}, fresh_session(), certificates)
    for device in devices:
        assert device.masked
        offer = device.masked.answer(host.opening())
        assert isinstance(offer, Offered) and not host.offered(device.name, offer)
    return host


def _deal(host: MaskedExchange, devices: Sequence[TargetDevice], scale: float) -> None:
    """Give each device the offers of all, and the scale of the values."""
    dealing = host.dealing(scale)
    for device in devices:
        assert device.masked
        taken = device.masked.answer(dealing[device.name])
        assert isinstance(taken, OffersTaken)
        host.taken(device.name, taken)
    host.handing()


def _unmasked(
    host: MaskedExchange, devices: Sequence[TargetDevice], total: MaskedVector, scale: float
) -> Floats:
    request = host.agreeing([device.name for device in devices])
    for device in devices:
        assert device.masked
        agreed = device.masked.answer(request)
        assert isinstance(agreed, Agreed)
        host.agreed(device.name, agreed)
    asked = host.unmasking()
    for device in devices:
        assert device.masked
        shares = device.masked.answer(asked[device.name])
        assert isinstance(shares, Shares) and not host.shared(device.name, shares)
    total.add_masks(list(host.masks()))
    found = np.empty(devices[0].size, np.float32)
    fixed_point.divide(total, scale, 1.0, found)
    return found.astype(float)
