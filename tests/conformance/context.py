# SPDX-License-Identifier: Apache-2.0
"""Edge: the context that all parts of a run share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from conformance import places
from conformance.results import Entry

Update = Callable[[Sequence[Entry]], None]
"""What a part has to say so far."""

OWN_FILES = "host_own"
HOSTS = {"host": True, OWN_FILES: False}
"""The host's mounts, and whether their server gives new files away."""

EXERCISED = ("device", *HOSTS)


@dataclass(frozen=True, slots=True)
class Context:
    """A volume's directory on a file system of this ``kind``, and room beside it."""

    arguments: argparse.Namespace
    scratch: Path
    flash: Path
    kind: str
    began: float = field(default_factory=time.monotonic)

    def say(self, line: str) -> None:
        """To who watches."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", flush=True)

    def mounted(self, mount: str, point: Path) -> AbstractContextManager[str]:
        """One of the mounts; how it says that it works."""
        point.mkdir(exist_ok=True)
        if mount in HOSTS:
            return places.host(self.flash, point, self.scratch / "socket", gives_away=HOSTS[mount])
        return places.device(self.flash, point, "fuse-python" if mount == "device_fusepython" else "raw")
