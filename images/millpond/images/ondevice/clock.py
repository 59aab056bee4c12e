# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.clock start|set|save``: the clock of a board without a battery.

``start`` sets it forward to where it was when it was last saved, ``save`` saves it, and ``set`` takes the
time that the host has told the agent. A board whose own clock (RTC) is right needs none of it. A saved time
is a floor: no host sets the clock before it, so a certificate that has expired is not valid again. After the
end of the fleet's authority no certificate is valid, and no host could tell its time: no clock counts as
right there, and ``start`` sets one back to the floor.
"""

from __future__ import annotations

import math
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.ondevice.provision import IDENTITY
from millpond.linux.files import write_durably

IMAGE = Path("/usr/lib/clock-epoch")
"""Its modification time is that of the image."""
SAVED = Path("/var/lib/millpond-clock")
TOLD = Path("/run/millpond/host-time")
"""The host's time and the seconds since this boot at which the agent heard it."""
RTC = Path("/sys/class/rtc/rtc0/since_epoch")
AUTHORITY = IDENTITY / "ca.pem"
LEAST_SECONDS = 30.0
"""A clock that is less wrong is left as it is."""


@dataclass(frozen=True, slots=True)
class Places:
    """The files of a board."""

    image: Path = IMAGE
    saved: Path = SAVED
    told: Path = TOLD
    rtc: Path = RTC
    authority: Path = AUTHORITY


def floor(places: Places) -> float:
    """Return the time before which it cannot be: of the image, and of the last save. Raises OSError."""
    image, saved = places.image.stat().st_mtime, _number(places.saved)
    return max(image, saved) if saved < ceiling(places) else image


def ceiling(places: Places) -> float:
    """Return the end of the fleet's authority, infinite for a board that has none yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(places.authority)
    except OSError:  # of the file, or of TLS for what is no certificate
        return math.inf
    ends = (str(one.get("notAfter")) for one in context.get_ca_certs())
    return min(map(ssl.cert_time_to_seconds, ends), default=math.inf)


def has_right_rtc(places: Places) -> bool:
    """Return whether the board's own clock has a time that can be. Raises OSError."""
    return floor(places) <= _number(places.rtc) < ceiling(places)


def host_time(places: Places, since_boot: float) -> float:
    """Return the host's time now, by what it told when. Raises LocalError, OSError."""
    try:
        told, heard = map(float, places.told.read_text().split())
    except ValueError:
        raise LocalError(f"{places.told} holds no time") from None
    if not (0 <= heard <= since_boot and math.isfinite(told)):
        raise LocalError(f"{places.told} is no time of this boot")
    return told + since_boot - heard


def wanted(places: Places, now: float, since_boot: float) -> float | None:
    """Return what the clock, which shows ``now``, should show by the host; None if it stays as it is. Raises
    LocalError for a time before the floor or after all certificates, OSError.
    """
    if has_right_rtc(places):
        return None
    told, least = host_time(places, since_boot), floor(places)
    if told < least:
        raise LocalError(f"the host says that it is {_shown(told)}, but {_shown(least)} is over")
    if told >= ceiling(places):
        raise LocalError(f"the host says that it is {_shown(told)}, but no certificate is valid then")
    return told if abs(told - now) > LEAST_SECONDS else None


def save(places: Places, now: float) -> None:
    """Make ``now`` the floor, if it is later, on a board whose own clock is not right. Raises OSError."""
    if has_right_rtc(places) or not floor(places) < now < ceiling(places):
        return
    write_durably(places.saved, f"{now:.0f}\n".encode())


def _number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (FileNotFoundError, ValueError):
        return 0.0


def _shown(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(when))


def _put(when: float) -> None:
    print(f"millpond: the clock is set from {_shown(time.time())} to {_shown(when)}", flush=True)
    time.clock_settime(time.CLOCK_REALTIME, when)


def start(places: Places) -> None:
    """Set the clock to the floor from before it, and from where no certificate is valid. Raises OSError."""
    if not (least := floor(places)) <= time.time() < ceiling(places):
        _put(least)


def take(places: Places) -> None:
    """Set the clock to the host's time, if it is needed, and save it. Raises LocalError, OSError."""
    when = wanted(places, time.time(), time.clock_gettime(time.CLOCK_BOOTTIME))
    if when is not None:
        _put(when)
    save(places, time.time())


_ACTIONS: dict[str, Callable[[Places], None]] = {
    "start": start,
    "set": take,
    "save": lambda places: save(places, time.time()),
}


def main() -> int:
    """Do what the argument says. Exit codes: 0 done, or nothing to do; 1 it cannot be; 2 no such action."""
    if len(sys.argv) != 2 or sys.argv[1] not in _ACTIONS:
        print(f"usage: clock {'|'.join(_ACTIONS)}", file=sys.stderr)
        return 2
    try:
        _ACTIONS[sys.argv[1]](Places())
    except (LocalError, OSError, OverflowError) as error:
        print(f"millpond: the clock stays as it is: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
