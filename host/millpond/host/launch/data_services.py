# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets, threads): answers the scripts of a launch that ask for the data services of its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import MillpondError, ProtocolError, Refused, RemoteError
from millpond.base.text import printable
from millpond.host.fleet.device import Device
from millpond.host.launch.workers import START_SECONDS, LaunchWorker, Over
from millpond.host.records.failures import reason_of
from millpond.host.records.jobs import HOST
from millpond.host.workers.data_services import DataServices
from millpond.train.distributed.data_service_messages import FindData
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message


class DataRequests:
    """The requests for data of a launch's scripts, until the launch is ``over``."""

    def __init__(self, workers: Sequence[LaunchWorker], devices: Mapping[str, Device], over: Over) -> None:
        addresses = {each.name: each.launch.address for each in workers if each.name != HOST}
        code = next((each.launch for each in workers if each.launch.transforms), None)
        self._services = DataServices("launch", addresses, devices, over.add, code)

    def answer(self, asker: str, request: Message) -> Message:
        """Return the answer to a request of the worker ``asker``: DataFound or Failure. Raises ProtocolError
        for another request.
        """
        if not isinstance(request, FindData):
            raise ProtocolError(f"it sent '{request.NAME}' where a launched script asks for data")
        name = printable(request.device, 80)
        try:
            return self._services.find(asker, name)
        except Refused as error:
            return Failure(error.code, f"{name}: {printable(error.text)}")
        except (MillpondError, OSError) as error:
            return Failure("device", f"{name}: {printable(reason_of(error, name))}")

    def serve(self, asker: str, channel: Channel) -> None:
        """Answer a script on the host until it ends."""
        try:
            while True:
                answer = self.answer(asker, channel.receive(NEVER).message)
                channel.send(answer, Deadline.after(START_SECONDS))
        except (RemoteError, OSError):
            return  # the script has ended, which its own thread sees

    def close(self) -> None:
        """End the services."""
        self._services.close()
