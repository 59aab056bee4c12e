# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): the fleet that exchanges are measured on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millpond.host.fleet import provisioning
from system.support import Emulation, create


@contextmanager
def running(devices: Sequence[str], *, searched: bool, lan: bool = False) -> Iterator[Emulation]:
    """A running fleet: with a canary and a tracer for agents to search for, or without, as fleets are by
    themselves. What a peer sends is never searched. With a ``lan`` the devices have one of their own.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as name:
        emulation = create(Path(name), devices, lan=lan)
        if not searched:
            for device in devices:
                provisioning.write_agent_config(emulation.fleet, device, {})
        try:
            emulation.start()
            emulation.wait_ready()
            yield emulation
        finally:
            emulation.stop()
