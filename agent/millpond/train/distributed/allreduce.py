# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): the exact all-reduce of gradients over ranks with batches of different sizes.

The mean of means that DistributedDataParallel makes is wrong for batches of different sizes. Here each rank
gives *sums* to one exchange, which are divided once, by the samples of all or by what their losses count: a
step is exactly that of one process with all samples. With it go the batches and the seconds of all, so every
rank sees the same numbers and plans alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from millpond.base.errors import LocalError
from millpond.train import error_texts
from millpond.train.distributed.collectives import SLOTS, Collectives, ExchangeStep


class AllReduce:
    """Exchanges gradients between ranks, by their ``collectives``. At first all ranks get the ``model`` of
    rank 0. Gradients of a model on a GPU are exchanged by way of the host's memory. Raises LocalError for a
    model without parameters, for parameters that are not float32, and if the ranks have different models.
    """

    def __init__(self, model: nn.Module, collectives: Collectives) -> None:
        self._model, self._collectives = model, collectives
        self._parameters = _trained(model)
        sizes = [tensor.numel() for tensor in (*self._parameters, *self._statistics())]
        if len(set(collectives.gather(sum(sizes)))) > 1:
            raise LocalError(error_texts.UNLIKE_RANKS())
        self._vector = torch.zeros(sum(sizes) + SLOTS * collectives.ranks)
        self._parts = torch.split(self._vector[: sum(sizes)], sizes)
        with torch.no_grad():
            _share(collectives, [*model.parameters(), *model.buffers()])
        self._before = [tensor.clone() for tensor in self._statistics()]

    @torch.no_grad()
    def step(self, samples: int, count: int, seconds: float) -> ExchangeStep:
        """Exchange after ``backward`` of a loss that is a sum over ``samples``, which count ``count``: the
        gradients become those of the mean over all ranks' counts. A rank with 0 samples only takes part; its
        gradients do not count.
        """
        self._pack(samples, count)
        step = self._collectives.mean(self._vector, samples, count, seconds)
        self._unpack()
        return step

    def _pack(self, samples: int, count: int) -> None:
        self._vector.zero_()
        if samples:
            for part, parameter in zip(self._parts, self._parameters, strict=False):
                if parameter.grad is not None:
                    part.copy_(parameter.grad.reshape(-1))
            for part, tensor, before in self._changes():
                part.copy_((tensor - before).reshape(-1)).mul_(count)

    def _unpack(self) -> None:
        for part, parameter in zip(self._parts, self._parameters, strict=False):
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).to(parameter.device, copy=True)
            else:
                parameter.grad.copy_(part.view_as(parameter))
        for part, tensor, before in self._changes():
            before += part.view_as(before).to(before.device)
            tensor.copy_(before)

    def _changes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield of each running statistic its part of the vector, its present tensor, and its last value."""
        return zip(self._parts[len(self._parameters) :], self._statistics(), self._before, strict=True)

    def _statistics(self) -> list[Tensor]:
        return [tensor for tensor in self._model.buffers() if tensor.is_floating_point()]


def _share(collectives: Collectives, state: Sequence[Tensor]) -> None:
    """Give all ranks the tensors of rank 0."""
    given = [tensor.cpu() for tensor in state]  # the same tensor where it is on a CPU
    collectives.share(given)
    for tensor, shared in zip(state, given, strict=True):
        if shared is not tensor:
            tensor.copy_(shared)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not found:
        raise LocalError(error_texts.NO_PARAMETERS())
    for name, parameter in found:
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise LocalError(
                f"the model's parameter '{name}' is {dtype}, not float32; call .float() on the model"
            )
    return [parameter for _, parameter in found]
