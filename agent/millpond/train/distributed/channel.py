# SPDX-License-Identifier: Apache-2.0
"""Edge (a socket): the collectives of a confined script, by its channel to the agent or host daemon."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.base.deadline import NEVER
from millpond.base.errors import LocalError
from millpond.train.distributed.collectives import SLOTS, ExchangeStep
from millpond.train.distributed.group_messages import (
    GROUP_CHANNEL,
    PART_BYTES,
    Contribution,
    Gather,
    Gathered,
    GroupJoined,
    GroupPart,
    JoinGroup,
    MeanOfStep,
    ReportedMetric,
    ReportMetric,
    SharedState,
    ShareState,
    parts,
)
from millpond.train.distributed.launch_messages import WORKER
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits


class ChannelCollectives:
    """The collectives of rank ``rank`` of ``ranks``, of one model of the script: its ``group``-th."""

    def __init__(self, channel: Channel, rank: int, ranks: int, group: int, least: tuple[int, ...]) -> None:
        self._channel, self._group = channel, group
        self.rank, self.ranks, self.least = rank, ranks, least
        self.source = os.environ.get(WORKER, "")

    def gather(self, value: int) -> tuple[int, ...]:
        """Return every rank's ``value``, by rank."""
        return self._channel.call(Gather(value), Gathered, NEVER).values

    def share(self, state: Sequence[Tensor]) -> None:
        """Overwrite the tensors by those of rank 0, all at once."""
        given = torch.cat([tensor.reshape(-1).clone().view(torch.uint8) for tensor in state])
        data = _bytes(given)
        self._channel.send(ShareState(len(data)), NEVER)
        if self.rank == 0:
            self._send(data)
        self._channel.expect(SharedState, NEVER)
        if self.rank:
            self._receive(data)
            sizes = [tensor.numel() * tensor.element_size() for tensor in state]
            for tensor, part in zip(state, torch.split(given, sizes), strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))  # a clone is aligned

    def mean(self, vector: Tensor, samples: int, count: int, seconds: float) -> ExchangeStep:
        """Replace sums by the mean over all ranks' counts."""
        values = vector[: len(vector) - SLOTS * self.ranks]
        largest = float(values.abs().max()) if samples else 0.0
        data = _bytes(values)
        self._channel.send(Contribution(self._group, len(values), samples, seconds, largest, count), NEVER)
        if samples:
            self._send(data)
        step = self._channel.expect(MeanOfStep, NEVER)
        self._receive(data)
        return ExchangeStep(step.samples, step.seconds)

    def add(self, name: str, total: float, samples: int) -> tuple[float, int]:
        """Return the sums of a metric's total, and of its samples, over all ranks."""
        found = self._channel.call(ReportMetric(name, total, samples), ReportedMetric, NEVER)
        return found.total, found.samples

    def _send(self, data: memoryview) -> None:
        for start, stop in parts(len(data)):
            self._channel.send(GroupPart(start), NEVER, data[start:stop])

    def _receive(self, data: memoryview) -> None:
        for start, stop in parts(len(data)):
            self._channel.expect(GroupPart, NEVER, stop - start)
            self._channel.receive_into(data[start:stop], NEVER)


def _bytes(tensor: Tensor) -> memoryview:
    found: np.ndarray[Any, Any] = tensor.numpy()
    return found.data.cast("B")


class GroupChannel:
    """The channel of this process, for all its models."""

    def __init__(self, descriptor: int, rank: int, ranks: int) -> None:
        sock = socket.socket(fileno=descriptor)
        self._channel = Channel(sock, "the launch", limits=Limits(payload=PART_BYTES))
        self._rank, self._ranks = rank, ranks
        self._groups = 0
        self._least = self._channel.call(JoinGroup(1), GroupJoined, NEVER).least

    def collectives(self) -> ChannelCollectives:
        """Return the collectives of the next model."""
        number, self._groups = self._groups, self._groups + 1
        return ChannelCollectives(self._channel, self._rank, self._ranks, number, self._least)


@functools.cache
def own_channel() -> GroupChannel | None:
    """Return this process's channel; None if it is no confined script. Raises LocalError, RemoteError."""
    descriptor = os.environ.get(GROUP_CHANNEL)
    if descriptor is None:
        return None
    try:
        numbers = int(descriptor), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise LocalError(f"{GROUP_CHANNEL}, RANK and WORLD_SIZE are set by 'millpond launch' alone") from None
    return GroupChannel(*numbers)
