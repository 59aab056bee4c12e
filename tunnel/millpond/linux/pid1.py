"""Edge: what every PID 1 must do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container


def reap_orphans(own: Container[int]) -> None:
    """Collect dead processes that others have left behind, never those in ``own``, which are waited for."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in own:
                return
            os.waitpid(found.si_pid, 0)
