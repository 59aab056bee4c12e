# SPDX-License-Identifier: Apache-2.0
"""Edge: starts workers, as forks of a zygote that has loaded torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.logs import BoundedLog
from millpond.linux.zygote.client import Child, Zygote


def workers_zygote(idle: float) -> Zygote:
    """The zygote of all workers of a daemon. It keeps torch for ``idle`` seconds after the last of them."""
    return Zygote("millpond.train.worker.process", "millpond.train.worker.preloaded", idle=idle)


def start_worker(
    zygote: Zygote, sandbox: Sandbox, log: Path, channel: int, shared: Sequence[int], *options: str
) -> Child:
    """Start a worker on its end of a channel and its two shared memories. Raises OSError."""
    arguments = ["3", "--shared", "4", "5", *options]
    output = BoundedLog(log)
    try:
        return zygote.start(sandbox, arguments, [channel, *shared], output.writer)
    finally:
        output.close_writer()
