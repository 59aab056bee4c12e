# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.boot_entries`` mends the firmware's entries at every boot;
``status`` prints which slot runs and what is in it.

Slots A and B have an entry each, by which RAUC chooses: BootNext for a trial, BootOrder for good. Some
firmware forgets entries, after a power cut or when it is cleared; then the slot that runs is made the first.
Some puts entries of its own before ours; then ours are put first again, in the order that they had. Entries
of these names that start another disk than the booted one are removed: a trial, or the slot
before, would be whatever that disk holds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.ondevice import gpt

SLOTS = ("A", "B")
SLOT_FILE = Path("/run/millpond-slot")
RELEASE = Path("/opt/millpond/release.toml")
REPORT = Path("/var/lib/millpond-trial")
"""Why the last trial failed; empty or absent if it did not, or if the slot did not come that far."""
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROGRAM = r"\EFI\BOOT\BOOTAA64.EFI"
PARTITIONS = Path("/dev/millpond")
"""The partitions of the disk that was booted."""
SYS_BLOCK = Path("/sys/class/block")
EFIBOOTMGR = "/bin/efibootmgr"
_EFI_SECONDS, _EFI_TRIES, _EFI_PAUSE_SECONDS = 30.0, 5, 1.0
_ENTRY = re.compile(r"^Boot([0-9A-F]{4})\*?\s+([^\t]+?)(?:\t(.*))?$")
_PARTITION = re.compile(r"HD\(\d+,GPT,([0-9a-f-]{36}),", re.IGNORECASE)
_GPT_ENTRIES, _GPT_ENTRY, _GPT_GUID = (
    1024,
    128,
    16,
)  # bytes: their place, the size of one, the GUID's place in it


@dataclass(frozen=True, slots=True)
class BootEntries:
    """The firmware's boot entries: numbers by label, the order of the numbers, and the numbers of ``strays``:
    entries that have a slot's name and start something else, or that are there a second time. ``current``
    was booted; "" where the firmware does not tell.
    """

    numbers: dict[str, str]
    order: tuple[str, ...]
    strays: tuple[str, ...] = ()
    current: str = ""


def parse(text: str, partitions: Mapping[str, str]) -> BootEntries:
    """Parse the output of ``efibootmgr -v``; ``partitions`` has the GUID of each slot's ESP by the slot."""
    numbers: dict[str, str] = {}
    order: tuple[str, ...] = ()
    current = ""
    strays: list[str] = []
    for line in text.splitlines():
        if line.startswith("BootOrder: "):
            numbered = line.removeprefix("BootOrder: ").strip()
            order = tuple(numbered.split(",")) if numbered else ()
        elif line.startswith("BootCurrent: "):
            current = line.removeprefix("BootCurrent: ").strip()
        elif found := _ENTRY.match(line):
            number, label, path = found[1], found[2], found[3] or ""
            if label in SLOTS and (label in numbers or not _starts(path, partitions[label])):
                strays.append(number)
            else:
                numbers.setdefault(label, number)
    return BootEntries(numbers, order, tuple(strays), current)


def _starts(path: str, partition: str) -> bool:
    """Return whether a device path leads to the partition with this GUID."""
    found = _PARTITION.search(path)
    return found is not None and found[1].lower() == partition


def slot_partitions() -> dict[str, str]:
    """Return the GUIDs of the slots' ESPs on the disk that was booted, by the slot. Raises LocalError,
    OSError.
    """
    return {slot: _guid(PARTITIONS / f"esp{slot}") for slot in SLOTS}


def _guid(partition: Path) -> str:
    """Return a partition's GUID, from the table of its disk: names of udev could be another disk's copy."""
    node = (SYS_BLOCK / partition.resolve().name).resolve()
    if not (node / "partition").exists():
        raise LocalError(f"there is no partition {partition.name}")
    number = int((node / "partition").read_text())
    found = [one.guid for one in gpt.partitions(PARTITIONS.parent / node.parent.name) if one.number == number]
    if not found:
        raise LocalError(f"{partition.name} is not in the table of its disk")
    return found[0]


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
    known = _entries()
    for stray in known.strays:
        _efibootmgr("--bootnum", stray, "--delete-bootnum")
        done.append(f"the boot entry {stray}, which has a slot's name and starts something else, was removed")
    for number, name in enumerate(SLOTS, start=1):
        if name not in known.numbers:
            _efibootmgr(
                "--create-only", "--disk", disk, "--part", str(number), "--label", name, "--loader", PROGRAM
            )
            done.append(f"the boot entry of slot {name} was made")
    entries = _entries()
    order = wanted_order(entries, slot, had_entry=slot in known.numbers)
    if order != entries.order:
        _efibootmgr("--bootorder", ",".join(order))
        done.append(f"the boot order was {','.join(entries.order) or 'empty'}, it is {','.join(order)}")
    return done


def _entries() -> BootEntries:
    return parse(_efibootmgr("--verbose"), slot_partitions())


def _efibootmgr(*arguments: str) -> str:
    """Run efibootmgr, again where it fails: firmware is busy at times. Raises LocalError."""
    argv = [EFIBOOTMGR, *arguments]
    for left in reversed(range(_EFI_TRIES)):
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", check=False, timeout=_EFI_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise LocalError(f"{' '.join(argv)} did not end in {_EFI_SECONDS:.0f} s") from None
        if not done.returncode:
            break
        if not left:
            raise LocalError(f"efibootmgr {' '.join(arguments)}: {done.stderr.strip()}")
        time.sleep(_EFI_PAUSE_SECONDS)
    return done.stdout


def is_trial(slot: str) -> bool:
    """Return whether ``slot``, which runs, was booted by its own entry, and the next boot would take the
    other one. Firmware that boots a slot by an entry of its own tries nothing. Raises LocalError.
    """
    entries = _entries()
    own = entries.current in ("", entries.numbers.get(slot))
    return own and leader(entries) not in ("", slot)


def make_first(slot: str) -> None:
    """Have the next boots take ``slot``, by which RAUC counts it as good. Raises LocalError."""
    entries = _entries()
    own = entries.numbers.get(slot)
    if own is None:
        raise LocalError(f"the firmware has no entry for slot {slot}")
    order = (own, *(number for number in entries.order if number != own))
    if order != entries.order:
        _efibootmgr("--bootorder", ",".join(order))


def status() -> dict[str, str | int | bool]:
    """Return which slot runs, its contents, whether it is on trial, and how the last trial failed. Raises
    LocalError, OSError.
    """
    with RELEASE.open("rb") as file:
        release = tomllib.load(file)
    slot = running_slot()
    boot = BOOT.read_text().strip()
    return {**release, "slot": slot, "trial": is_trial(slot), "boot": boot, "report": trial_report()}


def trial_report() -> str:
    """Return why the last trial failed, as far as that is known."""
    try:
        return REPORT.read_text(errors="replace").strip()[:300]
    except OSError:
        return ""


def running_slot() -> str:
    """Return the slot that was booted, as the initramfs found it. Raises OSError."""
    return SLOT_FILE.read_text().strip().removeprefix("SLOT=")


def boot_disk() -> str:
    """Return the disk that was booted. Raises LocalError."""
    partition = (PARTITIONS / "espA").resolve()
    parent = (SYS_BLOCK / partition.name).resolve().parent
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
