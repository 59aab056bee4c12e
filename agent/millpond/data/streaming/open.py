# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, a data service): the stream of an address, ``millpond.data.stream``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millpond.base.errors import LocalError
from millpond.base.sizes import bytes_of
from millpond.data.streaming.client import Connect, StreamSource, TcpAddress
from millpond.data.streaming.dataset import StreamDataset, StreamOptions
from millpond.data.streaming.even import EvenStream
from millpond.data.streaming.protocol.messages import At
from millpond.fs.store.layout import PUBLIC
from millpond.train.distributed.data_services import find_data_service


def stream(
    where: str,
    *,
    batch: int | None = None,
    secret: str = "",
    run: str = "",
    even: bool = False,
    seed: int = 0,
    shuffle: int = 0,
    memory: str | int = "256 MiB",
    chunk: int | None = None,
    at: At = "worker",
    transform: str = "",
    apply: Callable[[Any], Any] | None = None,
    patience: float = 60.0,
) -> StreamDataset:
    """Return a data set that a data service serves at ``where``, such as "host:port/folder", as a torch
    IterableDataset: an iteration is an epoch, in which each sample comes once, over all processes that give
    the same ``run``. If ``even``, an epoch has the same number of batches on each rank of torch.distributed,
    as DistributedDataParallel needs it; the samples that do not divide by the ranks are left out.

    It yields samples, or batches of ``batch`` as views of what was received, ``apply`` being called on either
    a batch or, where there is no ``batch``, a batch of one. The order follows from ``seed`` and the epoch: a
    random one, or of shards one that moves a sample by at most ``shuffle`` samples, so that shards are read
    from front to back. At most ``memory`` bytes are on the way; ``chunk`` samples are sent at once, tuned if
    None. Images are decoded ``at`` the worker or the server, which may apply a ``transform`` of its own, by
    its name. ``patience`` is the seconds for which the service may be away. Raises LocalError.
    """
    if at not in ("server", "worker"):
        raise LocalError(f"data is decoded at 'server' or 'worker', not '{at}'")
    source = StreamSource(*located(where, secret), at, transform, patience)
    options = StreamOptions(batch, bytes_of(memory), seed, shuffle, run, chunk, apply)
    return EvenStream(source, options) if even else StreamDataset(source, options)


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
