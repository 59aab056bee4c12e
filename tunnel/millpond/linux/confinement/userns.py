"""Edge (/proc): the users of this user namespace."""

from __future__ import annotations

from pathlib import Path


def has_many_uids() -> bool:
    """Whether this user namespace can tell one user from another (more than one uid is mapped)."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return sum(int(line.split()[2]) for line in lines) > 1
