# SPDX-License-Identifier: Apache-2.0
"""``millpond update``: the choice of devices, their number at a time, and the stop after a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
import typer

from millpond.base.errors import LocalError, RemoteError
from millpond.host.cli import update
from millpond.host.cli.options import Format
from millpond.host.cli.update import Restarts, UpdateOutcome, UpdatePhases, check, roll
from millpond.host.remote import bundles, device_update, ssh
from millpond.host.remote.bundles import Bundle
from millpond.host.remote.device_update import DeviceUpdate, Running
from millpond.host.terminal.progress_lines import ProgressLines
from millpond.linux.file_lock import locked

from .update_support import make_fleet, make_image


class Devices:
    """Devices of which ``together`` are updated at the same time, and note how many were."""

    def __init__(self, *failing: str, together: int = 1) -> None:
        self.failing, self.begun, self.most = failing, list[str](), 0
        self._together = threading.Barrier(together, timeout=60)
        self._running = 0
        self._lock = threading.Lock()

    def update(self, name: str) -> UpdateOutcome:
        with self._lock:
            self.begun.append(name)
            self._running += 1
            self.most = max(self.most, self._running)
        self._together.wait()
        time.sleep(0.02)  # for others that should not be there
        with self._lock:
            self._running -= 1
        return UpdateOutcome(name, "failed" if name in self.failing else "updated")


NAMES = [f"dev{number}" for number in range(6)]


@pytest.mark.parametrize("at_once", [1, 2, 3, 10])
def test_so_many_at_a_time_in_order(at_once: int) -> None:
    devices = Devices(together=min(at_once, len(NAMES)))
    outcomes = roll(NAMES, at_once, devices.update)
    assert outcomes == [UpdateOutcome(name, "updated") for name in NAMES]
    assert devices.most == min(at_once, len(NAMES))
    assert sorted(devices.begun) == NAMES
    if at_once == 1:
        assert devices.begun == NAMES


def test_none_is_begun_after_a_failure() -> None:
    devices = Devices("dev2")
    outcomes = roll(NAMES, 1, devices.update)
    assert [one.state for one in outcomes] == ["updated"] * 2 + ["failed"] + ["untouched"] * 3
    assert devices.begun == NAMES[:3]


def test_those_that_have_begun_are_waited_for() -> None:
    begun, ended = threading.Event(), threading.Event()

    def update(name: str) -> UpdateOutcome:
        if name == "dev0":
            assert begun.wait(30)
            return UpdateOutcome(name, "failed")
        begun.set()
        time.sleep(0.5)  # for the failure to be noted
        ended.set()
        return UpdateOutcome(name, "updated")

    outcomes = roll(NAMES[:3], 2, update)
    assert ended.is_set()
    assert [one.state for one in outcomes] == ["failed", "updated", "untouched"]


def test_devices_must_be_of_the_images_board(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, "qemu-virt", "generic-uefi", "emulated")
    check(fleet, ["dev0"], "qemu-virt")
    for names, words in (
        ([], "name devices, or --all; of the board qemu-virt there are: dev0"),
        (["dev9"], "there is no device 'dev9'; the fleet has dev0, dev1, dev2"),
        (["dev0", "dev1"], "dev1 is a generic-uefi, the image is for a qemu-virt"),
        (["dev2"], "dev2 is emulated"),
        (["dev0", "dev0"], "dev0 is named twice"),
    ):
        with pytest.raises(LocalError, match=words) as caught:
            check(fleet, names, "qemu-virt")
        assert "\n" not in str(caught.value)


def test_all_means_all_of_the_board_and_no_others(tmp_path: Path) -> None:
    fleet = make_fleet(tmp_path, "qemu-virt", "generic-uefi", "qemu-virt")
    assert update._names(fleet, [], "qemu-virt", everybody=True) == ["dev0", "dev2"]
    assert update._names(fleet, ["dev2"], "qemu-virt", everybody=False) == ["dev2"]
    with pytest.raises(LocalError, match="leave out dev1, or --all"):
        update._names(fleet, ["dev1"], "qemu-virt", everybody=True)


def test_a_line_for_each_phase_and_how_much_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    shown = ProgressLines(tell=told.append)
    phases = UpdatePhases(shown, "dev0", 1000, Restarts(600.0))
    phases.watch("sending", 0)
    for _ in range(10):
        phases.watch("sending", 10)
    shown.look()
    phases.watch("sending", 900)
    shown.look()
    phases.watch("installing", 0)
    assert capsys.readouterr().out.splitlines() == ["dev0: sending", "dev0: installing"]
    assert [line.partition(",")[0] for line in told] == ["dev0: sending: 10% of 1.0 kB"]


def test_a_restart_says_how_long_it_has_lasted_and_what_the_last_one_took() -> None:
    """Before: a device that restarted for minutes said nothing meanwhile."""
    told, now, restarts = list[str](), [100.0], Restarts(600.0)
    shown = ProgressLines(tell=told.append, clock=lambda: now[0])
    for name in ("dev0", "dev1"):
        with UpdatePhases(shown, name, 1000, restarts, lambda: now[0]) as phases:
            phases.watch("restarting", 0)
            phases.watch("confirming", 0)
            now[0] += 80
            shown.look()
            phases.end()
    shown.look()
    first = "dev0: confirming: at most 10 min, 80 s so far"
    assert told == [first, "dev1: confirming: the last device took 80 s, at most 10 min, 80 s so far"]


NOW = Running("0.1.0", 1000, "qemu-virt", "A", False, "boot-1")


class Device(DeviceUpdate):
    """An update of a device that says of itself what the test wants; None: it cannot be reached."""

    def __init__(self, folder: Path, *says: Running | None, serial: int = 1000) -> None:
        _, manifest = make_image(folder, serial=serial)
        self.says = list(says)
        super().__init__(folder, "dev0", Bundle(folder / "b", "", manifest), lambda *_: None, 5.0)

    def _connected(self):  # type: ignore[no-untyped-def]
        return contextlib.nullcontext()

    def _running(self, transport: object) -> Running:
        found = self.says.pop(0)
        if found is None:
            raise RemoteError("dev0 cannot be reached")
        return found


@pytest.mark.parametrize(
    ("now", "serial", "error", "words"),
    [
        (dataclasses.replace(NOW, board="generic-uefi"), 1000, LocalError, "is a generic-uefi"),
        (dataclasses.replace(NOW, trial=True), 1001, RemoteError, "on trial still"),
        (NOW, 999, LocalError, "runs a later image .1000. than this one .999.; --allow-older"),
    ],
)
def test_what_must_not_be_installed_is_refused(
    tmp_path: Path, now: Running, serial: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Device(tmp_path, now, serial=serial).check()


def test_the_same_image_and_older_ones_on_request_are_installed(tmp_path: Path) -> None:
    assert Device(tmp_path, NOW).check() == NOW
    assert Device(tmp_path, NOW, serial=1).check(allow_older=True) == NOW


@pytest.mark.parametrize("allow_older", [False, True])
def test_the_device_is_told_which_older_image_it_may_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allow_older: bool
) -> None:
    lines: list[str] = []
    device = Device(tmp_path, NOW, serial=7)
    monkeypatch.setattr(device, "_send", lambda _transport: None)
    monkeypatch.setattr(device, "_wait", lambda before: before)
    monkeypatch.setattr(device, "_command", lambda _transport, line, *_words, **_more: lines.append(line))
    with contextlib.nullcontext() if allow_older else pytest.raises(LocalError, match="--allow-older"):
        device.run(allow_older=allow_older)
    assert [line for line in lines if line == "echo 7 >/var/lib/millpond-update/older"] == lines[:1]
    assert bool(lines) == allow_older


def test_a_device_that_is_being_updated_is_left_to_that(tmp_path: Path) -> None:
    """The second command took the first one's bundle away on the device."""
    device = Device(tmp_path, NOW)
    with (
        locked(tmp_path / "update.dev0.lock", "x"),
        pytest.raises(LocalError, match=rf"dev0 is being updated by another command \(pid {os.getpid()}\)"),
    ):
        device.run()
    assert device.says == [NOW]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_update, "_POLL_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_an_update_is_over_when_the_new_slot_is_kept(tmp_path: Path) -> None:
    trial = dataclasses.replace(NOW, slot="B", trial=True, boot="boot-2")
    kept = dataclasses.replace(trial, trial=False)
    device = Device(tmp_path, NOW, None, None, trial, trial, kept)
    assert device._wait(NOW) == kept
    assert device.says == []


