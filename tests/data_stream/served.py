# SPDX-License-Identifier: Apache-2.0
"""Data sets and a data service for tests, in this process."""

from __future__ import annotations

import io
import socket
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from millpond.data.streaming.server import DataServer, ServiceSettings
from millpond.data.streaming.transforms.functions import in_process

SAMPLES = 200


def images(folder: Path, samples: int = SAMPLES, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Write images whose labels are their indices. Returns both."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (samples, side, side), np.uint8)
    labels = np.arange(samples)
    np.save(folder / "images.npy", pixels)
    np.save(folder / "labels.npy", labels)
    return pixels, labels


def tars(folder: Path, shards: int = 10, each: int = 20) -> None:
    """Write shards; the content of a sample is its index."""
    folder.mkdir(parents=True)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as out:
            for index in range(shard * each, (shard + 1) * each):
                head = tarfile.TarInfo(f"{index:06}.txt")
                data = str(index).encode()
                head.size = len(data)
                out.addfile(head, io.BytesIO(data))


@contextmanager
def server_of(root: Path, port: int = 0, **settings: Any) -> Iterator[tuple[str, DataServer]]:
    """Serve a folder. Yields the address and the service. ``transforms`` may be functions by name."""
    if isinstance(settings.get("transforms"), dict):
        settings["transforms"] = in_process(settings["transforms"])
    sock = socket.create_server(("127.0.0.1", port))
    address = "{}:{}".format(*sock.getsockname())
    with DataServer(sock, ServiceSettings(root, **settings)) as server:
        yield address, server


@contextmanager
def service(root: Path, port: int = 0, **settings: Any) -> Iterator[str]:
    """Serve a folder. Yields the address."""
    with server_of(root, port, **settings) as (address, _):
        yield address


def double(sample: tuple[Any, Any]) -> tuple[Any, Any]:
    """A transform."""
    return sample[0] * 2, sample[1]
