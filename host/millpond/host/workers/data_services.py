# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets): the data services of devices, each started when its data are first asked for."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.host.fleet.device import Device
from millpond.train.distributed.data_service_messages import DataFound, DataServiceReady, StartDataService
from millpond.train.distributed.launch_messages import Launch
from millpond.wire.channel import Channel

START_SECONDS = 60.0


class DataServices:
    """The data services of the devices at ``addresses`` in their tunnels, of a launch or a job, ``owner``,
    until ``close``. ``held`` is told of each connection that holds a service. The services apply the
    transforms of ``code``, if there are such.
    """

    def __init__(
        self,
        owner: str,
        addresses: Mapping[str, str],
        devices: Mapping[str, Device],
        held: Callable[[Channel], None] = lambda _channel: None,
        code: Launch | None = None,
    ) -> None:
        self._owner, self._addresses, self._devices, self._note = owner, addresses, devices, held
        self._code = code
        self._lock, self._holding = threading.Lock(), threading.Lock()
        self._found: dict[str, tuple[DataFound, Channel]] = {}
        self._held: list[Channel] = []
        self._closed = False

    def find(self, asker: str, name: str) -> DataFound:
        """Return where the public data of device ``name`` are served; a service that has ended is started
        again. Raises Refused for a device that is no part of it, and for links that must be encrypted;
        RemoteError.
        """
        self._check(asker, name)
        with self._lock:
            if name in self._found and not self._found[name][1].is_quiet:
                del self._found[name]
            if name not in self._found:
                self._found[name] = self._start(name)
            return self._found[name][0]

    def _check(self, asker: str, name: str) -> None:
        if name not in self._addresses:
            known = ", ".join(self._addresses) or "none"
            raise Refused("", "unknown", f"no device of this {self._owner}, which has {known}")
        for each in (name, asker):
            if each in self._addresses and self._devices[each].config.encrypt == "always":
                text = f'the link of {each} has encrypt = "always", and streams are not encrypted yet'
                raise Refused("", "policy", text)

    def _start(self, name: str) -> tuple[DataFound, Channel]:
        """Have the agent start its service. Where that is, the host knows by itself, but for the port."""
        secret = secrets.token_hex(32)
        deadline = Deadline.after(START_SECONDS)
        control = self._devices[name].control(deadline)
        self._hold(control)
        self._note(control)
        with contextlib.ExitStack() as failed:
            failed.callback(control.close)
            ready = control.call(StartDataService(secret, self._code), DataServiceReady, deadline)
            if not 0 < ready.port < 1 << 16:
                raise ProtocolError(f"it listens at port {ready.port}")
            failed.pop_all()
        return DataFound(self._addresses[name], ready.port, secret), control

    def _hold(self, control: Channel) -> None:
        with self._holding:
            if not self._closed:
                self._held.append(control)
                return
        control.close()
        raise ConnectionLost(f"the {self._owner} has ended")

    def close(self) -> None:
        """End the services, also one that is being started."""
        with self._holding:
            self._closed = True
            held = tuple(self._held)
        for channel in held:
            channel.close()
