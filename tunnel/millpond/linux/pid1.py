# SPDX-License-Identifier: Apache-2.0
"""Edge: reap orphaned processes, as PID 1 must."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container


def reap_orphans(own: Container[int]) -> None:
    """Reap dead processes that others have orphaned, but none of ``own``, which their starters wait for."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in own:
                return
            os.waitpid(found.si_pid, 0)
