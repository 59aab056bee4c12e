# SPDX-License-Identifier: Apache-2.0
"""Edge: a reduction node on a device, started and reached through a control connection with its agent."""

from __future__ import annotations

import threading

from millpond.aggregate.messages import GetNodeTicket, NodeReady, SetPeers, StartNode
from millpond.base.deadline import Deadline
from millpond.host.fleet.device import Device
from millpond.wire.channel import Channel
from millpond.wire.control_messages import Ticket
from millpond.wire.messages import Ok


class NodeControl:
    """The node of ``device`` on one ``control`` connection, which may be used from several threads. All calls
    may raise RemoteError.
    """

    def __init__(self, device: Device, control: Channel) -> None:
        self._device, self._control = device, control
        self._lock = threading.Lock()

    def start(self, request: StartNode, deadline: Deadline) -> NodeReady:
        """Start the node, or another in its place."""
        with self._lock:
            return self._control.call(request, NodeReady, deadline)

    def allow(self, peers: SetPeers, deadline: Deadline) -> None:
        """Let the node connect to the peers alone, and answer requests of the parents alone."""
        with self._lock:
            self._control.call(peers, Ok, deadline)

    def connect(self, deadline: Deadline) -> Channel:
        """Return a new connection with the node, through the device's tunnel."""
        with self._lock:
            encrypted = self._device.config.encrypt == "always"
            ticket = self._control.call(GetNodeTicket(encrypted), Ticket, deadline)
        return self._device.bulk(ticket.token, ticket.tls, deadline)

    def close(self) -> None:
        """Close the control connection, which ends the node."""
        self._control.close()
