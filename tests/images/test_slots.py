# SPDX-License-Identifier: Apache-2.0
"""A device's slots: the firmware's entries and order, trials and what ends them, and which image is taken."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.build.recipe import RECIPE
from millpond.images.ondevice import bless, boot_entries
from millpond.images.ondevice.boot_entries import BootEntries

PARTITIONS = {
    "A": "6d0a8a3e-5f0e-4f0c-9c0c-0123456789ab",
    "B": "8b1f9a3e-1111-4f0c-8c0c-0123456789ab",
}
ELSEWHERE = "00000000-1111-4f0c-8c0c-0123456789ab"
VERBOSE = """BootCurrent: 0004
BootNext: 0004
Timeout: 3 seconds
BootOrder: 0003,0004,0001
Boot0000  UiApp\tFvVol(64074afe-340a-4be6-94ba-91b5b4d0f71e)/FvFile(462caa21-7614-4503-836e-8ab6f4662331)
Boot0001* UEFI Misc Device\tPciRoot(0x0)/Pci(0x1,0x0){auto_created_boot_option}
Boot0003* A\tHD(1,GPT,6D0A8A3E-5F0E-4F0C-9C0C-0123456789AB,0x800,0x30000)/File(\\EFI\\BOOT\\BOOTAA64.EFI)
Boot0004* B\tHD(2,GPT,8b1f9a3e-1111-4f0c-8c0c-0123456789ab,0x30800,0x30000)/File(\\EFI\\BOOT\\BOOTAA64.EFI)
"""


class Firmware:
    """The firmware as efibootmgr shows it: entries that can be made, and an order that can be set."""

    def __init__(self, order: str, **labels: str) -> None:
        self.order = [number for number in order.split(",") if number]
        self.labels = {number.removeprefix("n"): label for number, label in labels.items()}
        self.partitions = {n: PARTITIONS[label] for n, label in self.labels.items() if label in PARTITIONS}
        self.calls: list[str] = []
        self.current = ""

    def __call__(self, *arguments: str) -> str:
        self.calls += arguments[:1]
        if arguments[:1] == ("--create-only",):
            free = next(n for n in (f"{i:04X}" for i in range(99)) if n not in self.labels)
            label = self.labels[free] = arguments[arguments.index("--label") + 1]
            assert arguments[arguments.index("--part") + 1] == {"A": "1", "B": "2"}[label]
            self.partitions[free] = PARTITIONS[label]
        elif arguments[-1] == "--delete-bootnum":
            del self.labels[arguments[1]]
            self.order = [number for number in self.order if number != arguments[1]]
        elif arguments[:1] == ("--bootorder",):
            assert re.fullmatch(r"[0-9A-F]{4}(,[0-9A-F]{4})*", arguments[1])
            self.order = arguments[1].split(",")
            assert set(self.order) <= set(self.labels)
        lines = [f"BootOrder: {','.join(self.order)}"] if self.order else ["No BootOrder is set"]
        lines += [f"BootCurrent: {self.current}"] if self.current else []
        shown = [f"Boot{n}* {label}\t{self._path(n)}" for n, label in sorted(self.labels.items())]
        return "\n".join([*lines, *shown]) + "\n"

    def _path(self, number: str) -> str:
        if number not in self.partitions:
            return "PciRoot(0x0)/Pci(0x1,0x0)"
        return f"HD(1,GPT,{self.partitions[number]},0x800,0x30000)/File({boot_entries.PROGRAM})"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk that was booted: a table of partitions in a file, and its nodes in /dev and /sys."""
    dev, sys = tmp_path / "dev", tmp_path / "sys"
    (dev / "millpond").mkdir(parents=True)
    (sys / "class").mkdir(parents=True)
    table = bytearray(4096)
    table[512:520], table[584:600] = b"EFI PART", struct.pack("<QII", 2, 16, 128)
    for number, (slot, guid) in enumerate(PARTITIONS.items(), 1):
        (dev / f"vda{number}").touch()
        (dev / "millpond" / f"esp{slot}").symlink_to(f"../vda{number}")
        (sys / "devices/block/vda" / f"vda{number}").mkdir(parents=True)
        (sys / "devices/block/vda" / f"vda{number}" / "partition").write_text(f"{number}\n")
        (sys / "class/block").mkdir(exist_ok=True)
        (sys / "class/block" / f"vda{number}").symlink_to(sys / "devices/block/vda" / f"vda{number}")
        at = 1024 + 128 * (number - 1) + 16
        table[at - 16 : at] = uuid.uuid4().bytes_le
        table[at : at + 16] = uuid.UUID(guid).bytes_le
    (dev / "vda").write_bytes(table)
    monkeypatch.setattr(boot_entries, "PARTITIONS", dev / "millpond")
    monkeypatch.setattr(boot_entries, "SYS_BLOCK", sys / "class/block")
    return dev / "vda"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, disk: Path) -> type[Firmware]:
    class Used(Firmware):
        def __init__(self, order: str, **labels: str) -> None:
            super().__init__(order, **labels)
            monkeypatch.setattr(boot_entries, "_efibootmgr", self)

    return Used


