# SPDX-License-Identifier: Apache-2.0
"""Pure: the bytes of a model's weights and of the data between its layers, and its multiply-adds.

FireCaffe (Iandola et al. 2015, section 3) chooses by them how to train in parallel: workers that each have a
part of the batch exchange the weights' gradients, workers that each have a part of the model the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

_BYTES = 4
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(slots=True)
class Volumes:
    """Volumes of a model: the bytes of its ``weights``; for all samples that have passed it, the bytes of
    ``data`` and the ``multiply_adds`` of the forward pass; of a layer that is used twice, both.
    """

    weights: int
    data: int = 0
    multiply_adds: int = 0


@contextmanager
def watched(model: nn.Module) -> Iterator[Volumes]:
    """Yield the volumes of a model, to which each forward pass inside the context adds.

    ``weights`` is FireCaffe's equation 1, ``|W|``, with the biases and whatever else is trained. ``data`` is
    its ``|D|``: the inputs of all convolutions and fully connected layers, 4 bytes a value. Equation 2 as
    printed multiplies channels by filters, which no layer keeps; the values of table 1 are sums of inputs.
    """
    found = Volumes(_BYTES * sum(parameter.numel() for parameter in model.parameters()))

    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer.weight, Tensor)
        found.data += _BYTES * inputs[0].numel()
        found.multiply_adds += output.numel() * layer.weight[0].numel()

    layers = [layer for layer in model.modules() if isinstance(layer, (*_CONVOLUTIONS, nn.Linear))]
    hooks = [layer.register_forward_hook(add) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