@pytest.mark.usefixtures("quick")
def test_a_device_that_fell_back_is_told(tmp_path: Path) -> None:
    trial = dataclasses.replace(NOW, slot="B", trial=True, boot="boot-2")
    with pytest.raises(RemoteError, match="dev0 fell back to slot A: the new one did not come so far"):
        Device(tmp_path, None, trial, None, dataclasses.replace(NOW, boot="boot-3"))._wait(NOW)
    back = dataclasses.replace(NOW, boot="boot-3", report="slot B: the worker: no torch")
    with pytest.raises(RemoteError, match="dev0 fell back to slot A: slot B: the worker: no torch"):
        Device(tmp_path, None, trial, None, back)._wait(NOW)


def test_a_device_that_runs_the_image_is_left_unless_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a second `update --all` installed the image on all devices again."""
    sent: list[str] = []
    for again in (False, True):
        device = Device(tmp_path, NOW)
        device._again = again
        monkeypatch.setattr(device, "_send", lambda _transport: sent.append("sent"))
        monkeypatch.setattr(device, "_wait", lambda before: before)
        monkeypatch.setattr(device, "_command", lambda *_, **__: "")
        assert device.run() == NOW
        assert device.was_current is not again
    assert sent == ["sent"]


@pytest.mark.usefixtures("quick")
def test_an_update_that_was_cut_off_in_its_trial_waits_for_the_end_of_that(tmp_path: Path) -> None:
    trial = dataclasses.replace(NOW, slot="B", trial=True, boot="boot-2")
    kept = dataclasses.replace(trial, trial=False)
    assert Device(tmp_path, trial, trial, None, kept).run() == kept
    back = dataclasses.replace(NOW, serial=999, boot="boot-3", report="no torch")
    with pytest.raises(RemoteError, match="dev0 fell back to slot A: no torch"):
        Device(tmp_path, trial, None, back).run()


@pytest.mark.parametrize(
    ("there", "start"), [("prefix", 5000), ("whole", 100_000), ("other", 0), ("longer", 0), ("none", 0)]
)
def test_a_bundle_is_sent_from_where_the_last_update_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, start: int
) -> None:
    """Before: the whole bundle was sent again. The device's commands run here."""
    data = os.urandom(100_000)
    device = Device(tmp_path)
    (tmp_path / "b").write_bytes(data)
    left = tmp_path / "bundle.raucb"
    monkeypatch.setattr(device_update, "_BUNDLE", str(left))
    found = {"prefix": data[:5000], "whole": data, "other": b"x" * 5000, "longer": data + b"x"}
    if there != "none":
        left.write_bytes(found[there])

    def command(_transport: object, line: str, _problem: str) -> str:
        return subprocess.check_output(["sh", "-c", line], text=True)

    monkeypatch.setattr(device, "_command", command)
    assert device._sent_before(None) == start  # type: ignore[arg-type]


