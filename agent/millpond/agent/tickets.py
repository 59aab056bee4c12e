# SPDX-License-Identifier: Apache-2.0
"""Pure: tickets that tie a bulk connection to the authenticated session that asked for it."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

P = TypeVar("P")
VALID_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Issued(Generic[P]):
    purpose: P
    tls: bool
    expires: float


class Tickets(Generic[P]):
    """Issues single-use tokens for a purpose. ``new_token`` gives 32 unguessable bytes."""

    def __init__(self, new_token: Callable[[], bytes]) -> None:
        self._new_token = new_token
        self._issued: dict[bytes, _Issued[P]] = {}

    def issue(self, purpose: P, tls: bool, now: float) -> bytes:
        """Return a token for ``purpose``, valid for VALID_SECONDS from ``now`` (seconds)."""
        self._issued = {token: item for token, item in self._issued.items() if item.expires > now}
        token = self._new_token()
        self._issued[token] = _Issued(purpose, tls, now + VALID_SECONDS)
        return token

    def redeem(self, token: bytes, tls: bool, now: float) -> P | None:
        """Return the purpose of ``token``, once; None if unknown, used, expired, or not ``tls`` though it
        must be.
        """
        for known, item in list(self._issued.items()):
            if hmac.compare_digest(known, token):
                del self._issued[known]
                return item.purpose if item.expires > now and (tls or not item.tls) else None
        return None
