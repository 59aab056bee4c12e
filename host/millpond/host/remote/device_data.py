# SPDX-License-Identifier: Apache-2.0
"""Edge: the data of a device: its public part, mounted for a while, and a check of a private folder."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from millpond.base.errors import LocalError, MillpondError, RemoteError
from millpond.fs.fuse.mounts import top_mount, unmount
from millpond.host.api.daemon import JobInfo, PreparedWorker
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import mounts
from millpond.host.records.failures import HIDDEN
from millpond.host.terminal.job_clock import JobClock
from millpond.train.job.spec import FederatedSpec, Job


@contextlib.contextmanager
def mounted(fleet: Path, device: str) -> Iterator[Path]:
    """Mount a device's volume for as long as the context lasts. Raises LocalError, RemoteError."""
    place = Path(tempfile.mkdtemp(prefix="millpond-")).resolve()
    argv = [*mounts.command(fleet.absolute(), device, place), "--die-with-parent"]
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            if fault := mounts.fault_of(process):
                raise (LocalError if process.returncode == 2 else RemoteError)(fault)
            yield place
        finally:
            mounts.end(process)
    finally:
        if top_mount(place)[0]:  # of a mounter that was killed
            unmount(place)
        with contextlib.suppress(OSError):
            place.rmdir()  # never with what is below: if it is mounted still, that is the device's


def looking_at(job: Job, device: str, folder: str) -> Job:
    """Return ``job`` with a device's private ``folder`` alone and without rounds: its worker is prepared, as
    for training, and the job ends.
    """
    evaluate = replace(
        job.evaluate,
        on=tuple(place for place in job.evaluate.on if place == "devices"),
        target=None,
        patience=None,
    )
    return replace(
        job,
        data=replace(job.data, private=folder, public=None, test=""),
        devices=(device,),
        synchronous=None,
        federated=FederatedSpec(rounds=0),
        evaluate=evaluate,
    )


def prepare(
    fleet: Path,
    job: Job,
    code: Mapping[str, Path],
    waits: Callable[[str], None],
    tell: Callable[[str], None] = lambda _: None,
) -> PreparedWorker:
    """Run a job of ``looking_at``. ``waits`` gets what the job waits for, ``tell`` how far it is. Raises
    LocalError with the reason for which a worker would refuse the folder.
    """
    with DaemonClient(fleet) as client:
        number = client.submit(job, code)
        try:
            info = _wait(client, number, waits, tell)
        except BaseException:  # Ctrl-C: nobody is there for its answer
            with contextlib.suppress(MillpondError), DaemonClient(fleet) as other:
                other.stop(number)
            raise
        found = client.prepared(number) if info.state == "done" else None
        if HIDDEN not in info.error:  # else the job's log is asked for
            client.forget_job(number)  # the check was not to train
    if not found:
        raise LocalError(info.error or f"job {number} was stopped")
    return found.workers[job.devices[0]]


def _wait(
    client: DaemonClient, number: int, waits: Callable[[str], None], tell: Callable[[str], None]
) -> JobInfo:
    """Return how the job ended."""
    reason, info, clock = "", client.job_info(number), JobClock()
    for progress in client.watch(number):
        info = progress.info
        if info.reason != reason and (reason := info.reason):
            waits(f"job {number} is queued: {reason}")
        if text := clock.told(info, (), 0.0):
            tell(text)
    return info
