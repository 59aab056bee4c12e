# SPDX-License-Identifier: Apache-2.0
"""Pure: judges the devices of a fleet, by the daemon's word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from millpond.base.version import VERSION
from millpond.host.api.daemon import DeviceInfo, TunnelInfo
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.remote.doctor.diagnosis import (
    Diagnosis,
    Verdict,
    folded,
    ok,
    unknown,
    warning,
    wrong,
)
from millpond.host.remote.doctor.facts import DeviceFacts
from millpond.host.remote.doctor.system_checks import plain_version

_MENDS = {
    DeviceState.ABSENT: ("its end of the tunnel, or its agent, does not answer", "switch {} off and on"),
    DeviceState.CONNECTING: ("the host greets its agent", ""),
    DeviceState.FAULTY: ("its agent can run no job", "millpond logs {}"),
    DeviceState.INCOMPATIBLE: (
        "its agent speaks another version of the protocol",
        "millpond update {} IMAGE",
    ),
    DeviceState.REFUSED: ("a certificate, or a message, was not accepted", "millpond renew {}"),
    DeviceState.REVOKED: ("its certificate is revoked", "millpond renew {}"),
}
_SMALL_MTU = 9000
_MOST_RESETS = 10
_SLOW = 4
"""A tunnel is slow if the median of the fleet's has so many times its rate."""
_FULL, _NEARLY_FULL = 0.98, 0.9
_WORN = 0.9
_CLOCK_SECONDS = 30.0
"""A board leaves its clock as it is where that is less wrong."""
_ENGINES = ("python", "c")


def checks(devices: Sequence[DeviceFacts]) -> Iterator[Diagnosis]:
    """Yield the diagnoses of all devices, those of one kind together."""
    usual = median([each.link.uplink_rate for each in devices if each.link] or [0.0])
    for each in devices:
        yield _state(each.info)
    for each in devices:
        yield _tunnel(each.info.name, each.tunnel)
    for each in devices:
        if each.link:
            yield _rate(each.info.name, each.link.uplink_rate, usual)
    for each in devices:
        if each.info.welcome and each.info.load:
            yield from _answering(each)


def _state(info: DeviceInfo) -> Diagnosis:
    if info.state == DeviceState.READY:
        return ok("state", "ready", device=info.name)
    known = info.state in set(DeviceState)
    state = DeviceState(info.state) if known else DeviceState.ABSENT
    what, mend = _MENDS[state]
    judge = warning if state is DeviceState.CONNECTING else wrong
    return judge("state", f"{state}: {what}", said=info.reason, mend=mend.format(info.name), device=info.name)


def _tunnel(name: str, found: TunnelInfo | None) -> Diagnosis:
    if found is None:
        return unknown("tunnel", "its tunnel has not been started", device=name)
    mend = f"millpond tunnel {name}"
    if found.state != "up":
        return wrong("tunnel", "its tunnel is down", said=found.reason, device=name)
    engine = found.engine if found.engine in _ENGINES else "another"
    link = f"up, MTU {found.mtu}, {engine} engine"
    if found.mtu < _SMALL_MTU and not found.offloads:
        what = f"{link}: small packets without offloads cost much of the processor"
        return warning("tunnel", what, mend=mend, device=name)
    if found.confinement != "on":
        what = f"{link}: its pumps are not confined"
        return warning("tunnel", what, said=found.confinement, mend=mend, device=name)
    if malformed := found.to_device.malformed + found.from_device.malformed:
        return warning("tunnel", f"{link}: {malformed} packets were malformed", mend=mend, device=name)
    if found.resets > _MOST_RESETS:
        return warning("tunnel", f"{link}: it was reset {found.resets} times", mend=mend, device=name)
    return ok("tunnel", link, device=name)


def _rate(name: str, rate: float, usual: float) -> Diagnosis:
    what = f"{rate * 8e-6:.0f} Mbit/s"
    if rate * _SLOW < usual:
        what += f", where others have {usual * 8e-6:.0f}"
        return warning("rate", what, mend=f"millpond tunnel --watch {name}", device=name)
    return ok("rate", what, device=name)


def _answering(facts: DeviceFacts) -> Iterator[Diagnosis]:
    """Yield what a device that answers tells of itself."""
    info, name = facts.info, facts.info.name
    assert info.welcome and info.load
    if info.welcome.software != VERSION:
        what = f"its agent is {plain_version(info.welcome.software)}, the host {VERSION}"
        yield warning("version", what, mend=f"millpond update {name} IMAGE", device=name)
    else:
        yield ok("version", f"its agent is {VERSION}", device=name)
    yield _clock(facts.clock, name)
    yield _flash(name, info.load.flash_used, info.welcome.flash)
    if found := drive(info):
        yield found
    if not facts.is_emulated and (found := at_rest(info)):
        yield found


def _clock(ahead: float | None, name: str) -> Diagnosis:
    if ahead is None:
        return unknown("clock", "it does not tell its time", device=name)
    if abs(ahead) < _CLOCK_SECONDS:
        return ok("clock", "its clock agrees with the host's", device=name)
    what = f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the host's"
    mend = f"millpond run --admin {name} -- systemctl restart millpond-agent"
    return warning("clock", what, mend=mend, device=name)


def _flash(name: str, used: int, total: int) -> Diagnosis:
    share = used / max(total, 1)
    what = f"{share:.0%} of its flash is used"
    mend = f"millpond run --admin {name} -- du -xsh /volume/public"
    if share >= _NEARLY_FULL:
        return (wrong if share >= _FULL else warning)("flash", what, mend=mend, device=name)
    return ok("flash", what if share > 0.5 else "at least half of its flash is free", device=name)


def concerns(infos: Sequence[DeviceInfo]) -> list[str]:
    """Return lines that name devices with unencrypted private data, and those whose drives warn."""
    found = [check(info) for check in (at_rest, drive) for info in infos]
    warnings = (each for each in found if each and each.verdict is Verdict.WARNING)
    return [line for line, _ in folded(warnings)]


def drive(info: DeviceInfo) -> Diagnosis | None:
    """Return the health of a device's drive, None where there is none, or nothing is told."""
    found = info.load.drive if info.load else None
    if found is None or found.kind in ("none", "unknown"):
        return None
    if found.warning:
        return warning("drive", f"its drive ({found.kind}) warns", said=found.warning, device=info.name)
    if found.wear is not None and found.wear >= _WORN:
        return warning("drive", f"its drive ({found.kind}) is {found.wear:.0%} worn", device=info.name)
    return ok("drive", f"its drive ({found.kind}) has no warning", device=info.name)


def at_rest(info: DeviceInfo) -> Diagnosis | None:
    """Return whether a device's private data are encrypted, None where it does not answer."""
    if info.welcome is None:
        return None
    if info.welcome.at_rest.cipher:
        return ok("encryption", "private data are encrypted on the flash", device=info.name)
    what = "private data are not encrypted on the flash"
    return warning("encryption", what, said=info.welcome.at_rest.reason, device=info.name)
