# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, a data service): the stream of an address, see ``millpond.data.stream``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millpond.base.errors import LocalError
from millpond.base.sizes import bytes_of
from millpond.data.streaming.client import Connect, StreamSource, TcpAddress
from millpond.data.streaming.dataset import StreamDataset, StreamOptions
from millpond.data.streaming.protocol.messages import At
from millpond.fs.store.layout import PUBLIC
from millpond.train.distributed.data_services import find_data_service


def make(
    where: str,
    *,
    batch: int | None,
    secret: str,
    run: str,
    seed: int,
    shuffle: int,
    memory: str | int,
    chunk: int | None,
    at: At,
    transform: str,
    apply: Callable[[Any], Any] | None,
    patience: float,
) -> StreamDataset:
    """Implement ``millpond.data.stream``."""
    if at not in ("server", "worker"):
        raise LocalError(f"data is decoded at 'server' or 'worker', not '{at}'")
    source = StreamSource(*located(where, secret), at, transform, patience)
    return StreamDataset(source, StreamOptions(batch, bytes_of(memory), seed, shuffle, run, chunk, apply))


def located(where: str, secret: str) -> tuple[Connect, str, str]:
    """Return what connects to the service of ``where``, the folder there, and the service's secret, which is
    the launch's own for a device's public data, "csd0:public/folder". Raises LocalError, RemoteError.
    """
    device, colon, path = where.partition(":")
    part, _, name = path.partition("/")
    if not (device and colon and part and part.isidentifier()):
        return *address(where), secret
    if part != PUBLIC or not name:
        text = f"of a device, public folders alone are, such as {device}:public/folder"
        raise LocalError(f"'{where}' is no address of streamed data: {text}")
    found = find_data_service(device)
    return TcpAddress(found.address, found.port), name, found.secret


def address(where: str) -> tuple[Connect, str]:
    """Return what connects to the service of "host:port/folder", "[host]:port/folder" with IPv6, and the
    folder. Raises LocalError.
    """
    place, slash, name = where.partition("/")
    host, colon, port = place.rpartition(":")
    if not (slash and colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise LocalError(
            f"'{where}' is no address of streamed data, such as host:7001/folder or csd0:public/folder"
        )
    return TcpAddress(host.strip("[]"), int(port)), name
