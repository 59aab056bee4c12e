# SPDX-License-Identifier: Apache-2.0
"""Edge: the client of a resident job: orders its outer rounds over the daemon's Unix socket."""

from __future__ import annotations

import numpy as np

from millpond.aggregate.kernels import Vector
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ProtocolError
from millpond.base.sizes import SLOWEST
from millpond.host.api.outer import GetOuterModel, OrderKind, OuterAnswer, OuterModel, OuterOrder
from millpond.host.client.connection import ANSWER_SECONDS
from millpond.host.client.daemon_client import DaemonClient
from millpond.train.state import layout
from millpond.wire.framing import Limits

MOST_BYTES = 1 << 34


class OuterClient(DaemonClient):
    """A connection to the daemon of a fleet with resident jobs. Raises LocalError where none runs."""

    LIMITS = Limits(head=64 << 20, payload=MOST_BYTES)

    def outer_model(self, job: int) -> tuple[OuterModel, Vector]:
        """Return the layout of a resident job's model, and a state of it, float32 [size]. Waits until the job
        has begun. Raises Refused when it ends before.
        """
        with self._told_truly():
            self._channel.send(GetOuterModel(job), self._deadline)
            model = self._channel.expect(OuterModel, NEVER, None)
        return model, self._values(layout.size(model.tensors))

    def outer_round(self, job: int, kind: OrderKind, key: str, state: Vector) -> tuple[OuterAnswer, Vector]:
        """Give an order with a ``state``, float32 [size], and return its answer: after "train" the changes of
        the parameters, and behind them the buffers, float32 [size], else no values. An order that was given
        before, with the same kind and ``key``, is not carried out again. Raises Refused when the job ends.
        """
        deadline = Deadline.after(ANSWER_SECONDS + state.nbytes / SLOWEST)
        with self._told_truly():
            self._channel.send(OuterOrder(job, kind, key), deadline, np.ascontiguousarray(state).data)
            answer = self._channel.expect(OuterAnswer, NEVER, None)
        return answer, self._values(len(state) if kind == "train" else 0)

    def _values(self, size: int) -> Vector:
        if self._channel.payload_left != 4 * size:
            raise ProtocolError(
                f"the host daemon sent {self._channel.payload_left} bytes of a model of {4 * size}"
            )
        values = np.empty(size, np.float32)
        with self._told_truly():
            self._channel.receive_into(values.data, Deadline.after(ANSWER_SECONDS + 4 * size / SLOWEST))
        return values
