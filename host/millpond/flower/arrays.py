# SPDX-License-Identifier: Apache-2.0
"""Edge (flwr): a state of a model as Flower's arrays, and back."""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord

from millpond.aggregate.kernels import Vector
from millpond.base.errors import ProtocolError
from millpond.train.state import layout
from millpond.train.state.layout import Tensor


def arrays_of(tensors: tuple[Tensor, ...], state: Vector) -> ArrayRecord:
    """Return a state, float32 [size], as an array for each tensor, in float32."""
    found = ((tensor, state[span]) for tensor, span in layout.spans(tensors))
    return ArrayRecord(
        {
            tensor.name: Array(values if layout.raw_type(tensor.dtype) else values.reshape(tensor.shape))
            for tensor, values in found
        }
    )


def state_of(tensors: tuple[Tensor, ...], arrays: ArrayRecord) -> Vector:
    """Return the state, float32 [size], of arrays by name. Raises ProtocolError for another model's."""
    state = np.empty(layout.size(tensors), np.float32)
    if set(arrays) != {tensor.name for tensor in tensors}:
        raise ProtocolError("the server's arrays are not those of this fleet's model")
    for tensor, span in layout.spans(tensors):
        values = arrays[tensor.name].numpy()
        if values.size != span.stop - span.start:
            raise ProtocolError(f"the server's array '{tensor.name}' has {values.size} values")
        state[span] = values.reshape(-1)
    return state


def buffers_of(tensors: tuple[Tensor, ...]) -> list[str]:
    """Return the names of the buffers."""
    return [tensor.name for tensor in tensors if tensor.buffer]