def parse(text: str) -> BootEntries:
    return boot_entries.parse(text, PARTITIONS)


def test_what_efibootmgr_prints_is_understood() -> None:
    entries = parse(VERBOSE)
    assert entries.order == ("0003", "0004", "0001") and entries.current == "0004"
    assert entries.numbers == {"UiApp": "0000", "A": "0003", "B": "0004", "UEFI Misc Device": "0001"}
    assert entries.strays == ()


def test_firmware_without_an_order_or_entries_is_understood() -> None:
    none = "BootCurrent: 0000\nNo BootOrder is set; firmware will attempt recovery\n"
    assert parse(none) == BootEntries({}, (), current="0000")
    assert parse("BootOrder: \n") == parse("") == BootEntries({}, ())


def test_of_two_entries_with_a_name_the_first_that_starts_the_slot_counts() -> None:
    other = f"\tHD(1,GPT,{ELSEWHERE},0x800,0x30000)/File(x)\n"
    own = f"\tHD(1,GPT,{PARTITIONS['A']},0x800,0x30000)/File(x)\n"
    found = parse(
        f"Boot0001* A{other}Boot0002* A{own}Boot0003* A{own}Boot0004* B\tPciRoot(0x0)\nBoot0005* B\n"
    )
    assert found.numbers == {"A": "0002"}
    assert found.strays == ("0001", "0003", "0004", "0005")


def test_the_partitions_of_the_slots_are_read_from_the_table_of_the_booted_disk(disk: Path) -> None:
    assert boot_entries.slot_partitions() == PARTITIONS
    assert boot_entries.boot_disk() == "/dev/vda"
    (disk.parent / "millpond/espB").unlink()
    with pytest.raises(LocalError, match="no partition espB"):
        boot_entries.slot_partitions()


def test_entries_that_start_another_disk_are_made_anew(use: type[Firmware]) -> None:
    """A disk that was flashed again, or a second one: entries stayed, and a trial started what was there."""
    firmware = use("0003,0004,0001", n0001="UEFI Misc Device", n0003="A", n0004="B")
    firmware.partitions |= {"0003": ELSEWHERE, "0004": ELSEWHERE}
    assert not boot_entries.is_trial("A")
    done = boot_entries.mend("A", "/dev/vda")
    assert [line for line in done if "0003" in line and "removed" in line]
    slots = {label: firmware.partitions[n] for n, label in firmware.labels.items() if label in PARTITIONS}
    assert slots == PARTITIONS
    assert firmware.labels[firmware.order[0]] == "A" and firmware.order[2:] == ["0001"]
    assert boot_entries.mend("A", "/dev/vda") == []


def test_a_trial_stays_one_beside_an_entry_of_another_disk(use: type[Firmware]) -> None:
    firmware = use("0002,0003", n0002="A", n0003="A", n0004="B")
    firmware.partitions["0002"] = ELSEWHERE
    boot_entries.mend("B", "/dev/vda")
    assert "0002" not in firmware.labels and firmware.order == ["0003", "0004"]
    assert boot_entries.is_trial("B")


A, B, OTHER = "0003", "0004", "0001"


