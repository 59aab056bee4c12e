# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): a data service on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(folder: str | Path, *options: str) -> Iterator[str]:
    """Serve a folder until the end of the block. Yields the service's address."""
    with service_of(folder, *options) as (address, _):
        yield address


@contextmanager
def service_of(folder: str | Path, *options: str) -> Iterator[tuple[str, int]]:
    """Serve a folder until the end of the block. Yields the service's address, and its process."""
    argv = [sys.executable, "-m", "millpond.data.streaming", str(folder), *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout
            yield service.stdout.readline().split()[-1], service.pid
        finally:
            service.terminate()
