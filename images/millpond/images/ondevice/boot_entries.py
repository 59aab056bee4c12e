# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.boot_entries`` mends the firmware's entries at every boot;
``status`` prints which slot runs and what is in it.

Slots A and B have an entry each, by which RAUC chooses: BootNext for a trial, BootOrder for good. Some
firmware forgets entries, after a power cut or when it is cleared; then the slot that runs is made the first.
Some puts entries of its own before ours; then ours are put first again, in the order that they had.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError

SLOTS = ("A", "B")
SLOT_FILE = Path("/run/millpond-slot")
RELEASE = Path("/opt/millpond/release.toml")
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROGRAM = r"\EFI\BOOT\BOOTAA64.EFI"
_ENTRY = re.compile(r"^Boot([0-9A-F]{4})\*?\s+([^\t]+?)(?:\t.*)?$")


@dataclass(frozen=True, slots=True)
class BootEntries:
    """The firmware's boot entries: numbers by label, and the order of the numbers."""

    numbers: dict[str, str]
    order: tuple[str, ...]


def parse(text: str) -> BootEntries:
    """Parse the output of efibootmgr."""
    numbers: dict[str, str] = {}
    order: tuple[str, ...] = ()
    for line in text.splitlines():
        if line.startswith("BootOrder: "):
            numbered = line.removeprefix("BootOrder: ").strip()
            order = tuple(numbered.split(",")) if numbered else ()
        elif found := _ENTRY.match(line):
            numbers.setdefault(found[2], found[1])
    return BootEntries(numbers, order)


def leader(entries: BootEntries) -> str:
    """Return the slot that comes first in the order; "" if none is in it."""
    names = {number: name for name, number in entries.numbers.items() if name in SLOTS}
    return next((names[number] for number in entries.order if number in names), "")


def wanted_order(entries: BootEntries, slot: str, *, had_entry: bool = True) -> tuple[str, ...]:
    """Return the order that ``entries`` should have: both slots, the one that comes first now first.

    If that is not ``slot``, which runs, this boot is a trial, and RAUC decides. Without a slot in the
    order, or if ``slot`` had no entry, so that this can be no trial, ``slot`` comes first. Raises
    LocalError.
    """
    first = (leader(entries) if had_entry else "") or slot
    second = next(name for name in SLOTS if name != first)
    if missing := [name for name in (first, second) if name not in entries.numbers]:
        raise LocalError(f"the firmware has no entry for slot {missing[0]}")
    own = (entries.numbers[first], entries.numbers[second])
    if entries.order[:1] == own[:1]:
        return entries.order if own[1] in entries.order else (*own, *entries.order[1:])
    return (*own, *(number for number in entries.order if number not in own))


def mend(slot: str, disk: str) -> list[str]:
    """Make missing entries and put the order right; what was done. Raises LocalError."""
    done = []
    known = parse(_efibootmgr()).numbers
    for number, name in enumerate(SLOTS, start=1):
        if name not in known:
            _efibootmgr(
                "--create-only", "--disk", disk, "--part", str(number), "--label", name, "--loader", PROGRAM
            )
            done.append(f"the boot entry of slot {name} was made")
    entries = parse(_efibootmgr())
    order = wanted_order(entries, slot, had_entry=slot in known)
    if order != entries.order:
        _efibootmgr("--bootorder", ",".join(order))
        done.append(f"the boot order was {','.join(entries.order) or 'empty'}, it is {','.join(order)}")
    return done


def _efibootmgr(*arguments: str) -> str:
    done = subprocess.run(
        ["/bin/efibootmgr", *arguments], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise LocalError(f"efibootmgr {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def is_trial(slot: str) -> bool:
    """Return whether the next boot would take the other slot than ``slot``, which runs. Raises LocalError."""
    return leader(parse(_efibootmgr())) not in ("", slot)


def make_first(slot: str) -> None:
    """Have the next boots take ``slot``. Raises LocalError."""
    entries = parse(_efibootmgr())
    own = entries.numbers.get(slot)
    if own is None:
        raise LocalError(f"the firmware has no entry for slot {slot}")
    order = (own, *(number for number in entries.order if number != own))
    if order != entries.order:
        _efibootmgr("--bootorder", ",".join(order))


def status() -> dict[str, str | int | bool]:
    """Return which slot runs, its contents, and whether it is on trial. Raises LocalError, OSError."""
    with RELEASE.open("rb") as file:
        release = tomllib.load(file)
    slot = running_slot()
    return {**release, "slot": slot, "trial": is_trial(slot), "boot": BOOT.read_text().strip()}


def running_slot() -> str:
    """Return the slot that was booted, as the initramfs found it. Raises OSError."""
    return SLOT_FILE.read_text().strip().removeprefix("SLOT=")


def boot_disk() -> str:
    """Return the disk with the slots. Raises LocalError."""
    partition = Path("/dev/disk/by-partlabel/espA").resolve()
    parent = Path("/sys/class/block", partition.name).resolve().parent
    if parent.name == "block":
        raise LocalError("there is no partition espA")
    return f"/dev/{parent.name}"


def main() -> int:
    """Mend the entries, or print the status. Exit codes: 0 the entries are right, 1 they cannot be."""
    try:
        if sys.argv[1:] == ["status"]:
            print(json.dumps(status()))
            return 0
        for line in mend(running_slot(), boot_disk()):
            print(f"millpond: {line}", flush=True)
    except (LocalError, OSError) as error:
        print(f"millpond: the boot entries: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
