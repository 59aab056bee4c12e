# SPDX-License-Identifier: Apache-2.0
"""A board in QEMU: its command line, and the error where QEMU cannot start."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images import boards
from millpond.images.runtime import qemu
from millpond.images.runtime.qemu import QemuBoard, QemuSpec
from millpond.images.runtime.supervisor import BoardSupervisor
from millpond.linux import sockets
from millpond.linux.syscalls import drop_capabilities

from ..waiting import eventually

MEMBERS = 4242
"""The group that a fleet's directory is shared with."""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QemuSpec:
    """A board whose firmware is a file of this test; QEMU itself is not needed."""
    (tmp_path / "code.fd").touch()
    (tmp_path / "vars.fd").write_bytes(b"variables")
    monkeypatch.setattr(qemu, "FIRMWARE", (tmp_path / "none.fd", tmp_path / "code.fd"))
    monkeypatch.setattr(qemu, "VARIABLES", tmp_path / "vars.fd")
    directory = tmp_path / "fleet" / "qemu0"
    directory.mkdir(parents=True)
    return QemuSpec("qemu0", directory, boards.read("qemu-virt"))


def pairs(argv: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(argv))


def test_the_tunnel_is_its_only_network(spec: QemuSpec) -> None:
    argv = qemu.arguments(spec)
    assert "-nodefaults" in argv
    assert not [word for word in argv if "net" in word or "hostfwd" in word]
    assert ("-chardev", "socket,id=doorbells,path=slot/doorbells") in pairs(argv)
    assert ("-device", "ivshmem-doorbell,chardev=doorbells,vectors=3") in pairs(argv)


def test_the_board_says_what_the_machine_is(spec: QemuSpec, tmp_path: Path) -> None:
    assert spec.board.qemu
    argv = qemu.arguments(spec)
    position = argv.index(spec.board.qemu.arguments[0])
    assert tuple(argv[position:][: len(spec.board.qemu.arguments)]) == spec.board.qemu.arguments
    assert {("-m", "1024"), ("-smp", "2"), ("-name", "qemu0")} <= pairs(argv)
    assert ("-drive", f"if=pflash,format=raw,readonly=on,file={tmp_path / 'code.fd'}") in pairs(argv)
    drives = [more for word, more in pairs(argv) if word == "-drive"]
    assert sum("file=disk.img" in one for one in drives) == 1
    assert sum("file=flash.img" in one for one in drives) == 1
    assert not [one for one in drives if "cache=unsafe" in one or "snapshot" in one]


def test_a_board_without_a_machine_in_qemu_is_refused(spec: QemuSpec) -> None:
    real = dataclasses.replace(spec, board=boards.read("bluefield2"))
    with pytest.raises(LocalError, match="BlueField-2 cannot be run in QEMU"):
        qemu.arguments(real)


