# SPDX-License-Identifier: Apache-2.0
"""Pure: means of states where lost datagrams are not sent again (Shibahara, Koibuchi, Matsutani 2023,
sections 3.1 and 3.2.2).

Clients average their states, not what changed in them. Where a part of the mean does not come, a client keeps
its own value, and the next mean replaces that. A mean of differences could not do so: a client that has
missed one would be apart from all others for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from millpond.aggregate.messages import Ranges
from millpond.aggregate.topology import ranges
from millpond.base.errors import ProtocolError

Vector = NDArray[np.float32]
BOUND = 65536.0
"""The largest value per sample of an update that counts."""


def state_after(update: Vector, state: Vector, weight: float, added: Ranges) -> float:
    """Make of ``update``, the differences from ``state`` times ``weight``, the state after it times
    ``weight``, in place. Differences are subtracted from a state, but those of ``added`` are added. Returns
    the largest absolute value. Raises ProtocolError if a value is not finite.
    """
    np.negative(update, out=update)
    for start, stop in added:
        np.negative(update[start:stop], out=update[start:stop])
    largest = 0.0
    for start, stop in ranges(0, len(update)):
        update[start:stop] += np.float32(weight) * state[start:stop]
        largest = max(largest, float(np.abs(update[start:stop]).max()))
    if not math.isfinite(largest):
        raise ProtocolError("without repair a state has finite values alone")
    return largest


def difference(mean: Vector, state: Vector, added: Ranges) -> None:
    """Make of a ``mean`` of states the difference of ``state`` from it, in place: the inverse of
    ``state_after`` with a weight of 1.
    """
    np.subtract(state, mean, out=mean)
    for start, stop in added:
        np.negative(mean[start:stop], out=mean[start:stop])


def most_of(weights: Mapping[str, float], root: str, largest: float, name: str) -> float:
    """Return the most that a node's state times its weight may have where that of the ``root`` has at most
    ``largest``: the states of two nodes differ by no more than their updates lead to. One that could announce
    any bound would set the unit of the sum, and the values of all others would be rounded to 0.
    """
    return weights[name] * (largest / weights[root] + 2 * BOUND)
