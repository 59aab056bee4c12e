# SPDX-License-Identifier: Apache-2.0
"""Pure: the error of samples that cannot be used, and the part of its text that may leave a device."""

from __future__ import annotations

import errno
from pathlib import Path

from millpond.base.errors import LocalError

TRANSIENT = (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE, errno.EIO, errno.ETIMEDOUT)
"""Errors of the operating system that another try may mend, as when a mount was lost."""
_USUAL = ("images.npy", "labels.npy")


class DataError(LocalError):
    """Samples that cannot be used. The text names files, never their contents; ``found`` are the names in it
    that do not come from the job.
    """

    def __init__(self, text: str, *found: str, transient: bool = False) -> None:
        """``transient`` if another try may read the samples, as when their mount was lost."""
        super().__init__(text)
        self.transient = transient
        self._found = [name for name in found if Path(name).name not in _USUAL]

    @property
    def discreet(self) -> str:
        """Return the text without names that were only found on the device: a name can identify a person."""
        text = str(self)
        for name in self._found:
            text = text.replace(name, "a file of the samples")
        return text
