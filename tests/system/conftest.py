# SPDX-License-Identifier: Apache-2.0
"""Fleets of the system tests, and their cleanup after any failure."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.host.fleet import provisioning
from millpond.host.fleet.authority import Authority
from millpond.host.fleet.directory import Fleet
from millpond.host.records.jobs import ACTIVE

from ..forking import CLI, ForkServer
from ..waiting import eventually
from .launching import closed, scripts, shared_mounts
from .support import (
    EXAMPLES,
    MARKS,
    WATTS,
    Emulation,
    Trained,
    create,
    name_agent,
    set_watts,
    unshare,
    why_not,
)

WHY_NOT = why_not()
_HERE = Path(__file__).parent
AGENTS = _HERE / "agents"
GROUPS = {"shared_fleet": "fleet", "odd": "fleet-odd", "dying": "fleet-odd", "lan_fleet": "fleet-odd"}
"""A fleet of a whole run is in one of its processes, and with it all tests that use it."""
LATE_GROUP, LATE_MODULES = "fleet-late", ("test_6_", "test_7_", "test_9_")
"""These modules have a shared fleet of their own: both halves take as long."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder where no fleet can be emulated; keep tests that share a fleet together."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))
            for fixture in GROUPS.keys() & getattr(item, "fixturenames", ()):
                late = fixture == "shared_fleet" and item.path.name.startswith(LATE_MODULES)
                item.add_marker(pytest.mark.xdist_group(LATE_GROUP if late else GROUPS[fixture]))


@contextlib.contextmanager
def _switched_on(emulation: Emulation) -> Iterator[None]:
    """A fleet that is on, and of which nothing is left in the end."""
    try:
        emulation.start()
        yield
    finally:
        left = emulation.stop()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    """Three devices with digits, of declared watts; the owner of csd2 shows scripts the private part, and
    takes no jobs with large files.
    """
    emulation = create(tmp_path_factory.mktemp("shared"), ("csd0", "csd1", "csd2"))
    provisioning.write_agent_config(emulation.fleet, "csd2", {"launch": "private"} | MARKS)
    own = emulation.fleet.device_directory("csd2") / "etc" / "agent.toml"
    own.write_text(f"{own.read_text()}\n[policy]\nlargest_files = 2097152\n")
    set_watts(emulation, WATTS)
    with _switched_on(emulation):
        emulation.wait_ready()
        yield emulation


@pytest.fixture
def fleet(shared_fleet: Emulation) -> Emulation:
    """The shared fleet, all of it ready, without a job, whatever an earlier test has done to it."""
    shared_fleet.wait_ready()
    with shared_fleet.client() as client:
        for job in client.jobs():
            if job.state in ACTIVE:
                client.stop(job.id)
    return shared_fleet


@pytest.fixture
def ready(fleet: Emulation) -> Iterator[Emulation]:
    """All of it ready; after the test no process of a script is left and nothing is forwarded."""
    yield fleet
    eventually(lambda: not scripts(fleet), "no process of a script is left", 90, 0.1)
    fleet.wait_ready()
    eventually(lambda: not shared_mounts(fleet), "no shared folder is mounted", every=0.1)
    eventually(lambda: closed(fleet), "nothing is forwarded", every=0.1)


@pytest.fixture(scope="session")
def digits(shared_fleet: Emulation) -> Trained:
    """The example of a synchronous job, done."""
    text = (EXAMPLES / "digits-sync.toml").read_text()
    path = shared_fleet.base / "digits-sync.toml"
    path.write_text(text.replace("target = 0.97", "target = 0.96"))
    with shared_fleet.client() as client:
        before = client.ledgers()  # other tests have let parameters and canaries cross before
    result = shared_fleet.millpond("train", path)
    assert result.code == 0, f"{result}\n{shared_fleet.logs()}"
    with shared_fleet.client() as client:
        info, after = client.jobs()[-1], client.ledgers()
    return Trained(result, info, shared_fleet.progress(info.id)[1], before, after)


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    """One good device among six that are not, each in its own way."""
    base = tmp_path_factory.mktemp("odd")
    emulation = create(base, ("csd0", "newer", "stranger", "flood", "turning", "raving", "dead"))
    for device, script in (
        ("newer", "other_version.py"),
        ("flood", "flooding.py"),
        ("turning", "turning.py"),
        ("raving", "raving.py"),
        ("dead", "silent.py"),
    ):
        name_agent(emulation, device, AGENTS / script)
    _make_a_stranger(emulation.fleet, base)
    ready = dict.fromkeys(("csd0", "turning", "raving"), "ready")
    with _switched_on(emulation):
        emulation.wait(ready | {"newer": "incompatible", "stranger": "refused", "flood": "refused"})
        yield emulation


@pytest.fixture
def dying(tmp_path: Path) -> Iterator[Emulation]:
    """Two devices; csd1's agent dies in the middle of its second upload. csd0 takes bulk data in TLS."""
    emulation = create(tmp_path, ("csd0", "csd1"))
    name_agent(emulation, "csd1", AGENTS / "dying.py")
    toml = emulation.directory / "fleet.toml"
    toml.write_text(toml.read_text().replace('name = "csd0"\n', 'name = "csd0"\nencrypt = "always"\n'))
    with _switched_on(emulation):
        emulation.wait_ready()
        yield emulation


@pytest.fixture(scope="session")
def lan_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    """Three devices with a LAN of their own of 400 Mbit/s, on which updates may leave in plain datagrams;
    csd0 takes bulk data in TLS.
    """
    emulation = create(tmp_path_factory.mktemp("lan"), ("csd0", "csd1", "csd2"), lan=True)
    toml = emulation.directory / "fleet.toml"
    text = toml.read_text().replace('name = "csd0"\n', 'name = "csd0"\nencrypt = "always"\n')
    toml.write_text(f"{text}\n[lan]\nmbit = 400\n")
    for device in emulation.fleet.config.device:
        own = emulation.fleet.device_directory(device.name) / "etc" / "agent.toml"
        own.write_text(f"{own.read_text()}\n[policy]\nplain_lan = true\n")
    with _switched_on(emulation):
        emulation.wait_ready()
        yield emulation


def _make_a_stranger(fleet: Fleet, base: Path) -> None:
    """Give one device the identity that it would have in another fleet."""
    etc = fleet.device_directory("stranger") / "etc"
    Authority.create(base / "other-ca", "other").issue("stranger", base / "other")
    for name in ("cert.pem", "key.pem"):
        shutil.copy(base / "other" / name, etc / name)


@pytest.fixture(scope="session")
def apart() -> Iterator[ForkServer]:
    """Runs commands with mounts of their own, all with the same."""
    server = ForkServer(CLI, prefix=unshare())
    yield server
    server.close()
