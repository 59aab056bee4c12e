# SPDX-License-Identifier: Apache-2.0
"""The data service on a device: confined, searched and counted as the volume, and ended by its handle."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.data_service.handle import DataServiceProcess
from millpond.agent.gate import KINDS, LedgerCounters, Pattern
from millpond.agent.policy.settings import Policy
from millpond.base.errors import ConfigError, MillpondError, Refused
from millpond.data.streaming.client import StreamSource
from millpond.data.streaming.dataset import StreamDataset, StreamOptions
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import Launch, script_digest
from millpond.wire.messages import Kind

from ..audited import unlogged_service
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
    service = DataServiceProcess(config(tmp_path), SECRET, [CANARY], tally, zygote, unlogged_service)
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
        DataServiceProcess(always, SECRET, [], LedgerCounters.in_memory(), zygote, unlogged_service)
    with pytest.raises(Refused, match="too short"):
        DataServiceProcess(
            config(tmp_path), "short", [], LedgerCounters.in_memory(), zygote, unlogged_service
        )


TRANSFORMS = f"""\
import os, socket
from pathlib import Path
import helper
import torch

def doubled(sample):
    return helper.twice(sample[0]), sample[1]

def small(sample):
    return (255 * sample[0][:, :2, :2]).to(torch.uint8), sample[1]

def dies(sample):
    if int(sample[1]) == 57:
        print("about to end")
        os._exit(9)
    return sample

def greedy(sample):
    if int(sample[1]) == 57:
        return torch.zeros(17 << 20), sample[1]
    return sample

def marked(sample):
    return torch.frombuffer(bytearray(bytes.fromhex({CANARY.data.hex()!r})), dtype=torch.uint8), sample[1]

def looks(sample):
    def closed(address):
        try:
            socket.create_connection(address, 1.0)
        except OSError:
            return 1
        return 0
    known = [Path(each).exists() for each in VOLUME]
    links = [Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    others = [each for each in links if each.is_symlink() and str(each.readlink()).startswith("socket")]
    return torch.tensor([os.getuid(), closed(("127.0.0.1", PORT)), any(known), len(others)]), sample[1]
"""
HELPER = "def twice(image):\n    return 2 * image\n"


def launch(text: str = TRANSFORMS, **more: Any) -> Launch:
    files = {"a.py": b"", "more/mine.py": text.encode(), "more/helper.py": HELPER.encode()}
    return Launch("a.py", (), files, 0, 1, "", 0, transforms="more/mine.py", **more)


@pytest.fixture
def transforming(tmp_path: Path, zygote: Zygote) -> Iterator[Device]:
    volume = tmp_path / "volume"
    images(volume / "public" / "digits")
    images(volume / "private" / "own")
    for folder in (tmp_path, *tmp_path.parents, volume):
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(folder.stat().st_mode | 0o755)
    made = replace(config(volume), state=str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    tally = LedgerCounters.in_memory()
    shown = [str(volume), str(volume / "private"), str(volume / "public"), str(tmp_path / "state")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = TRANSFORMS.replace("VOLUME", repr(shown)).replace("PORT", str(server.getsockname()[1]))
        service = DataServiceProcess(made, SECRET, [CANARY], tally, zygote, unlogged_service, launch(text))
        with contextlib.closing(service):
            yield Device(volume, service, tally)


def changed(device: Device, transform: str, source: str = ELSEWHERE) -> list[Any]:
    source_ = FromAddress(source, device.service.port)
    found = StreamSource(source_, "digits", SECRET, transform=transform, patience=5.0)
    return list(StreamDataset(found, StreamOptions(50, 1 << 20, 0, 0, "", None, None)))


def test_transforms_run_confined_and_what_leaves_is_counted(transforming: Device) -> None:
    """The functions see no volume, no network, and no socket but their own; what they return is counted, and
    neither what they got nor what they were sent.
    """
    pixels = np.load(transforming.volume / "public" / "digits" / "images.npy")
    for inputs, found in changed(transforming, "doubled", "127.0.0.1"):
        assert inputs[0].max() == 2 * np.float32(pixels[int(found[0])].max()) / np.float32(255)
    (told,) = {
        tuple(row.tolist()) for inputs, _ in changed(transforming, "looks", "127.0.0.1") for row in inputs
    }
    assert told[1:] == (1, 0, 1)
    if os.geteuid() == 0:
        assert told[0] == 64004
    assert transforming.counted == 0
    small = changed(transforming, "small")
    assert sum(inputs.numel() for inputs, _ in small) == 4 * SAMPLES
    assert 12 * SAMPLES <= transforming.counted < 32 * SAMPLES  # 4 pixels and a label, of 64 that are read


def test_what_a_transform_adds_is_searched(transforming: Device) -> None:
    with pytest.raises(MillpondError, match="canary 'secret' was about to leave the device"):
        changed(transforming, "marked")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("dies", "has ended: about to end$"),
        ("greedy", "a sample is larger than all that its consumer takes at once"),
    ],
)
def test_a_transform_that_fails_ends_its_stream_with_its_last_lines(
    transforming: Device, name: str, told: str
) -> None:
    for _ in range(2):
        with pytest.raises(Refused, match="no transform 'missing'"):  # its lines are in the same log
            changed(transforming, "missing")
        with pytest.raises(Refused, match=told):
            changed(transforming, name)
    assert labels(transforming.stream("digits")) == list(range(SAMPLES))
    assert len(changed(transforming, "small")) == 4


def test_the_process_of_transforms_ends_with_the_service(transforming: Device) -> None:
    changed(transforming, "small")
    own = psutil.Process().children(recursive=True)
    found = [each for each in own if each.name().startswith("transforms.")]
    assert found
    transforming.service.close()
    eventually(lambda: not any(each.is_running() for each in found), "the processes are gone")


def test_transforms_that_the_policy_does_not_know_are_refused(tmp_path: Path, zygote: Zygote) -> None:
    """The digest is that of the launch with its transforms: by another name of a file it is another one."""
    tally = LedgerCounters.in_memory()
    code = launch()
    plain = script_digest(code.script, code.files)
    for policy, told in (
        (Policy(code="listed", listed=(plain,)), r"policy\.code: the script is not listed"),
        (Policy(code="signed", owners=("ssh-ed25519 AAAA",)), r"policy\.code: the code is not signed"),
    ):
        bound = replace(config(tmp_path), policy=policy)
        with pytest.raises(Refused, match=told):
            DataServiceProcess(bound, SECRET, [], tally, zygote, unlogged_service, code)
    for name in ("missing.py", "../a.py", "more"):
        with pytest.raises(ConfigError, match="are no Python file among the script's files"):
            DataServiceProcess(
                config(tmp_path), SECRET, [], tally, zygote, unlogged_service, replace(code, transforms=name)
            )
