# SPDX-License-Identifier: Apache-2.0
"""Sessions of an audit log that nobody writes, for tests of what accounts to one."""

from __future__ import annotations

import contextlib

from millpond.agent.audit.sessions import AuditSession
from millpond.wire.audit_log import Answered


def unlogged() -> AuditSession:
    return AuditSession(Answered("job", "steps"))


def unlogged_sessions(about: Answered) -> contextlib.AbstractContextManager[AuditSession]:
    return contextlib.nullcontext(AuditSession(about))


def unlogged_service(_signer: str) -> contextlib.AbstractContextManager[AuditSession]:
    return contextlib.nullcontext(unlogged())
