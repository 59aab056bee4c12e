# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, namespaces): a data service behind a shaped link, and consumers at its other end."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.tunnel.namespace import Namespace

EMULATION = "service and workers are in network namespaces of one machine, the link between them a tc tbf"
_SERVER, _CONSUMER, _PORT = "10.98.0.1", "10.98.0.2", 7001
_SECRET = "of the benchmark"  # noqa: S105  # of no use outside these namespaces


class ShapedService:
    """Serves a folder over a link of ``rate`` bytes per second; ``address`` is the service's."""

    def __init__(self, root: Path, rate: float) -> None:
        self._namespaces = Namespace(), Namespace()
        server, consumer = self._namespaces
        server.join(consumer, "data")
        server.configure("data", _SERVER, 24, 1500)
        consumer.configure("data", _CONSUMER, 24, 1500)
        bucket = [
            "rate",
            f"{8 * rate:.0f}bit",
            "burst",
            f"{max(66_000, round(rate / 250))}",
            "latency",
            "50ms",
        ]
        for namespace in self._namespaces:
            with namespace.entered():
                subprocess.run(["tc", "qdisc", "add", "dev", "data", "root", "tbf", *bucket], check=True)
        secret = root / "secret"
        secret.write_text(_SECRET)
        argv = ["-m", "millpond.data.streaming", str(root), "--secret-file", str(secret)]
        argv += ["--listen", f"{_SERVER}:{_PORT}"]
        self._service = server.start([sys.executable, *argv], stderr=None)  # type: ignore[arg-type]
        assert self._service.stdout
        if b"is served" not in self._service.stdout.readline():
            raise RuntimeError("the data service has not started")
        self.address = f"{_SERVER}:{_PORT}"

    @property
    def pid(self) -> int:
        """The process of the service."""
        return self._service.pid

    def start(self, module: str, given: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start a consumer, a module of this folder that gets ``given`` and prints what it found, as JSON."""
        spec = {"address": self.address, "secret": _SECRET, **given}
        argv = [sys.executable, "-m", f"bench.data.{module}", json.dumps(spec)]
        return self._namespaces[1].start(argv, stderr=None)  # type: ignore[arg-type]

    def run(self, argv: Sequence[str]) -> bytes:
        """Run a program at the consumers' end; return what it prints. Raises RuntimeError."""
        process = self._namespaces[1].start(argv, stderr=None)  # type: ignore[arg-type]
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{argv[:2]} has ended with {process.returncode}")
        return output

    def serve_files(self, folder: Path, port: int) -> subprocess.Popen[bytes]:
        """Start a plain HTTP server of a folder beside the service, for a peer."""
        argv = [sys.executable, "-m", "http.server", str(port), "--bind", _SERVER, "--directory", str(folder)]
        return self._namespaces[0].start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def url(self, port: int) -> str:
        """The address of that server."""
        return f"http://{_SERVER}:{port}"

    def received(self) -> int:
        """The bytes that came over the link."""
        return self._namespaces[1].traffic("data").received

    def close(self) -> None:
        """End the service."""
        self._service.terminate()
        assert self._service.stdout
        self._service.stdout.close()
        self._service.wait()
        for namespace in self._namespaces:
            namespace.close()


def found(process: subprocess.Popen[bytes]) -> Any:
    """Return what a consumer has printed. Raises RuntimeError if it has failed."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a consumer has ended with {process.returncode}")
    return json.loads(output)


@contextlib.contextmanager
def serving(root: Path, rate: float) -> Iterator[ShapedService]:
    """Serve a folder over a shaped link."""
    service = ShapedService(root, rate)
    try:
        yield service
    finally:
        service.close()


def sparse_images(folder: Path, samples: int, shape: tuple[int, ...]) -> None:
    """Write images of zeros that take no place on the disk, with labels."""
    folder.mkdir()
    with (folder / "images.npy").open("wb") as file:
        head = {"descr": "|u1", "fortran_order": False, "shape": (samples, *shape)}
        np.lib.format.write_array_header_1_0(file, head)
        file.truncate(file.tell() + samples * int(np.prod(shape)))
    np.save(folder / "labels.npy", np.arange(samples) % 10)
