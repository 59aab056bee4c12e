# SPDX-License-Identifier: Apache-2.0
"""Edge: the daemon's answers to a program that orders the outer rounds of a resident job."""

from __future__ import annotations

import os
from functools import partial

import numpy as np

from millpond.aggregate.exact import all_finite
from millpond.aggregate.kernels import Vector
from millpond.base.deadline import Deadline
from millpond.base.errors import Refused
from millpond.base.sizes import SLOWEST
from millpond.host.api.daemon import LARGEST_NUMBER
from millpond.host.api.outer import GetOuterModel, OuterOrder
from millpond.host.jobs.outer.mailbox import Order, OuterMailbox
from millpond.host.jobs.service import JobService
from millpond.linux import sockets
from millpond.train.state import layout
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

REPLY_SECONDS = 10.0


class OuterRequests:
    """Answers about resident ``jobs``, to their owners, and to the daemon's own user, alone."""

    def __init__(self, jobs: JobService) -> None:
        self._jobs = jobs

    def get_model(self, client: Channel, request: GetOuterModel) -> None:
        """Send the OuterModel of a job, and a state. Raises Refused."""
        model, values = self._mailbox(client, request.job).model(partial(sockets.has_left, client.sock))
        _send(client, model, values)

    def order(self, client: Channel, request: OuterOrder) -> None:
        """Have an order carried out, and send its answer. Raises Refused."""
        try:
            mailbox = self._mailbox(client, request.job)
            model, _ = mailbox.model(partial(sockets.has_left, client.sock))
            end, size = layout.parameters_end(model.tensors), 4 * layout.size(model.tensors)
            if client.payload_left != size:
                raise Refused("", "size", f"a state of job {request.job} has {size} bytes")
            values = np.empty(size // 4, np.float32)
            client.receive_into(values.data, Deadline.after(REPLY_SECONDS + size / SLOWEST))
        finally:
            for _ in client.receive_parts(Deadline.after(REPLY_SECONDS + client.payload_left / SLOWEST)):
                pass  # the rest would be taken for the next message
        if not all_finite(values[:end]):
            raise Refused("", "values", f"'{request.key}': a parameter of the state is not finite")
        _send(
            client,
            *mailbox.ask(Order(request.kind, request.key, values), partial(sockets.has_left, client.sock)),
        )

    def _mailbox(self, client: Channel, job: int) -> OuterMailbox:
        user = sockets.peer_uid(client.sock)
        mailbox = self._jobs.outer.of(job)
        if user not in (0, os.geteuid(), self._jobs.record(job, LARGEST_NUMBER).info.owner):
            raise Refused("", "state", f"job {job} is another user's")
        return mailbox


def _send(client: Channel, message: Message, values: Vector) -> None:
    client.send(message, Deadline.after(REPLY_SECONDS + values.nbytes / SLOWEST), values.data)
