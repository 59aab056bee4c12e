# SPDX-License-Identifier: Apache-2.0
"""Edge: raise the limit of open descriptors."""

from __future__ import annotations

import resource

FEW = 1024
"""With fewer, some devices and commands of a fleet may wait for others."""


def allow_most() -> int:
    """Raise the limit of open descriptors to the hard limit; returns that."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
