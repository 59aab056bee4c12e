# SPDX-License-Identifier: Apache-2.0
"""'millpond doctor': what each check says of facts, what it finds here, and what a bug report leaves out."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import os
import platform
import pwd
import socket
import types
import typing
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import LocalError
from millpond.base.version import VERSION
from millpond.host.api.daemon import DeviceInfo, Devices, JobInfo, TunnelInfo
from millpond.host.api.topology import LinkInfo, TopologyInfo
from millpond.host.emulation import machine
from millpond.host.fleet import directory, provisioning
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.records.certificates import CertificateEnd
from millpond.host.remote.doctor import (
    device_checks,
    diagnosis,
    fleet_checks,
    fleet_facts,
    machine_facts,
    prerequisites,
    system_checks,
    system_facts,
    trial,
)
from millpond.host.remote.doctor.diagnosis import Diagnosis, Verdict
from millpond.host.remote.doctor.facts import (
    DeviceFacts,
    DeviceNode,
    DiskFacts,
    FleetFacts,
    KernelTrial,
    MachineFacts,
    SystemFacts,
)
from millpond.tunnel.datapath.stats import PacketStats
from millpond.wire.control_messages import AtRest, DriveHealth, Load, Welcome

from .commands import Command

GIB = 1 << 30
NOW = datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC)
SYSTEM = SystemFacts(
    kernel=(6, 18),
    python="3.11.2",
    processor="x86_64",
    trial=KernelTrial(),
    packages={"numpy": "2.1.0", "torch": "2.13.0+cpu"},
    needed={"numpy": ""},
    cgroups=2,
    withheld=(),
    descriptors=4096,
    few=1024,
    is_synchronised=True,
)
LOAD = Load(0.0, 1, 1, None, (), drive=DriveHealth("nvme", 0.1), time=1.0)
WELCOME = Welcome("csd0", VERSION, "boot", "aarch64", 4, 2, 100, AtRest("AES-256-XTS"))
INFO = DeviceInfo("csd0", "rockpro64", "ready", "", "10.77.0.2", WELCOME, LOAD, (0, 0))
TUNNEL = TunnelInfo("csd0", "up", "", 1.0, 1, 65520, 64, 1, "c", "on", 0, PacketStats(), PacketStats())
DEVICE = DeviceFacts(INFO, False, TUNNEL, 0.1, LinkInfo(1e9, 0.001, 1e9, 0.001))
FLEET = FleetFacts(
    "/srv/fleet",
    NOW,
    disk=DiskFacts(90 * GIB, 100 * GIB, 10**6, 10**7),
    boards={"rockpro64": 1},
    devices=(DEVICE,),
)


def told(found: Iterable[Diagnosis], verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return name, text and command of the diagnoses with a verdict."""
    return [(each.name, each.text, each.mend) for each in found if each.verdict is verdict]


def all_of(system: SystemFacts = SYSTEM, fleet: FleetFacts = FLEET) -> list[Diagnosis]:
    emulates = fleet_checks.emulates(fleet)
    return [*system_checks.checks(system, emulates=emulates), *fleet_checks.checks(fleet)]


def of_device(**changes: Any) -> list[Diagnosis]:
    return [*device_checks.checks([replace(DEVICE, **changes)])]


def test_all_is_well_where_nothing_is_wrong() -> None:
    found = [*prerequisites.checks(MachineFacts()), *all_of()]
    assert {each.verdict for each in found} == {Verdict.OK}, diagnosis.listed(found)
    narrow = diagnosis.listed(found, 80)
    assert max(map(len, narrow)) <= 80 and len(narrow) >= len(diagnosis.listed(found))
    assert not any(each.mend for each in found)


