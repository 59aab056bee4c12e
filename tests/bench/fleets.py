# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): the fleet that exchanges are measured on, and its jobs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.experiment import Unmeasured
from job_files import written
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import Fleet
from system.support import START_SECONDS, Emulation, create, why_not

IDLE_MODEL = """\
from millpond.train.zoo.models import cifar_cnn
from torch import nn


class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = cifar_cnn()

    def forward(self, images):
        return images.flatten(1)[:, :10] * self.cnn[-1].bias
"""
"""A model of 2,029,642 values that takes next to no time, the file ``idle.py``."""


@contextmanager
def running(
    devices: Sequence[str],
    *,
    searched: bool,
    lan: bool = False,
    before: Callable[[Fleet], None] = lambda _: None,
) -> Iterator[Emulation]:
    """A running fleet: with a canary and a tracer for agents to search for, or without, as fleets are by
    themselves. What a peer sends is never searched. With a ``lan`` the devices have one of their own.
    ``before`` is called before it starts. Raises Unmeasured where there can be no fleet.
    """
    if complaint := why_not():
        raise Unmeasured(f"no fleet: {complaint}")
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as name:
        emulation = create(Path(name), devices, lan=lan)
        if not searched:
            for device in devices:
                provisioning.write_agent_config(emulation.fleet, device, {})
        before(emulation.fleet)
        try:
            emulation.start()
            emulation.wait_ready(max(START_SECONDS, 5.0 * len(devices)))
            yield emulation
        finally:
            emulation.stop()


def trained(fleet: Emulation, name: str, files: Mapping[str, str], workers: Sequence[str] = ()) -> list[Any]:
    """Run the job of ``job.toml``, one of the ``files``, and return its rounds or epochs. Raises RuntimeError
    unless it ends well, with all of ``workers`` in each.
    """
    folder = written(dict(files), fleet.base / name)
    info, rounds = fleet.wait_for_end(fleet.submit(folder / "job.toml"))
    if info.state != "done" or (workers and any(set(each.workers) != set(workers) for each in rounds)):
        raise RuntimeError(f"the job is {info.state}: {info.error}")
    return list(rounds)