@pytest.fixture
def stalled() -> Iterator[paramiko.Transport]:
    """A connection to a device that starts every command, and reads nothing of what it is sent."""

    class Server(paramiko.ServerInterface):
        def check_auth_none(self, _username: str) -> int:
            return paramiko.AUTH_SUCCESSFUL  # type: ignore[attr-defined,no-any-return]

        def get_allowed_auths(self, _username: str) -> str:
            return "none"

        def check_channel_request(self, _kind: str, _number: int) -> int:
            return paramiko.OPEN_SUCCEEDED  # type: ignore[attr-defined,no-any-return]

        def check_channel_exec_request(self, _channel: paramiko.Channel, _command: bytes) -> bool:
            return True

    ours, theirs = socket.socketpair()
    server, client = paramiko.Transport(theirs), paramiko.Transport(ours)
    server.add_server_key(paramiko.ECDSAKey.generate())
    try:
        server.start_server(event=threading.Event(), server=Server())
        client.start_client(timeout=30)
        client.auth_none("root")
        yield client
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("size", [16 << 20, 100])
def test_a_device_that_takes_no_more_bytes_is_left(
    tmp_path: Path, stalled: paramiko.Transport, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Before: such a device held `millpond update --all` for ever."""
    monkeypatch.setattr(device_update, "_STALL_SECONDS", 0.3)
    (tmp_path / "b").write_bytes(bytes(size))
    with pytest.raises(RemoteError, match="dev0 has taken nothing for 0 s"):
        Device(tmp_path)._copy(stalled)


@pytest.mark.parametrize("error", [RemoteError("it is away"), FileNotFoundError(2, "No such file", "b")])
def test_all_outcomes_are_told_whatever_one_device_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def run(device: DeviceUpdate, *, allow_older: bool) -> Running:
        if device.device == "dev1":
            raise error
        return dataclasses.replace(NOW, slot="B")

    make_fleet(tmp_path / "f", "qemu-virt", "qemu-virt", "qemu-virt")
    path, manifest = make_image(tmp_path / "image")
    bundle = Bundle(path, "", manifest)
    monkeypatch.setattr(bundles, "make", lambda *_: bundle)
    monkeypatch.setattr(DeviceUpdate, "run", run)
    with pytest.raises(typer.Exit):
        update.command([str(path)], True, 1, 600.0, False, False, None, tmp_path / "f", Format.JSON)
    told = json.loads(capsys.readouterr().out)["devices"]
    assert [one["state"] for one in told] == ["updated", "failed", "untouched"]


class Answer:
    """An SSH command that ends as the test wants."""

    def __init__(self, result: ssh.CommandResult, says: bytes = b"", complains: bytes = b"") -> None:
        self._result, self._says, self._complains = result, says, complains

    def run(self, _stdin: None, out: io.BytesIO, err: io.BytesIO, timeout: float) -> ssh.CommandResult:
        out.write(self._says)
        err.write(self._complains)
        return self._result


Answering = Callable[[Answer], None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answering:
    return lambda answer: monkeypatch.setattr(ssh, "RemoteCommand", lambda _transport, _line: answer)


def test_an_installation_whose_connection_is_lost_has_failed(tmp_path: Path, answers: Answering) -> None:
    device = Device(tmp_path)
    answers(Answer(ssh.CommandResult(-1, "the connection was lost")))
    with pytest.raises(RemoteError, match="dev0: it did not install: the connection was lost"):
        device._command(None, "rauc install", "it did not install")  # type: ignore[arg-type]
    device._command(None, "systemctl reboot", "no", may_vanish=True)  # type: ignore[arg-type]


def test_the_last_line_of_what_a_device_complains_of_is_told(tmp_path: Path, answers: Answering) -> None:
    device = Device(tmp_path)
    answers(Answer(ssh.CommandResult(1), b"LastError: signature verification failed\n", b"a\nb\n"))
    with pytest.raises(RemoteError, match=r"^dev0: no update: signature verification failed$"):
        device._command(None, "rauc install", "no update", may_vanish=True)  # type: ignore[arg-type]
    answers(Answer(ssh.CommandResult(0), b"fine\n"))
    assert device._command(None, "x", "y") == "fine\n"  # type: ignore[arg-type]
    answers(Answer(ssh.CommandResult(3)))
    with pytest.raises(RemoteError, match=r"^dev0: y: exit code 3$"):
        device._command(None, "x", "y")  # type: ignore[arg-type]
