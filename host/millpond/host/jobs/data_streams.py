# SPDX-License-Identifier: Apache-2.0
"""Edge: the streams of a job's public samples from the device where they lie to all other workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from millpond.data.streaming.relay import StreamRelay, relay_of
from millpond.host.jobs.context import JobContext, JobFailed
from millpond.host.records.jobs import HOST
from millpond.host.workers.data_services import DataServices
from millpond.train.job.spec import Job
from millpond.train.protocol import DataServicePlace, Folder


class DataStreams:
    """The streams of one job, or none where its samples are not streamed. The data service starts when the
    first worker needs it, and ends with ``close``, from any thread.
    """

    def __init__(self, job: Job, context: JobContext) -> None:
        self._job, self._context = job, context
        devices = context.devices if job.data.is_streamed else {}
        addresses = {name: context.fleet.addresses(name).device_ip for name in devices}
        self._services = DataServices("job", addresses, devices)
        self._lock, self._reachable = threading.Lock(), contextlib.ExitStack()
        self._closed = False

    def open(self) -> None:
        """Let the devices reach the one that has the data. Raises JobFailed, LocalError."""
        found = self._job.data.of_device
        if found and found.device not in self._context.devices:
            raise JobFailed(f"data.public: '{found.device}' is no device of this job")
        if self._job.data.is_streamed:
            with self._lock:
                if not self._closed:
                    self._reachable.enter_context(self._context.between(list(self._context.devices)))

    @property
    def folder(self) -> Folder:
        """The folder as other workers than that of its device have it."""
        found = self._job.data.of_device
        assert found  # only of streams
        return Folder(found.path, found.device, public=True, streamed=True)

    def place(self, asker: str, folders: Sequence[Folder]) -> DataServicePlace | None:
        """Return where a worker's streamed folder is served, None if it has none. Raises RemoteError."""
        for folder in folders:
            if folder.streamed:
                found = self._services.find(asker, folder.source)
                return DataServicePlace(found.address, found.port, found.secret)
        return None

    def relay(self, folders: Sequence[Folder]) -> StreamRelay | None:
        """Return what connects the host's worker to the data service. Raises RemoteError."""
        place = self.place(HOST, folders)
        if place is None:
            return None
        return relay_of(place, folders[0], self._job.work, lambda: None)

    def close(self) -> None:
        """End the data service, and what devices reach of each other."""
        self._services.close()
        with self._lock:
            self._closed = True
            self._reachable.close()
