# SPDX-License-Identifier: Apache-2.0
"""Pure: judges what millpond uses of a machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from millpond.base.text import counted
from millpond.base.version import VERSION
from millpond.host.remote.doctor.diagnosis import Diagnosis, ok, unknown, warning, wrong
from millpond.host.remote.doctor.facts import SystemFacts
from millpond.wire.framing import PROTOCOL

_LEAST_KERNEL, _PASSTHROUGH_KERNEL = (5, 13), (6, 9)
_PROCESSORS = ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x")
_VERSION = re.compile(r"\d+(\.\d+)*((a|b|rc|\.dev|\.post)\d+)?")


def checks(facts: SystemFacts, *, emulates: bool) -> Iterator[Diagnosis]:
    """Yield the diagnosis of each thing; ``emulates`` where devices are, or may be, emulated here."""
    yield _kernel(facts)
    yield from _trial(facts, emulates=emulates)
    yield _python(facts)
    yield from _packages(facts)
    if emulates:
        yield _groups(facts)
    yield _descriptors(facts)
    yield _clock(facts)


def plain_version(text: str) -> str:
    """Return the numbers of a version, "?" for a text that has none: a report holds no more of it."""
    found = _VERSION.match(text)
    return found[0] if found else "?"


def _kernel(facts: SystemFacts) -> Diagnosis:
    processor = facts.processor if facts.processor in _PROCESSORS else "another processor"
    what = f"Linux {facts.kernel[0]}.{facts.kernel[1]}, {processor}"
    if facts.kernel < _LEAST_KERNEL:
        least = ".".join(map(str, _LEAST_KERNEL))
        return wrong("kernel", f"{what} is older than {least}", mend="install a newer kernel")
    return ok("kernel", what)


def _trial(facts: SystemFacts, *, emulates: bool) -> Iterator[Diagnosis]:
    if (found := facts.trial) is None:
        yield unknown("features", "the kernel's features were not tried: a process gets no namespaces")
        return
    if found.tun:
        yield wrong("tunnel", "no TUN interface can be made", said=found.tun, mend="sudo modprobe tun")
    else:
        yield ok("tunnel", "a TUN interface can be made")
    if found.firewall:
        what = "the host's services cannot be closed to its devices"
        yield wrong("firewall", what, said=found.firewall, mend="sudo modprobe nf_tables")
    else:
        yield ok("firewall", "the host's services can be closed to its devices")
    if found.landlock:
        what = "processes cannot be confined by Landlock"
        mend = "start the kernel with landlock in lsm=, see /sys/kernel/security/lsm"
        yield warning("landlock", what, said=found.landlock, mend=mend)
    else:
        yield ok("landlock", "processes can be confined")
    if emulates:
        yield _passthrough(facts, found.passthrough)


def _passthrough(facts: SystemFacts, refusal: str) -> Diagnosis:
    if not refusal:
        return ok("passthrough", "the kernel reads and writes volumes of emulated devices itself")
    what = "volumes of emulated devices are read and written by a process, which is slower"
    old = facts.kernel < _PASSTHROUGH_KERNEL
    return ok("passthrough", f"{what}: Linux 6.9 could do it itself" if old else what, said=refusal)


def _python(facts: SystemFacts) -> Diagnosis:
    return ok("millpond", f"{VERSION}, protocol {PROTOCOL}, Python {plain_version(facts.python)}")


def _packages(facts: SystemFacts) -> Iterator[Diagnosis]:
    for name, least in facts.needed.items():
        version = facts.packages.get(name)
        if version is None:
            yield wrong("packages", f"{name} is not installed", mend=f"pip install {name}")
        elif least and _numbers(version) < _numbers(least):
            what = f"{name} {plain_version(version)} is older than {least}"
            yield wrong("packages", what, mend=f"pip install '{name}>={least}'")
    there = [f"{name} {plain_version(version)}" for name, version in facts.packages.items() if version]
    if there:
        yield ok("packages", ", ".join(there))
    else:
        yield unknown("packages", "millpond runs without being installed")
    if facts.packages and facts.packages.get("torch") is None:
        yield ok("training", "torch is not installed, so this host itself trains nothing")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", plain_version(version))))


def _groups(facts: SystemFacts) -> Diagnosis:
    if facts.cgroups and not facts.withheld:
        return ok("control groups", f"version {facts.cgroups}: jobs of emulated devices can be bounded")
    what = (
        f"version {facts.cgroups}: this process may not use {' and '.join(facts.withheld)}"
        if facts.cgroups
        else "this process sees none"
    )
    is_v2 = facts.cgroups == 2
    mend = "systemd-run --user --scope -p Delegate=yes millpond emulate" if is_v2 else "run it as root"
    return warning("control groups", f"{what}: jobs are bounded by process alone", mend=mend)


def _descriptors(facts: SystemFacts) -> Diagnosis:
    what = f"{counted(facts.descriptors, 'file')} may be open at once"
    if facts.descriptors < facts.few:
        what += ": some devices and commands may wait"
        return warning("open files", what, mend=f"ulimit -n {4 * facts.few}")
    return ok("open files", what)


def _clock(facts: SystemFacts) -> Diagnosis:
    if facts.is_synchronised is None:
        return unknown("clock", "the kernel does not tell whether its clock is right")
    if facts.is_synchronised:
        return ok("clock", "the host's clock follows another")
    what = "the host's clock follows no other: certificates may seem to have ended"
    return warning("clock", what, mend="sudo timedatectl set-ntp true")
