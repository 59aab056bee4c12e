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
from millpond.host.records.certificates import CertificateEnd
from millpond.wire.tls import HOST, Stamp, stamp

log = logging.getLogger(__name__)

WARNING = datetime.timedelta(days=30)
AGAIN_SECONDS = 86400.0


def ends(fleet: Fleet, now: datetime.datetime) -> tuple[CertificateEnd, ...]:
    """Return each certificate that has ended, or does so soon: the authority's alone if that is one."""
    if found := _ending("", fleet.identity.authority, now):
        return (found,)
    devices = {one.name: fleet.device_directory(one.name) / "etc" / "cert.pem" for one in fleet.config.device}
    certificates = {HOST: fleet.identity.certificate} | devices
    return tuple(found for name, path in certificates.items() if (found := _ending(name, path, now)))


def warnings(fleet: Fleet, now: datetime.datetime) -> tuple[str, ...]:
    """Return a line for each certificate that has ended, or does so soon, with what to do."""
    return tuple(found.line for found in ends(fleet, now))


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


def _ending(name: str, path: Path, now: datetime.datetime) -> CertificateEnd | None:
    """Return the end of the certificate in a file, None if that is not soon, or there is none."""
    end = _end(path, stamp(path))
    return None if end is None or end - now >= WARNING else CertificateEnd(name, end, end <= now)


@functools.lru_cache(maxsize=1024)
def _end(path: Path, _stamp: Stamp) -> datetime.datetime | None:
    """Return when the certificate in a file ends; None where there is none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return None
