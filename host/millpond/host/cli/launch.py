# SPDX-License-Identifier: Apache-2.0
"""Edge: the 'launch' command: reads the script's files, prints the output of the workers."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.api.launch import LaunchEnded, LaunchOutput, StartLaunch
from millpond.host.client import DaemonClient
from millpond.host.terminal import tables
from millpond.wire.launch_messages import check_files

MOST_LINES = 100_000
"""Lines of output in a JSON document: the last ones."""


def request(
    script: Path, arguments: Sequence[str], files: Sequence[Path], devices: str, *, host: bool
) -> StartLaunch:
    """Return the request for the daemon. Raises LocalError for files that cannot be sent."""
    found: dict[str, bytes] = {}
    for path in (script, *files):
        if path.name in found:
            raise LocalError(f"two files are named '{path.name}'")
        found[path.name] = path.read_bytes()
    check_files(script.name, found)
    names = tuple(name.strip() for name in devices.split(",") if name.strip())
    return StartLaunch(script.name, tuple(arguments), found, names, host)


def show(client: DaemonClient, start: StartLaunch, *, as_json: bool) -> LaunchEnded:
    """Print lines as they come, each with its worker's name; or, as JSON, one document at the end."""
    lines: deque[dict[str, str]] = deque(maxlen=MOST_LINES)
    for event in client.launch(start):
        if isinstance(event, LaunchOutput):
            if as_json:
                lines += ({"worker": event.worker, "line": line} for line in event.lines)
            else:
                print("\n".join(f"[{event.worker}] {line}" for line in event.lines))
                sys.stdout.flush()
        elif as_json:
            ended = {"error": event.error, "seconds": event.seconds}
            tables.print_json({"workers": event.workers, **ended, "lines": list(lines)})
        if isinstance(event, LaunchEnded):
            return event
    raise AssertionError("a launch without an end")