@pytest.mark.parametrize(
    ("order", "slot", "had_entry", "wanted"),
    [
        ((A, B), "A", True, (A, B)),
        ((A, OTHER, B), "A", True, (A, OTHER, B)),  # not written without need
        ((A, OTHER), "A", True, (A, B, OTHER)),
        ((), "A", True, (A, B)),
        ((OTHER,), "B", True, (B, A, OTHER)),
        ((B, A), "B", True, (B, A)),
        ((A,), "B", True, (A, B)),  # a trial: RAUC takes the new slot out before it writes it
        ((A, B), "B", True, (A, B)),
        ((OTHER, A), "B", True, (A, B, OTHER)),  # a trial, though the firmware has put its own in front
        ((OTHER, A, B), "B", True, (A, B, OTHER)),
        ((OTHER, B), "A", False, (A, B, OTHER)),  # A's entry was lost: the firmware found it by itself
        ((B,), "A", False, (A, B)),
    ],
)
def test_the_order_begins_with_a_slot_and_a_trial_stays_one(
    order: tuple[str, ...], slot: str, had_entry: bool, wanted: tuple[str, ...]
) -> None:
    entries = BootEntries({"A": A, "B": B, "UEFI Misc Device": OTHER}, order)
    assert boot_entries.wanted_order(entries, slot, had_entry=had_entry) == wanted
    again = BootEntries(entries.numbers, wanted)
    assert boot_entries.wanted_order(again, slot) == wanted


def test_a_missing_entry_is_told() -> None:
    with pytest.raises(LocalError, match="no entry for slot B"):
        boot_entries.wanted_order(BootEntries({"A": A}, (A,)), "A")


def test_new_firmware_gets_both_entries_and_the_running_slot_first(use: type[Firmware]) -> None:
    firmware = use("0000", n0000="UEFI Misc Device")
    done = boot_entries.mend("A", "/dev/vda")
    assert firmware.labels == {"0000": "UEFI Misc Device", "0001": "A", "0002": "B"}
    assert firmware.order == ["0001", "0002", "0000"]
    assert len(done) == 3
    assert boot_entries.mend("A", "/dev/vda") == []
    assert firmware.calls.count("--bootorder") == 1


def test_a_trial_survives_the_mending(use: type[Firmware]) -> None:
    firmware = use("0001,0003", n0001="UEFI Misc Device", n0003="A", n0004="B")
    boot_entries.mend("B", "/dev/vda")
    assert firmware.order[0] == "0003"
    assert boot_entries.is_trial("B")
    boot_entries.make_first("B")
    assert firmware.order[0] == "0004"
    assert not boot_entries.is_trial("B")
    assert boot_entries.is_trial("A")


@pytest.mark.parametrize("order", ["", "0001", "0003,0004", "0001,0003"])
def test_where_no_other_slot_comes_next_there_is_no_trial(use: type[Firmware], order: str) -> None:
    use(order, n0001="UEFI Misc Device", n0003="A", n0004="B")
    assert not boot_entries.is_trial("A")


@pytest.mark.parametrize(("current", "trial"), [("0003", True), ("0001", False), ("", True)])
def test_a_trial_is_a_boot_by_the_slots_own_entry(use: type[Firmware], current: str, trial: bool) -> None:
    """Firmware that put an entry of its own first, for slot A, undid an update that was kept."""
    firmware = use("0001,0004,0003", n0001="UEFI Misc Device", n0003="A", n0004="B")
    firmware.current = current
    boot_entries.mend("A", "/dev/vda")
    assert boot_entries.is_trial("A") == trial
    assert firmware.order == ["0004", "0003", "0001"]


def test_an_efibootmgr_that_fails_once_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "efibootmgr"
    program.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/once ] && exec echo BootOrder: 0001\n>{tmp_path}/once\nexit 5\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(boot_entries, "EFIBOOTMGR", str(program))
    monkeypatch.setattr(boot_entries, "_EFI_PAUSE_SECONDS", 0.0)
    assert boot_entries._efibootmgr("--verbose") == "BootOrder: 0001\n"
    (tmp_path / "once").unlink()
    program.write_text("#!/bin/sh\necho busy >&2\nexit 5\n")
    with pytest.raises(LocalError, match="efibootmgr --verbose: busy"):
        boot_entries._efibootmgr("--verbose")


