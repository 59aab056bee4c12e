# SPDX-License-Identifier: Apache-2.0
"""The data service on a device: confined, searched and counted as the volume, and ended by its handle."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.data_service.handle import DataServiceProcess
from millpond.agent.gate import KINDS, LedgerCounters, Pattern
from millpond.base.errors import MillpondError, Refused
from millpond.data.streaming.client import StreamSource
from millpond.data.streaming.dataset import StreamDataset, StreamOptions
from millpond.linux.zygote.client import Zygote
from millpond.wire.messages import Kind

from ..data_stream.served import SAMPLES, images
from ..waiting import eventually

CANARY = Pattern("secret", b"canary-of-the-tests", True)
SECRET = "x" * 64
ELSEWHERE = "127.0.0.2"
"""An address that is not the device's, from which the host's processes come."""


@dataclass(frozen=True, slots=True)
class FromAddress:
    """Connects to the service from an address."""

    source: str
    port: int

    def __call__(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 20.0, source_address=(self.source, 0))


@dataclass(frozen=True, slots=True)
class Device:
    """A device's volume, its running service and that one's part of the ledger."""

    volume: Path
    service: DataServiceProcess
    tally: LedgerCounters

    def stream(self, name: str, source: str = ELSEWHERE, secret: str = SECRET) -> StreamDataset:
        found = StreamSource(FromAddress(source, self.service.port), name, secret, patience=5.0)
        return StreamDataset(found, StreamOptions(50, 1 << 20, 0, 0, "", None, None))

    @property
    def counted(self) -> int:
        return self.tally[KINDS.index(Kind.VOLUME)]


def config(volume: Path, privacy: Privacy | None = None) -> AgentConfig:
    link = LinkConfig("127.0.0.1/8", "unused")
    return AgentConfig("csd0", link, flash=str(volume), volume=str(volume), privacy=privacy or Privacy())


@pytest.fixture
def device(tmp_path: Path, zygote: Zygote) -> Iterator[Device]:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o755)
    images(tmp_path / "public" / "digits")
    images(tmp_path / "private" / "own")
    tally = LedgerCounters.in_memory()
    service = DataServiceProcess(config(tmp_path), SECRET, [CANARY], tally, zygote)
    with contextlib.closing(service):
        yield Device(tmp_path, service, tally)


def labels(stream: StreamDataset) -> list[int]:
    return sorted(int(label) for _, found in stream for label in found)


def test_what_leaves_is_counted_as_volume(device: Device) -> None:
    assert labels(device.stream("digits")) == list(range(SAMPLES))
    pixels = (device.volume / "public" / "digits" / "images.npy").stat().st_size
    assert pixels < device.counted < 2 * pixels + (1 << 16)
    assert all(device.tally[number] == 0 for number, kind in enumerate(KINDS) if kind is not Kind.VOLUME)


def test_what_the_device_itself_reads_does_not_leave(device: Device) -> None:
    assert labels(device.stream("digits", "127.0.0.1")) == list(range(SAMPLES))
    assert device.counted == 0


def test_a_canary_stops_a_stream(device: Device) -> None:
    folder = device.volume / "public" / "marked"
    images(folder)
    pixels = np.load(folder / "images.npy").reshape(SAMPLES, 64)
    pixels[7, : len(CANARY.data)] = np.frombuffer(CANARY.data, np.uint8)
    np.save(folder / "images.npy", pixels.reshape(SAMPLES, 8, 8))
    with pytest.raises(MillpondError, match="canary 'secret' was about to leave the device"):
        labels(device.stream("marked"))
    assert device.tally[len(KINDS)] == 1


@pytest.mark.parametrize("name", ["missing", "../private/own", "/etc"])
def test_other_folders_are_refused_by_name(device: Device, name: str) -> None:
    words = re.escape(f"the data service has no folder '{name}'")
    with pytest.raises(MillpondError, match=words):
        labels(device.stream(name))


def test_strangers_are_refused(device: Device) -> None:
    with pytest.raises(Refused, match="the secret is not that of this data service"):
        labels(device.stream("digits", secret="y" * 64))


def test_its_process_sees_the_public_part_alone(device: Device) -> None:
    process = server(device)
    assert process.name().startswith("data_service.")
    root = Path(f"/proc/{process.pid}/root")
    seen = root / device.volume.relative_to("/")
    assert [each.name for each in seen.iterdir()] == ["public"]
    options = [
        line.split()[5]
        for line in Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()
        if line.split()[4] == str(device.volume / "public")
    ]
    assert options and all("ro" in each.split(",") for each in options)
    assert Path(f"/proc/{process.pid}/ns/net").stat() != Path("/proc/self/ns/net").stat()
    if os.geteuid() == 0:
        assert process.uids().real == 64006


def test_it_ends_with_its_handle(device: Device) -> None:
    process = server(device)
    device.service.close()
    eventually(lambda: not process.is_running(), "the process is gone")
    with pytest.raises(ConnectionRefusedError):
        FromAddress(ELSEWHERE, device.service.port)()


def server(device: Device) -> psutil.Process:
    """The process of the service, once it serves."""
    labels(device.stream("digits", "127.0.0.1"))
    first = psutil.Process(device.service.process.pid)
    return [first, *first.children(recursive=True)][-1]


def test_a_device_that_encrypts_all_refuses(tmp_path: Path, zygote: Zygote) -> None:
    always = config(tmp_path, Privacy(encrypt="always"))
    with pytest.raises(Refused, match="streams are not encrypted yet"):
        DataServiceProcess(always, SECRET, [], LedgerCounters.in_memory(), zygote)
    with pytest.raises(Refused, match="too short"):
        DataServiceProcess(config(tmp_path), "short", [], LedgerCounters.in_memory(), zygote)
