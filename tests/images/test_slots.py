# SPDX-License-Identifier: Apache-2.0
"""Slots: the firmware's boot entries, their repair, and the decision to keep a new slot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.ondevice import bless, boot_entries
from millpond.images.ondevice.boot_entries import BootEntries

PLAIN = """BootCurrent: 0003
Timeout: 3 seconds
BootOrder: 0003,0004,0001
Boot0001* UEFI Misc Device
Boot0003* A
Boot0004* B
"""
VERBOSE = """BootCurrent: 0004
BootNext: 0004
Timeout: 3 seconds
BootOrder: 0003,0004,0001
Boot0000  UiApp\tFvVol(64074afe-340a-4be6-94ba-91b5b4d0f71e)/FvFile(462caa21-7614-4503-836e-8ab6f4662331)
Boot0001* UEFI Misc Device\tPciRoot(0x0)/Pci(0x1,0x0){auto_created_boot_option}
Boot0003* A\tHD(1,GPT,8d1f,0x800,0x30000)/File(\\EFI\\BOOT\\BOOTAA64.EFI)
Boot0004* B\tHD(2,GPT,9e2a,0x30800,0x30000)/File(\\EFI\\BOOT\\BOOTAA64.EFI)
"""


class Firmware:
    """The firmware as efibootmgr shows it: entries that can be made, and an order that can be set."""

    def __init__(self, order: str, **labels: str) -> None:
        self.order = [number for number in order.split(",") if number]
        self.labels = {number.removeprefix("n"): label for number, label in labels.items()}
        self.calls: list[str] = []

    def __call__(self, *arguments: str) -> str:
        self.calls += arguments[:1]
        if arguments[:1] == ("--create-only",):
            free = next(n for n in (f"{i:04X}" for i in range(99)) if n not in self.labels)
            self.labels[free] = arguments[arguments.index("--label") + 1]
        elif arguments[:1] == ("--bootorder",):
            assert re.fullmatch(r"[0-9A-F]{4}(,[0-9A-F]{4})*", arguments[1])
            self.order = arguments[1].split(",")
            assert set(self.order) <= set(self.labels)
        lines = [f"BootOrder: {','.join(self.order)}"] if self.order else ["No BootOrder is set"]
        return "\n".join([*lines, *(f"Boot{n}* {label}" for n, label in self.labels.items())]) + "\n"


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> type[Firmware]:
    class Used(Firmware):
        def __init__(self, order: str, **labels: str) -> None:
            super().__init__(order, **labels)
            monkeypatch.setattr(boot_entries, "_efibootmgr", self)

    return Used


@pytest.mark.parametrize("text", [PLAIN, VERBOSE])
def test_what_efibootmgr_prints_is_understood(text: str) -> None:
    entries = boot_entries.parse(text)
    assert entries.order == ("0003", "0004", "0001")
    assert {name: entries.numbers[name] for name in ("A", "B", "UEFI Misc Device")} == {
        "A": "0003",
        "B": "0004",
        "UEFI Misc Device": "0001",
    }
    assert "BootCurrent" not in str(entries) and len(entries.numbers) == text.count("* ") + text.count("  U")


def test_firmware_without_an_order_or_entries_is_understood() -> None:
    none = "BootCurrent: 0000\nNo BootOrder is set; firmware will attempt recovery\n"
    assert (
        boot_entries.parse(none)
        == boot_entries.parse("BootOrder: \n")
        == boot_entries.parse("")
        == BootEntries({}, ())
    )


def test_of_two_entries_with_a_name_the_first_counts() -> None:
    assert boot_entries.parse("Boot0001* A\nBoot0002* A\n").numbers == {"A": "0001"}


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


def test_a_slot_without_an_entry_cannot_be_made_first(use: type[Firmware]) -> None:
    use("0001", n0001="UEFI Misc Device")
    with pytest.raises(LocalError, match="no entry for slot A"):
        boot_entries.make_first("A")


def test_a_slot_is_kept_once_the_agent_was_greeted(tmp_path: Path) -> None:
    kept: list[str] = []
    assert not bless.judge("B", tmp_path / "greeted", 0.0, kept.append)
    assert kept == []
    (tmp_path / "greeted").touch()
    assert bless.judge("B", tmp_path / "greeted", 0.0, kept.append)
    assert kept == ["B"]


def test_a_slot_that_cannot_be_kept_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_slot: str) -> None:
        raise LocalError("rauc status mark-good booted: no")

    (tmp_path / "greeted").touch()
    assert not bless.judge("B", tmp_path / "greeted", 0.0, fail)
    assert "slot B cannot be kept: rauc" in capsys.readouterr().out


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What ``bless`` runs, instead of running it; it waits for no greeting here."""
    calls: list[str] = []
    monkeypatch.setattr(bless.subprocess, "run", lambda argv, **_: calls.append(" ".join(argv)))
    monkeypatch.setattr(bless, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(bless, "GREETED", tmp_path / "greeted")
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
