# SPDX-License-Identifier: Apache-2.0
"""Pure: the end of a certificate that has come, or comes soon."""

from __future__ import annotations

import datetime
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CertificateEnd:
    """The end of the certificate of the host or a device by ``name``, or of the fleet's authority (""), and
    whether it ``is_over``.
    """

    name: str
    end: datetime.datetime
    is_over: bool

    @property
    def told(self) -> str:
        """The end in words."""
        return f"{'ended' if self.is_over else 'ends'} on {self.end:%Y-%m-%d}"

    @property
    def mend(self) -> str:
        """The command that mends it."""
        return f"millpond renew {self.name}" if self.name else "millpond init"

    @property
    def line(self) -> str:
        """The end and what to do, in one line."""
        if not self.name:
            return (
                f"the fleet's authority {self.told}, and all its certificates with it: "
                f"make a new fleet with '{self.mend}'"
            )
        return f"the certificate of {self.name} {self.told}: renew it with '{self.mend}'"
