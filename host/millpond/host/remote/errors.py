# SPDX-License-Identifier: Apache-2.0
"""Pure: the error of SSH; here, as paramiko takes long to import."""

from __future__ import annotations

from millpond.base.errors import RemoteError


class SshFailed(RemoteError):
    """No SSH connection; nothing was run."""