@pytest.mark.parametrize(
    ("facts", "name", "mend"),
    [
        (MachineFacts(fuse=DeviceNode(exists=False)), "fuse", "sudo modprobe fuse"),
        (MachineFacts(tun=DeviceNode(fault="Permission denied")), "tun", "sudo chmod 0666 /dev/net/tun"),
        (
            MachineFacts(in_container=True, fuse=DeviceNode(fault="Operation not permitted")),
            "fuse",
            "start the container with --device /dev/fuse",
        ),
        (MachineFacts(namespaces="no"), "namespaces", "sudo sysctl -w user.max_user_namespaces=10000"),
        (
            MachineFacts(namespaces="no", settings={"kernel.apparmor_restrict_unprivileged_userns": "1"}),
            "namespaces",
            "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        (
            MachineFacts(namespaces="no", settings={"kernel.unprivileged_userns_clone": "0"}),
            "namespaces",
            "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            MachineFacts(is_root=True, namespaces="no"),
            "namespaces",
            "start the container with --privileged",
        ),
        (MachineFacts(has_sshd=False), "sshd", "sudo apt install openssh-server"),
    ],
)
def test_what_an_emulated_fleet_lacks_is_named_with_what_mends_it(
    facts: MachineFacts, name: str, mend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ((wrong, text, command),) = told(prerequisites.checks(facts), Verdict.WRONG)
    assert (wrong, command) == (name, mend)
    monkeypatch.setattr(machine_facts, "look", lambda: facts)
    with pytest.raises(LocalError) as caught:  # the same words before a fleet is emulated
        machine.emulate(provisioning.create(tmp_path / "fleet", "tests", []))
    assert str(caught.value) == f"an emulated fleet needs {name}: {text}: {mend}"


@pytest.mark.parametrize(
    ("changes", "verdict", "name", "said"),
    [
        ({"kernel": (5, 10)}, Verdict.WRONG, "kernel", "5.10"),
        ({"trial": None}, Verdict.UNKNOWN, "features", "not tried"),
        ({"trial": KernelTrial(tun="none")}, Verdict.WRONG, "tunnel", "none"),
        ({"trial": KernelTrial(firewall="none")}, Verdict.WRONG, "firewall", "none"),
        ({"trial": KernelTrial(landlock="off")}, Verdict.WARNING, "landlock", "off"),
        ({"packages": {"numpy": None}}, Verdict.WRONG, "packages", "numpy is not installed"),
        ({"needed": {"numpy": "2.10"}}, Verdict.WRONG, "packages", "numpy 2.1.0 is older than 2.10"),
        ({"packages": {}, "needed": {}}, Verdict.UNKNOWN, "packages", "without being installed"),
        ({"withheld": ("memory",)}, Verdict.WARNING, "control groups", "may not use memory"),
        ({"cgroups": 0}, Verdict.WARNING, "control groups", "sees none"),
        ({"descriptors": 256}, Verdict.WARNING, "open files", "256 files"),
        ({"is_synchronised": False}, Verdict.WARNING, "clock", "follows no other"),
        ({"is_synchronised": None}, Verdict.UNKNOWN, "clock", "does not tell"),
    ],
)
def test_a_fault_of_the_host_is_told(changes: dict[str, Any], verdict: Verdict, name: str, said: str) -> None:
    facts = replace(SYSTEM, **changes)
    found = told(system_checks.checks(facts, emulates=True), verdict)
    assert [(each[0], said in each[1]) for each in found] == [(name, True)], found
    assert verdict is Verdict.UNKNOWN or found[0][2], "it names no command"


def test_what_emulation_alone_needs_is_left_out_for_boards() -> None:
    facts = replace(SYSTEM, withheld=("memory", "pids"))
    names = {each.name for each in system_checks.checks(facts, emulates=False)}
    assert not {"control groups", "passthrough"} & names


@pytest.mark.parametrize(
    ("changes", "verdict", "name", "mend"),
    [
        ({"disk": DiskFacts(GIB, 100 * GIB, 9, 0)}, Verdict.WARNING, "disk", "millpond jobs prune"),
        ({"disk": DiskFacts(9 * GIB, 10 * GIB, 9, 10**6)}, Verdict.WRONG, "disk", "millpond jobs prune"),
        ({"disk": None}, Verdict.UNKNOWN, "disk", ""),
        (
            {"fault": "none", "is_there": False, "directory": "/srv/my fleet"},
            Verdict.UNKNOWN,
            "fleet",
            "millpond init --fleet '/srv/my fleet'",
        ),
        ({"fault": "unknown key"}, Verdict.WRONG, "fleet", ""),
        ({"is_firewalled": False}, Verdict.WARNING, "firewall", ""),
        (
            {"certificates": (CertificateEnd("csd0", NOW, True),)},
            Verdict.WRONG,
            "certificates",
            "millpond renew csd0",
        ),
        (
            {"certificates": (CertificateEnd("", NOW, False),)},
            Verdict.WARNING,
            "certificates",
            "millpond init",
        ),
        ({"warnings": ("soon",)}, Verdict.WARNING, "certificates", ""),
        ({"silent": "none"}, Verdict.WRONG, "daemon", "millpond host --fleet /srv/fleet"),
        (
            {"silent": "x", "is_installed": True},
            Verdict.WRONG,
            "daemon",
            "sudo systemctl restart millpond-host",
        ),
        (
            {"silent": "x", "boards": {"emulated": 2}, "emulated": 2},
            Verdict.WRONG,
            "daemon",
            "millpond emulate --fleet /srv/fleet",
        ),
        (
            {"silent": "x", "is_denied": True},
            Verdict.WRONG,
            "daemon",
            "sudo usermod -aG millpond $USER, then log in again",
        ),
        ({"unmeasured": "a job runs"}, Verdict.UNKNOWN, "rate", ""),
    ],
)
def test_a_fault_of_the_fleet_is_told(
    changes: dict[str, Any], verdict: Verdict, name: str, mend: str
) -> None:
    found = told(fleet_checks.checks(replace(FLEET, **changes)), verdict)
    assert (name, mend) in [(each[0], each[2]) for each in found], found


@pytest.mark.parametrize(
    ("changes", "verdict", "name", "said"),
    [
        (
            {"info": replace(INFO, state="faulty", reason="no room")},
            Verdict.WRONG,
            "state",
            "faulty: its agent can run no job: no room",
        ),
        ({"info": replace(INFO, state="connecting")}, Verdict.WARNING, "state", "connecting"),
        ({"info": replace(INFO, state="of tomorrow")}, Verdict.WRONG, "state", "absent"),
        ({"tunnel": None}, Verdict.UNKNOWN, "tunnel", "not been started"),
        (
            {"tunnel": replace(TUNNEL, state="down", reason="no peer")},
            Verdict.WRONG,
            "tunnel",
            "down: no peer",
        ),
        ({"tunnel": replace(TUNNEL, mtu=1500, offloads=0)}, Verdict.WARNING, "tunnel", "MTU 1500"),
        ({"tunnel": replace(TUNNEL, confinement="off")}, Verdict.WARNING, "tunnel", "not confined: off"),
        (
            {"tunnel": replace(TUNNEL, from_device=PacketStats(malformed=3))},
            Verdict.WARNING,
            "tunnel",
            "3 packets",
        ),
        ({"tunnel": replace(TUNNEL, resets=11)}, Verdict.WARNING, "tunnel", "reset 11 times"),
        (
            {"info": replace(INFO, welcome=replace(WELCOME, software="0.1.0"))},
            Verdict.WARNING,
            "version",
            "0.1.0",
        ),
        ({"clock": -90.0}, Verdict.WARNING, "clock", "90 s behind"),
        ({"clock": None}, Verdict.UNKNOWN, "clock", "does not tell"),
        ({"info": replace(INFO, load=replace(LOAD, flash_used=99))}, Verdict.WRONG, "flash", "99%"),
        ({"info": replace(INFO, load=replace(LOAD, flash_used=91))}, Verdict.WARNING, "flash", "91%"),
        (
            {"info": replace(INFO, load=replace(LOAD, drive=DriveHealth("nvme", 0.95)))},
            Verdict.WARNING,
            "drive",
            "95% worn",
        ),
        (
            {"info": replace(INFO, load=replace(LOAD, drive=DriveHealth("emmc", None, "old")))},
            Verdict.WARNING,
            "drive",
            "warns: old",
        ),
        (
            {"info": replace(INFO, welcome=replace(WELCOME, at_rest=AtRest(reason="no key")))},
            Verdict.WARNING,
            "encryption",
            "no key",
        ),
    ],
)
def test_a_fault_of_a_device_is_told(changes: dict[str, Any], verdict: Verdict, name: str, said: str) -> None:
    found = told(of_device(**changes), verdict)
    assert [(each[0], said in each[1]) for each in found] == [(name, True)], found


def test_a_tunnel_that_is_much_slower_than_the_others_is_named() -> None:
    fast = [replace(DEVICE, info=replace(INFO, name=f"csd{number}")) for number in (1, 2)]
    slow = replace(DEVICE, link=LinkInfo(1e9, 0.001, 1e8, 0.001))
    ((name, text, mend),) = told(device_checks.checks([slow, *fast]), Verdict.WARNING)
    assert (name, text, mend) == (
        "rate",
        "800 Mbit/s, where others have 8000",
        "millpond tunnel --watch csd0",
    )


def test_what_is_alike_for_several_devices_is_one_line_with_the_commands_below() -> None:
    devices = [
        replace(DEVICE, clock=None, info=replace(INFO, name=name, state="revoked")) for name in ("a", "b")
    ]
    lines = diagnosis.listed([*device_checks.checks(devices)])
    at = next(number for number, line in enumerate(lines) if "revoked" in line)
    assert lines[at].split()[:4] == ["wrong", "state", "a,", "b:"]
    assert [line.strip() for line in lines[at + 1 : at + 3]] == [
        "mend: millpond renew a",
        "mend: millpond renew b",
    ]
    assert lines[-1].endswith("2 wrong, 2 unknown")


_NUMBERS = itertools.count()


def filled(kind: Any) -> Any:
    """Return a value of a type in which each text is a canary of its own."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is str:
        return f"canary{next(_NUMBERS)}"
    if kind is datetime.datetime:
        return NOW
    if kind in (int, float, bool, bytes):
        return kind(1) if kind is not bytes else b"canary"
    if origin is typing.Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return filled(next(each for each in arguments if each is not type(None)))
    if origin is tuple:
        return tuple(filled(each) for each in arguments if each is not ...)
    if origin is dict:
        return {filled(arguments[0]): filled(arguments[1])}
    hints = typing.get_type_hints(kind)
    return kind(**{one.name: filled(hints[one.name]) for one in dataclasses.fields(kind)})


def reports_of_canaries() -> Iterable[str]:
    """Yield reports of facts in which all texts are canaries: of devices in each state, and of all else that
    sends the checks another way.
    """
    system, fleet = filled(SystemFacts), filled(FleetFacts)
    # of closed sets: distributions that millpond names, controllers that it uses, and boards that it has
    packages = {"numpy": filled(str), "torch": None}
    system = replace(system, packages=packages, needed={"numpy": "1"}, withheld=("memory",))
    fleet = replace(fleet, boards={"emulated": 1, "rockpro64": 1}, fault="", silent="")
    (device,) = fleet.devices
    states = [replace(device, info=replace(device.info, state=str(state))) for state in DeviceState]
    tunnels = [
        replace(device, tunnel=replace(device.tunnel, state="up", **change))
        for change in (
            {},
            {"confinement": "on"},
            {"confinement": "on", "resets": 99},
            {"mtu": 99, "offloads": 0},
        )
    ]
    for each in (
        fleet,
        replace(fleet, certificates=()),
        replace(fleet, devices=(device, *states, *tunnels)),
        replace(fleet, fault=filled(str)),
        replace(fleet, fault=filled(str), is_there=False),
        replace(fleet, silent=filled(str)),
        replace(fleet, silent=filled(str), is_denied=False, emulated=2),
        replace(fleet, silent=filled(str), is_denied=False, is_installed=False),
    ):
        found = [*all_of(system, each), *prerequisites.checks(filled(MachineFacts))]
        assert "canary" in "".join(line for line in diagnosis.listed(found)), "the canaries reach no check"
        yield diagnosis.reported(found)


def test_a_report_holds_no_text_of_another() -> None:
    for report in reports_of_canaries():
        assert "canary" not in report, report
        assert "device 1: " in report or "devices" in report or "fleet" in report


def test_the_kernel_s_features_are_tried_without_a_trace(in_namespace: Any) -> None:
    """A mount, an interface and a table of the trial would be seen by others."""

    def body() -> None:
        before = Path("/proc/self/mountinfo").read_text(), Path("/proc/net/dev").read_text().count(":")
        found = trial.run()
        assert found is not None and found.tun == "" and "passed" not in found.passthrough
        after = Path("/proc/self/mountinfo").read_text(), Path("/proc/net/dev").read_text().count(":")
        assert before == after

    in_namespace(body)


def test_this_machine_is_looked_at() -> None:
    facts = system_facts.look(has_namespaces=False)
    assert facts.kernel >= (5, 0) and facts.packages["numpy"] and facts.needed["typer"] == "0.29"
    assert "millpond" not in facts.packages and facts.trial is None
    assert facts.cgroups in (0, 1, 2) and facts.descriptors > 0


class Told:
    """A daemon's client whose daemon tells of one device."""

    runs = False

    def __init__(self, _directory: Path) -> None:
        pass

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def overview(self) -> Devices:
        return Devices((INFO,), ("the certificate of csd0 ends",))

    def tunnel(self, _device: str) -> TunnelInfo:
        return TUNNEL

    def jobs(self, _last: int) -> list[JobInfo]:
        state = "running" if self.runs else "done"
        return [JobInfo(1, "j", state, "", "", 0, 1, "round", "", None, None, 0, 0.0, None)]

    def topology(self, _size: int) -> TopologyInfo:
        return TopologyInfo({"csd0": LinkInfo(1.0, 0.0, 2.0, 0.0)}, False, None, ())


@pytest.mark.parametrize("runs", [False, True])
def test_a_tunnel_is_measured_unless_a_job_runs(
    runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provisioning.create(tmp_path / "fleet", "tests", ["csd0"])
    monkeypatch.setattr(fleet_facts, "DaemonClient", Told)
    monkeypatch.setattr(Told, "runs", runs)
    told = list[str]()
    found = fleet_facts.look(tmp_path / "fleet", told.append)
    assert told == ([] if runs else ["measures the tunnels of 1 device"])
    assert found.devices[0].tunnel == TUNNEL and found.boards == {"emulated": 1} and found.emulated == 1
    assert (found.devices[0].link is None, bool(found.unmeasured)) == (runs, runs)
    clock = found.devices[0].clock
    assert clock is not None and clock < -1e9, "the device's clock is at 1970"


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for files whose path is a canary."""
    place = tmp_path / "canary-place"
    place.mkdir()
    return place


def test_doctor_works_without_a_fleet(command: Command, away: Path) -> None:
    done = command("doctor", "--fleet", away / "none", "--format", "json")
    document = json.loads(done.out)
    by_name = {each["name"]: each for each in document["diagnoses"]}
    assert by_name["fleet"]["verdict"] == "unknown" and "millpond init" in by_name["fleet"]["mend"]
    assert done.code == document["wrong"] == any(e["verdict"] == "wrong" for e in document["diagnoses"])


def test_doctor_reports_a_fleet_without_a_daemon(command: Command, away: Path) -> None:
    fleet = provisioning.create(away / "fleet", "canary-fleet", ["canary-dev"])
    done = command("doctor", "--fleet", fleet.directory, "--report", away / "report.txt")
    assert done.code == 1, done
    assert f"mend: millpond emulate --fleet {fleet.directory}" in done.out
    report = (away / "report.txt").read_text()
    private = ["canary", str(away), socket.gethostname(), pwd.getpwuid(os.getuid()).pw_name, platform.node()]
    assert not [text for text in private if text and text in report.replace("/root", "")], report
    assert "no host daemon answers (a text of " in report and f"{VERSION}, protocol" in report
    done = command("doctor", "--fleet", fleet.directory, "--report", away / "no" / "report.txt")
    assert done.code == 2 and "No such file" in done.err


def test_a_list_of_devices_that_cannot_be_read_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text("nonsense = 1\n")
    found = fleet_facts.look(tmp_path)
    assert found.is_there and "nonsense" in found.fault
    assert directory.INSTALLED.is_absolute() and not found.devices
