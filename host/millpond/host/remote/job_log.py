# SPDX-License-Identifier: Apache-2.0
"""Edge (SSH): a job's own log on a device, which no host but that of the device's owner can read.

It has the prints of the job's code, and whole tracebacks, whose messages can hold private data. So the agent
sends it to nobody: root of the device reads it, with the fleet's admin key.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from millpond.base.errors import LocalError, RemoteError
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.remote.errors import SshFailed
from millpond.host.remote.run_many import OutputLines, ParallelRun
from millpond.images.ondevice.sshd_config import ADMIN
from millpond.images.runtime.emulated import FLASH, IDENTITY
from millpond.train.job.log_name import log_name, run_name

_NO_FILE = 66
_SCRIPT = """\
flash=$(sed -n 's/^flash *= *"\\([^"]*\\)".*/\\1/p' {config} 2>/dev/null | head -n 1)
file=${{flash:-{flash}}}/private/.millpond-logs/{name}
[ -f "$file" ] || exit {no_file}
exec tail -n {lines} {follow} -- "$file"
"""


def is_of_launch(name: str) -> bool:
    """Return whether ``name`` is that of a launch's log: of a private one's script, ``launch-SCRIPT``, or of
    transforms, ``transforms-FILE``.
    """
    return name.startswith(("launch-", "transforms-")) and "/" not in name


def read(
    directory: Path, device: str, job: str, lines: int, *, follow: bool, authority: Path | None = None
) -> Iterator[str]:
    """Yield the last ``lines`` of the log of a job on a device, and with ``follow`` new ones without end.
    ``job`` is its number, or the name of a launch's log.

    Raises LocalError without the admin key, RemoteError without a log, and
    SshFailed without a connection.
    """
    with DaemonClient(directory, authority) as client:
        fleet = client.fleet
        fleet.device(device)
        info = None if is_of_launch(job) else client.job_info(int(job))
    name = log_name(info.name, run_name(info.id, info.created)) if info else f"{job}.log"
    place = f"{FLASH}/private/.millpond-logs/{name}"
    if not fleet.admin_key.exists():
        raise LocalError(
            f"{fleet.admin_key} is missing (--authority DIR names where it is kept), and "
            f"only root of {device} can read that log: there it is {place}"
        )
    words = {"config": f"{IDENTITY}/agent.toml", "flash": FLASH, "name": shlex.quote(name)}
    script = _SCRIPT.format(**words, no_file=_NO_FILE, lines=lines, follow="-F" if follow else "")
    complaint = ""
    run = ParallelRun(directory, script, ADMIN, None, capture=False, authority=authority)
    for event in run.follow({device: ""}):
        if isinstance(event, OutputLines):
            if event.is_error:
                complaint = event.lines[-1]
            else:
                yield from event.lines
        elif event.result.exit_code == _NO_FILE:
            raise RemoteError(f"{device} has no log of {f'job {job} ({info.name})' if info else job}")
        elif event.result.exit_code:
            reason = event.result.error.removeprefix(f"{device}: ") or complaint
            raise SshFailed(f"{device}: {reason}; on the device the log is {place}")
