# SPDX-License-Identifier: Apache-2.0
"""Edge (files, cryptography): the ends of the certificates of a fleet, which are told before they come."""

from __future__ import annotations

import datetime
import functools
import logging
import time
from pathlib import Path

from cryptography import x509

from millpond.host.fleet.directory import Fleet
from millpond.wire.tls import HOST, Stamp, stamp

log = logging.getLogger(__name__)

WARNING = datetime.timedelta(days=30)
AGAIN_SECONDS = 86400.0


def warnings(fleet: Fleet, now: datetime.datetime) -> tuple[str, ...]:
    """Return a line for each certificate that has ended, or does so soon, with what to do."""
    authority = fleet.identity.authority
    if told := _told(authority, now):
        return (
            f"the fleet's authority {told}, and all its certificates with it: "
            "make a new fleet with 'millpond init'",
        )
    devices = {one.name: fleet.device_directory(one.name) / "etc" / "cert.pem" for one in fleet.config.device}
    return tuple(
        f"the certificate of {name} {told}: renew it with 'millpond renew {name}'"
        for name, path in ({HOST: fleet.identity.certificate} | devices).items()
        if (told := _told(path, now))
    )


class ExpiryLog:
    """Logs the warnings of a running daemon, once a day."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._next = fleet, 0.0

    def tell(self) -> None:
        """Log them if that is due."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + AGAIN_SECONDS
            for line in warnings(self._fleet, datetime.datetime.now(datetime.UTC)):
                log.warning("%s", line)


def _told(path: Path, now: datetime.datetime) -> str:
    """Return when the certificate in a file ends, "" if that is not soon, or there is none."""
    end = _end(path, stamp(path))
    if end is None or end - now >= WARNING:
        return ""
    return f"{'ended' if end <= now else 'ends'} on {end:%Y-%m-%d}"


@functools.lru_cache(maxsize=1024)
def _end(path: Path, _stamp: Stamp) -> datetime.datetime | None:
    """Return when the certificate in a file ends; None where there is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return None