def test_a_trial_that_cannot_be_told_at_once_is_judged(
    use: type[Firmware], restarts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: such a boot was taken for no trial, and the slot was neither kept nor left."""
    firmware, asked = use("0003,0004", n0003="A", n0004="B"), []

    def fail_first(*arguments: str) -> str:
        asked.append(arguments)
        if len(asked) < 3:
            raise LocalError("efibootmgr --verbose: did not end in 30 s")
        return firmware(*arguments)

    monkeypatch.setattr(boot_entries, "_efibootmgr", fail_first)
    monkeypatch.setattr(bless, "ASK_SECONDS", 60.0)
    monkeypatch.setattr(bless, "_ASK_PAUSE_SECONDS", 0.0)
    assert bless.main() == 1
    assert restarts == ["/usr/bin/systemctl reboot"]


def test_a_slot_without_an_entry_cannot_be_made_first(use: type[Firmware]) -> None:
    use("0001", n0001="UEFI Misc Device")
    with pytest.raises(LocalError, match="no entry for slot A"):
        boot_entries.make_first("A")


def good() -> str:
    return ""


def test_a_slot_is_kept_once_the_agent_was_greeted(tmp_path: Path) -> None:
    kept: list[str] = []
    assert "did not greet" in bless.judge("B", tmp_path / "greeted", 0.0, good, kept.append)
    assert kept == []
    (tmp_path / "greeted").touch()
    assert bless.judge("B", tmp_path / "greeted", 0.0, good, kept.append) == ""
    assert kept == ["B"]


def test_a_slot_in_which_no_job_can_run_is_left(tmp_path: Path) -> None:
    """A slot whose torch, worker or volume was broken was kept: its agent answered the host."""
    kept: list[str] = []
    (tmp_path / "greeted").touch()
    reason = bless.judge("B", tmp_path / "greeted", 0.0, lambda: "the worker: no torch", kept.append)
    assert reason == "the worker: no torch" and kept == []


def test_a_slot_that_cannot_be_kept_is_left(tmp_path: Path) -> None:
    def fail(_slot: str) -> None:
        raise LocalError("efibootmgr --bootorder: no")

    (tmp_path / "greeted").touch()
    assert "it cannot be kept: efibootmgr" in bless.judge("B", tmp_path / "greeted", 0.0, good, fail)


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("pass", ""),
        ("print('fine', file=sys.stderr)", ""),
        (
            "sys.exit('the volume: /volume/public does not hold it')",
            "the volume: /volume/public does not hold it",
        ),
        ("import millpond.none", "ModuleNotFoundError: No module named 'millpond.none'"),
        ("sys.exit(3)", "the test of jobs ended with 3"),
        ("os.kill(os.getpid(), 9)", "the test of jobs ended with -9"),
        ("time.sleep(60)", "the test of jobs did not end in 1 s"),
    ],
)
def test_the_reason_is_what_the_test_of_jobs_said_last(program: str, fault: str) -> None:
    seconds = 1.0 if "sleep" in program else 60.0
    argv = (sys.executable, "-c", f"import os, sys, time; {program}")
    assert bless.jobs_fault(argv, seconds) == fault


def test_the_slot_before_learns_why_a_trial_failed(
    use: type[Firmware], restarts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use("0003,0004", n0003="A", n0004="B")
    (tmp_path / "greeted").touch()
    told = []

    def hang(_path: Path, _seconds: float) -> bool:
        told.append(boot_entries.trial_report())
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bless, "wait", hang)
        assert bless.main() == 1
    assert told == ["slot B was restarted before its trial ended: it hung, or its power was cut"]
    assert boot_entries.trial_report() == "slot B: the host did not greet the agent"
    (tmp_path / "slot").write_text("SLOT=A\n")
    assert bless.main() == 0
    assert "the last trial failed: slot B: the host did not greet" in capsys.readouterr().out
    (tmp_path / "slot").write_text("SLOT=B\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bless, "judge", lambda *_: "")
        assert bless.main() == 0
    assert boot_entries.trial_report() == ""
    assert len(restarts) == 1


def test_a_state_that_cannot_be_written_changes_no_judgement(
    use: type[Firmware], restarts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot_entries, "REPORT", tmp_path / "none" / "report")
    use("0003,0004", n0003="A", n0004="B")
    monkeypatch.setattr(bless, "judge", lambda *_: "")
    assert bless.main() == 0
    assert restarts == []


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What ``bless`` runs, instead of running it; it waits for no greeting here."""
    calls: list[str] = []
    monkeypatch.setattr(bless.subprocess, "run", lambda argv, **_: calls.append(" ".join(argv)))
    monkeypatch.setattr(bless, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(bless, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(bless, "_ASK_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(bless, "GREETED", tmp_path / "greeted")
    monkeypatch.setattr(boot_entries, "REPORT", tmp_path / "report")
    monkeypatch.setattr(boot_entries, "SLOT_FILE", tmp_path / "slot")
    (tmp_path / "slot").write_text("SLOT=B\n")
    return calls


def test_only_a_trial_that_failed_restarts_the_machine(use: type[Firmware], restarts: list[str]) -> None:
    use("0004,0003", n0003="A", n0004="B")
    assert bless.main() == 0
    use("", n0001="UEFI Misc Device")
    assert bless.main() == 0
    assert restarts == []
    use("0003,0004", n0003="A", n0004="B")
    assert bless.main() == 1
    assert restarts == ["/usr/bin/systemctl reboot"]


def test_firmware_that_cannot_be_asked_restarts_nothing(
    restarts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: str) -> str:
        raise LocalError("efibootmgr: EFI variables are not supported on this system.")

    monkeypatch.setattr(boot_entries, "_efibootmgr", fail)
    assert bless.main() == 0
    assert restarts == []


OWN = 2000


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device that runs the image ``OWN``, with a slot to be written and the report of an earlier trial."""
    (tmp_path / "release.toml").write_text(f'version = "0.1.0"\nserial = {OWN}\nboard = "qemu-virt"\n')
    (tmp_path / "trial").write_text("it hung")
    (tmp_path / "esp").write_bytes(b"x" * (128 << 10))
    return tmp_path


def before_update(device: Path, version: str) -> subprocess.CompletedProcess[str]:
    text = (RECIPE / "root/usr/lib/millpond/before-update").read_text()
    places = {
        "/opt/millpond/release.toml": "release.toml",
        "/var/lib/millpond-trial": "trial",
        "/var/lib/millpond-update/older": "older",
    }
    for place, here in places.items():
        assert place in text
        text = text.replace(place, str(device / here))
    (device / "manifest.raucm").write_text(
        f"[update]\ncompatible=millpond-qemu-virt\n{version}\n\n[bundle]\n"
    )
    slots = {"RAUC_TARGET_SLOTS": "1 2", "RAUC_BUNDLE_MOUNT_POINT": str(device)}
    slots |= {"RAUC_SLOT_CLASS_1": "rootfs", "RAUC_SLOT_DEVICE_1": str(device / "root")}
    slots |= {"RAUC_SLOT_CLASS_2": "esp", "RAUC_SLOT_DEVICE_2": str(device / "esp")}
    argv = ["/bin/sh", "-c", text]
    return subprocess.run(argv, env=os.environ | slots, capture_output=True, text=True, timeout=60)


def is_spoilt(device: Path) -> bool:
    content = (device / "esp").read_bytes()
    assert content.endswith(b"x" * (64 << 10)) and len(content) == 128 << 10
    return not content.startswith(b"x")


@pytest.mark.parametrize("serial", [OWN, OWN + 1])
def test_a_later_image_and_the_same_are_installed(device: Path, serial: int) -> None:
    done = before_update(device, f"version=0.1.0+{serial}")
    assert (done.returncode, done.stderr) == (0, "")
    assert is_spoilt(device) and not (device / "trial").exists() and not (device / "root").exists()


@pytest.mark.parametrize("version", [f"version=0.1.0+{OWN - 1}", "version=0.1.0", "version=0.1.0+x", ""])
def test_an_older_image_is_refused_by_the_device(device: Path, version: str) -> None:
    """Before: only the command line refused an older image, whose signature is good."""
    done = before_update(device, version)
    assert done.returncode == 1 and f"is older than {OWN}, which runs" in done.stderr
    assert not is_spoilt(device) and (device / "trial").exists()


def test_an_older_image_that_its_owner_has_named_is_installed(device: Path) -> None:
    (device / "older").write_text(f"{OWN - 5}\n")
    assert before_update(device, f"version=0.1.0+{OWN - 6}").returncode == 1
    assert before_update(device, f"version=0.1.0+{OWN - 5}").returncode == 0
    assert is_spoilt(device)
