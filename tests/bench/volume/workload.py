# SPDX-License-Identifier: Apache-2.0
"""Pure: defines a workload on a mount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.volume.route import Mount


@dataclass(frozen=True, slots=True)
class Done:
    """``amount`` is in what the workload counts in, ``cpu`` the seconds of whoever used the mount. Of files'
    bytes at least ``fetched`` came over the link, and at least ``sent`` went.
    """

    amount: float
    seconds: float
    cpu: float
    fetched: int = 0
    sent: int = 0


class Workload(Protocol):
    """``counts`` is "MiB" or "operation". ``check`` and ``work`` raise RouteFailed."""

    @property
    def counts(self) -> str:
        """What its amount is a number of."""
        ...

    def prepare(self, mount: Mount, repeat: int) -> None:
        """What is not measured but has to be there."""
        ...

    def work(self, mount: Mount, repeat: int) -> Done:
        """What is measured."""
        ...

    def check(self, mount: Mount, repeat: int) -> None:
        """See whether it did to the files themselves what it seemed to do; clean up."""
        ...
