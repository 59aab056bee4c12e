# SPDX-License-Identifier: Apache-2.0
"""All jobs of a store, for tests that look at them."""

from __future__ import annotations

from millpond.host.records.jobs import JobRow
from millpond.host.store.store import Store


def jobs_of(store: Store) -> list[JobRow]:
    """Return the jobs of a store, oldest first, all of which can be read."""
    found = store.newest(1000, 1 << 62)
    return [row for row in found if isinstance(row, JobRow)]
