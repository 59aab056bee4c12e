# SPDX-License-Identifier: Apache-2.0
"""Pure: judges a fleet: its directory, its daemon and its certificates."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from millpond.base.text import counted
from millpond.host.remote.doctor import device_checks
from millpond.host.remote.doctor.diagnosis import Diagnosis, ok, unknown, warning, wrong
from millpond.host.remote.doctor.facts import DiskFacts, FleetFacts

_LEAST_FREE, _FEW_FREE = 64 << 20, 2 << 30
_LEAST_INODES, _FEW_INODES = 100, 10_000


def emulates(facts: FleetFacts) -> bool:
    """Return whether devices are emulated here, or may be: there is no fleet yet."""
    return facts.emulated > 0 or not facts.boards


def checks(facts: FleetFacts) -> Iterator[Diagnosis]:
    """Yield the diagnosis of each thing, then those of the devices."""
    yield _disk(facts.disk)
    if facts.fault:
        yield _no_fleet(facts)
        return
    yield ok("fleet", _described(facts.boards))
    yield from _relaxed(facts)
    yield from _certificates(facts)
    if facts.silent:
        yield _silent(facts)
        yield unknown("devices", "only the host daemon can tell about devices and tunnels")
        return
    yield ok("daemon", "answers")
    yield from device_checks.checks(facts.devices)
    if facts.devices and facts.unmeasured:
        yield unknown("rate", "the rates of the tunnels were not measured", said=facts.unmeasured)


def _described(boards: dict[str, int]) -> str:
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(boards.items()))
    return f"{counted(sum(boards.values()), 'device')}{f': {kinds}' if kinds else ''}"


def _no_fleet(facts: FleetFacts) -> Diagnosis:
    if facts.is_there:
        return wrong("fleet", "the fleet's directory cannot be read", said=facts.fault)
    mend = f"millpond init --fleet {shlex.quote(facts.directory)}"
    return unknown("fleet", "there is no fleet here", said=facts.directory, mend=mend)


def _disk(disk: DiskFacts | None) -> Diagnosis:
    if disk is None:
        return unknown("disk", "the file system of the fleet's directory does not tell its size")
    free = f"{disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB are free"
    mend = "millpond jobs prune"
    if disk.free < _LEAST_FREE or (disk.inodes > 0 and disk.free_inodes < _LEAST_INODES):
        return wrong("disk", f"where the fleet lies, {free} and {disk.free_inodes} inodes", mend=mend)
    if disk.free < _FEW_FREE or (disk.inodes > 0 and disk.free_inodes < _FEW_INODES):
        return warning("disk", f"where the fleet lies, {free} and {disk.free_inodes} inodes", mend=mend)
    return ok("disk", f"where the fleet lies, {free}")


def _relaxed(facts: FleetFacts) -> Iterator[Diagnosis]:
    for name, holds, key in (
        ("firewall", facts.is_firewalled, 'firewall = "off"'),
        ("confinement", facts.is_confined, 'confinement = "best-effort"'),
    ):
        if not holds:
            yield warning(name, f"the fleet does without it: [host] {key} in fleet.toml")


def _certificates(facts: FleetFacts) -> Iterator[Diagnosis]:
    for found in facts.certificates:
        whose = {"": "the fleet's authority", "host": "the host's certificate"}.get(
            found.name, "a device's certificate"
        )
        judge = wrong if found.is_over else warning
        yield judge("certificates", f"{whose} {found.told}", said=found.name, mend=found.mend)
    for line in () if facts.certificates else facts.warnings:
        yield warning("certificates", "a certificate ends soon, or has ended", said=line)
    if not facts.certificates and not facts.warnings:
        yield ok("certificates", "none ends within 30 days")


def _silent(facts: FleetFacts) -> Diagnosis:
    if facts.is_denied:
        mend = "sudo usermod -aG millpond $USER, then log in again"
        return wrong("daemon", "this user may not ask the host daemon", said=facts.silent, mend=mend)
    directory = shlex.quote(facts.directory)
    if facts.boards and facts.emulated == sum(facts.boards.values()):
        mend = f"millpond emulate --fleet {directory}"
    else:
        mend = (
            "sudo systemctl restart millpond-host"
            if facts.is_installed
            else f"millpond host --fleet {directory}"
        )
    return wrong("daemon", "no host daemon answers", said=facts.silent, mend=mend)
