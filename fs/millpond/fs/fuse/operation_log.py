# SPDX-License-Identifier: Apache-2.0
"""Edge (the log, the clock): counts the operations of a mount, and logs those that fail or take long.

A program often does not say which of its operations failed, and never why: EIO, ETIMEDOUT and ESTALE have a
cause below, which is lost when the errno is sent. Each of them is a line in the mount's log.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from millpond.fs.fuse.abi import Code, Header
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.latencies import Latencies
from millpond.fs.vfs.operation import current
from millpond.fs.vfs.path_api import causes

log = logging.getLogger(__name__)
SLOW_SECONDS: Final = 10.0
_FAILURES = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE})
_MOST_LINES, _PERIOD_SECONDS = 20, 10.0


class OperationLog:
    """The operations of one mount: ``latencies`` by operation, ``errors`` by operation and errno. ``path_of``
    names a file for the log. Threads may call at once.
    """

    def __init__(
        self, path_of: Callable[[Node], str] = str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.latencies, self.errors = Latencies(), Counter[tuple[str, str]]()
        self._path_of, self._clock = path_of, clock
        self._lock = threading.Lock()
        self._period, self._lines, self._left_out = 0.0, 0, 0

    def answered(self, header: Header, code: int, began: float, cause: BaseException | None = None) -> None:
        """Record that an operation has been answered with this errno, 0 for success. It ``began`` then,
        unless the kernel's request had waited before.
        """
        if (operation := current.get()) and operation.began:
            began = operation.began
        seconds, name = self._clock() - began, header.code.name.lower() if header.code else "unknown"
        self.latencies.add(name, seconds)
        if not code and seconds < SLOW_SECONDS:
            return
        error = errno.errorcode.get(code, str(code)) if code else ""
        if code:
            with self._lock:
                self.errors[name, error] += 1
        # the kernel itself looks a name up again that has come to exist while it was made
        is_failure = code in _FAILURES and (code, header.code) != (errno.ESTALE, Code.CREATE)
        if is_failure or seconds >= SLOW_SECONDS:
            self._log(header, f"{name} of {self._named(header.node)}", error, seconds, cause)

    def _named(self, node: int) -> str:
        try:
            return repr(self._path_of(Node(node)))
        except OSError:
            return f"node {node}"

    def _log(
        self, header: Header, what: str, error: str, seconds: float, cause: BaseException | None
    ) -> None:
        if not self._may_log():
            return
        outcome = f"{error}, {causes(cause)}" if error else "it succeeded"
        level = logging.ERROR if error else logging.WARNING
        log.log(level, "%s by process %d: %s, after %.3g s", what, header.pid, outcome, seconds)

    def _may_log(self) -> bool:
        """Return whether there may be another line now; log how many were left out before."""
        with self._lock:
            now, left_out = self._clock(), 0
            if now >= self._period + _PERIOD_SECONDS:
                self._period, self._lines = now, 0
                left_out, self._left_out = self._left_out, 0
            self._lines += 1
            may = self._lines <= _MOST_LINES
            self._left_out += not may
        if left_out:
            log.warning("%d more operations failed or took long", left_out)
        return may
