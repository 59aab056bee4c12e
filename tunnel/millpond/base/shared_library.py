# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the C engines, shared libraries that a compiler built beside the modules that call them."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

from millpond.base.errors import LocalError

log = logging.getLogger(__name__)


def load(path: Path, version: int) -> ctypes.CDLL:
    """Return the library, whose ``engine_version()`` is to be ``version``. Raises LocalError."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LocalError(
            f"the C engine cannot be used: {error}: install millpond where there is a C compiler, or choose "
            "the Python engine"
        ) from None
    if library.engine_version() != version:
        raise LocalError("the C engine is of another version of millpond: install millpond again")
    return library


@functools.cache
def is_usable(path: Path, version: int) -> bool:
    """Return whether the library is built and loads; a warning in the log names the fault of a built one."""
    if not path.exists():
        return False
    try:
        load(path, version)
    except LocalError as error:  # built for another processor, or by another version
        log.warning("%s", error)
        return False
    return True
