# SPDX-License-Identifier: Apache-2.0
"""Pure: failures of a job by a lack on the host that passes: of disk, descriptors, threads, a lock."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator

_LACKS = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
_DATABASE_LACKS = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
}


def is_lack(error: BaseException) -> bool:
    """Return whether the cause of an error is such a lack: the same work may succeed later."""
    return any(map(_lacks, _causes(error)))


def _lacks(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        code: int = getattr(error, "sqlite_errorcode", 0)  # of the library itself alone
        return code & 0xFF in _DATABASE_LACKS
    if isinstance(error, OSError):
        return error.errno in _LACKS
    return isinstance(error, RuntimeError) and "start new thread" in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__
