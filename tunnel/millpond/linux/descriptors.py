"""Edge: how many descriptors a process may have."""

from __future__ import annotations

import resource


def allow_most() -> int:
    """Let this process have as many as its hard limit says; how many that is."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