def test_what_is_missing_is_named_with_its_package(
    spec: QemuSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(qemu, "PROGRAM", "true")
    assert qemu.refusal_reason() == ""
    with pytest.raises(LocalError, match=r"qemu0 has no disk\.img: 'millpond emulate --qemu' makes it"):
        QemuBoard(spec).power_on()
    (tmp_path / "code.fd").unlink()
    assert "apt install qemu-efi-aarch64" in qemu.refusal_reason()
    monkeypatch.setattr(qemu, "PROGRAM", "qemu-system-none")
    with pytest.raises(LocalError, match="qemu-system-none is not installed: sudo apt install"):
        QemuBoard(spec).power_on()


def test_a_board_gets_a_flash_and_firmware_of_its_own_once(spec: QemuSpec) -> None:
    board = QemuBoard(spec)
    board._prepare()
    flash, variables = spec.directory / "flash.img", spec.directory / "variables.fd"
    assert (flash.stat().st_size, flash.stat().st_blocks) == (4096 << 20, 0)
    assert stat.S_IMODE(flash.stat().st_mode) == 0o600
    assert variables.stat().st_size == 64 << 20
    with flash.open("r+b") as file:
        file.write(b"mine")
    variables.write_bytes(b"changed")
    board._prepare()
    with flash.open("rb") as file:
        assert file.read(4) == b"mine"
    assert variables.read_bytes() == b"changed"


def test_a_board_that_cannot_start_leaves_nothing_running(
    spec: QemuSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qemu, "PROGRAM", "true")
    monkeypatch.setattr(qemu, "_SERVER_SECONDS", 0.0)
    (spec.directory / "disk.img").touch()
    board = QemuBoard(spec)
    with pytest.raises(LocalError, match=r"qemu0: the doorbell server does not start: see console\.log"):
        board.power_on()
    assert board.pids == set()
    assert not board.died()
    board.shut_down()
    board.power_off(0)


@pytest.fixture
def firmware() -> Iterator[Path]:
    """A file that every user may read."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(1 << 20)
        Path(file.name).chmod(0o644)
        yield Path(file.name)


def ids(pid: int, name: str) -> set[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return set(next(line for line in lines if line.startswith(name + ":")).split()[1:])


def reached_without_capabilities(path: Path) -> bool:
    """Whether root can connect without CAP_DAC_OVERRIDE, as the host's end of the tunnel does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            drop_capabilities()
            sockets.connect(path, 5.0).close()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.expected_log("its power is cut")
@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="there is no QEMU")
@pytest.mark.skipif(not qemu.drops_privileges(), reason="only root can become another user")
def test_qemu_is_confined_and_not_root(
    spec: QemuSpec, firmware: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of another kind, which has no processor, opens the same files."""
    monkeypatch.setattr(qemu, "PROGRAM", "qemu-system-x86_64")
    monkeypatch.setattr(qemu, "FIRMWARE", (firmware,))
    monkeypatch.setattr(qemu, "_FIRMWARE_BYTES", 1 << 20)
    around = [spec.directory.parent, spec.directory.parent.parent]
    os.chown(around[0], -1, MEMBERS)
    around[0].chmod(0o710)
    before = [(path.stat().st_mode, path.stat().st_gid) for path in around]
    assert [mode & 0o007 for mode, _ in before] == [0, 0]  # closed to QEMU's user, as a fleet's directory is
    (spec.directory / "disk.img").write_bytes(bytes(1 << 20))
    (spec.directory / "disk.img").chmod(0o600)
    spec.directory.chmod(0o700)
    hardware = spec.board.qemu
    assert hardware
    machine = dataclasses.replace(hardware, arguments=("-machine", "q35,accel=tcg"), memory=64)
    spec = dataclasses.replace(spec, board=dataclasses.replace(spec.board, qemu=machine), extra=("-S",))
    board = QemuBoard(spec)
    try:
        board.power_on()
        console = spec.directory / "console.log"
        eventually((spec.directory / "slot" / "qmp").exists, "QEMU has started")
        assert board.exit_code is None, console.read_text()
        (pid,) = (pid for pid in board.pids if "qemu" in Path(f"/proc/{pid}/comm").read_text())
        assert ids(pid, "Uid") == ids(pid, "Gid") == {str(qemu.USER)}
        assert ids(pid, "CapEff") == ids(pid, "CapPrm") == {"0" * 16} and ids(pid, "Groups") == set()
        assert ids(pid, "Seccomp") == {"2"}
        assert reached_without_capabilities(spec.directory / "slot" / "doorbells")
        assert before == [(path.stat().st_mode, path.stat().st_gid) for path in around]
        board.shut_down()  # over QMP, which is open to root
    finally:
        board.power_off(0)


class Flaky:
    """A board that dies at once, and cannot be switched on for a while."""

    name = "csd0"
    pids: set[int] = set()  # noqa: RUF012 - it has none

    def __init__(self, refusals: int) -> None:
        self.refusals, self.starts, self.on = refusals, 0, False
        self.dead = False

    def power_on(self) -> None:
        self.starts += 1
        if 1 < self.starts <= 1 + self.refusals:
            raise LocalError("csd0: no doorbell")
        self.dead = self.starts == 1
        self.on = not self.dead

    def died(self) -> bool:
        dead, self.dead = self.dead, False
        return dead

    def shut_down(self) -> None:
        self.on = False

    off_seconds = 0.0

    def power_off(self, patience: float) -> None:
        self.on = False


@pytest.mark.expected_log("went down; it is switched on again|cannot be switched on, it is tried again")
def test_a_board_that_cannot_be_switched_on_again_leaves_the_others_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millpond.images.runtime.supervisor.RESET_SECONDS", 0.0)
    board = Flaky(refusals=3)
    backplane = BoardSupervisor([board])
    backplane.power_on()
    for _ in range(10):
        backplane.tend()
    assert board.on and board.starts == 5
