# SPDX-License-Identifier: Apache-2.0
"""The host's part in streams of a launch: it starts each service once, and refuses what cannot be."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.launch.data_services import DataRequests
from millpond.host.launch.workers import LaunchWorker, Over
from millpond.train.distributed.data_service_messages import (
    DataFound,
    DataServiceReady,
    FindData,
    StartDataService,
)
from millpond.train.distributed.launch_messages import Launch
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message


@dataclass(slots=True)
class NearAgent:
    """A device whose agent answers each control connection once."""

    config: DeviceConfig
    answer: Message
    secrets: list[str] = field(default_factory=list)
    codes: list[Launch | None] = field(default_factory=list)
    ends: list[Channel] = field(default_factory=list)

    def control(self, _deadline: Deadline) -> Channel:
        near, far = socket.socketpair()
        self.ends.append(Channel(far, "host"))
        threading.Thread(target=self._serve, args=(self.ends[-1],)).start()
        return Channel(near, self.config.name)

    def _serve(self, host: Channel) -> None:
        asked = host.expect(StartDataService, Deadline.after(10))
        self.secrets.append(asked.secret)
        self.codes.append(asked.code)
        host.send(self.answer, Deadline.after(10))


def worker(rank: int, name: str) -> LaunchWorker:
    address = f"10.77.0.{4 * rank + 2}"
    return LaunchWorker(name, Launch("a.py", (), {}, rank, 3, "", 0, address, worker=name), "lo")


@pytest.fixture
def agents() -> dict[str, NearAgent]:
    return {
        "csd0": NearAgent(DeviceConfig("csd0"), DataServiceReady(4000)),
        "csd1": NearAgent(DeviceConfig("csd1", encrypt="always"), DataServiceReady(4000)),
        "csd2": NearAgent(DeviceConfig("csd2"), DataServiceReady(70_000)),
        "csd3": NearAgent(DeviceConfig("csd3"), Failure("policy", "privacy.encrypt is set")),
    }


@pytest.fixture
def services(agents: dict[str, NearAgent]) -> Iterator[DataRequests]:
    workers = [worker(rank, name) for rank, name in enumerate(("host", *agents))]
    made = DataRequests(workers, cast("dict[str, Device]", agents), Over())
    yield made
    made.close()
    for agent in agents.values():
        for end in agent.ends:
            with pytest.raises(ConnectionLost):
                end.receive(Deadline.after(10))
            end.close()


def test_a_service_is_started_once_for_all(services: DataRequests, agents: dict[str, NearAgent]) -> None:
    found = [services.answer(name, FindData("csd0")) for name in ("host", "csd0", "csd2")]
    (secret,) = agents["csd0"].secrets
    assert len(secret) == 64
    assert found == [DataFound("10.77.0.6", 4000, secret)] * 3
    assert agents["csd0"].codes == [None]


def test_a_launchs_transforms_go_to_the_service(agents: dict[str, NearAgent]) -> None:
    files = {"a.py": b"", "mine.py": b"def cropped(sample): ..."}
    launch = replace(worker(0, "csd0").launch, files=files, transforms="mine.py")
    devices = cast("dict[str, Device]", agents)
    with contextlib.closing(DataRequests([LaunchWorker("csd0", launch, "lo")], devices, Over())) as services:
        services.answer("csd0", FindData("csd0"))
    assert agents["csd0"].codes == [launch]
    agents["csd0"].ends[0].close()


@pytest.mark.parametrize(
    ("asker", "device", "code", "text"),
    [
        ("host", "csd9", "unknown", "csd9: no device of this launch, which has csd0, csd1, csd2, csd3"),
        ("csd0", "host", "unknown", "host: no device of this launch, which has csd0, csd1, csd2, csd3"),
        ("host", "csd1", "policy", 'csd1: the link of csd1 has encrypt = "always"'),
        ("csd1", "csd0", "policy", 'csd0: the link of csd1 has encrypt = "always"'),
        ("host", "csd2", "device", "csd2: it listens at port 70000"),
        ("host", "csd3", "policy", "csd3: privacy.encrypt is set"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    services: DataRequests, asker: str, device: str, code: str, text: str
) -> None:
    found = services.answer(asker, FindData(device))
    assert isinstance(found, Failure)
    assert found.code == code and found.text.startswith(text) and "\n" not in found.text
