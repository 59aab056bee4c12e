# SPDX-License-Identifier: Apache-2.0
"""Certificates of devices under an authority of this process, as ``millpond init`` gives them to a fleet."""

from __future__ import annotations

import functools
from pathlib import Path

from millpond.host.fleet.authority import Authority


@functools.cache
def authority() -> Authority:
    return Authority.make("millpond fleet of tests")


def issued(name: str, folder: Path) -> str:
    """Return the directory of the identity of a device, made in ``folder`` by the first call."""
    if not (folder / "cert.pem").exists():
        authority().issue(name, folder)
    return str(folder)
