# SPDX-License-Identifier: Apache-2.0
"""Texts of devices that reach a terminal or a log: no control characters, no escapes, not endless."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, RemoteError
from millpond.base.text import printable
from millpond.fs.proto.status import StatusIs
from millpond.host.cli import exits
from millpond.host.fleet import mounts, provisioning
from millpond.host.fleet.mounts import VolumeMounts
from millpond.host.remote import ssh, volume_report
from millpond.host.remote.device_update import Running, running_of
from millpond.host.remote.errors import SshFailed
from millpond.tunnel.endpoint.pumps import LinkPump
from millpond.wire.channel import Channel

from .update_support import make_fleet

EVIL = "\x1b[2J\x1b]0;title\x07\u202egpj.exe\u2028\r\n\x9b31m" + "x" * 5000
RUNNING = {"version": "1", "serial": 1, "board": "b", "slot": "A", "trial": False, "boot": "1"}


def is_clean(text: str) -> bool:
    return text.isprintable() and len(text) <= 1000


def test_a_peers_text_has_no_controls_no_directions_and_an_end() -> None:
    assert is_clean(printable(EVIL))


def test_what_a_device_says_that_it_runs_is_cleaned() -> None:
    """Before: it was printed as it came."""
    names = [field.name for field in dataclasses.fields(Running) if field.type == "str"]
    assert names == ["version", "board", "slot", "boot", "report"]
    found = running_of(RUNNING | dict.fromkeys(names, EVIL))
    assert all(is_clean(getattr(found, name)) for name in names)


def test_what_a_volumes_server_says_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: 'millpond volume' printed the state of its sandbox as it came."""

    @contextmanager
    def dialled(*_: object) -> Iterator[Channel]:
        ours, theirs = socket.socketpair()
        with Channel(ours, "csd0") as channel, Channel(theirs, "host") as server:
            server.send(StatusIs(None, None, None, 1.0, (), False, 0, EVIL), Deadline.after(10))
            yield channel

    monkeypatch.setattr(volume_report, "_dialled", dialled)
    assert is_clean(volume_report._status(Path(), "csd0", count=False).sandbox)


@pytest.mark.parametrize("kind", [b"V", b"I", b"L", b"B"])
def test_the_last_words_of_a_pump_are_cleaned(kind: bytes) -> None:
    """A pump may have been taken over by the packets of its peer."""
    reader, writer = os.pipe()
    os.write(writer, kind + EVIL[:300].encode())
    os.close(writer)
    try:
        assert is_clean(str(LinkPump(0, reader).verdict()))
    finally:
        os.close(reader)


@pytest.mark.expected_log("")  # a traceback of paramiko, a record for each line
def test_the_words_of_an_ssh_server_are_cleaned(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path, "farm", ("csd0",))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"SSH-" + EVIL[:4].encode() + b"-x\r\n")
        with pytest.raises(SshFailed) as error, ssh.connected(fleet, "csd0", ours):
            pass
    assert "Incompatible version" in str(error.value) and is_clean(str(error.value))


def test_the_error_of_a_command_is_one_clean_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RemoteError(f"csd0: {EVIL}")

    with pytest.raises(SystemExit):
        exits.run(fail)
    line, end = capsys.readouterr().err.split("\n")
    assert line.isprintable() and line.startswith("millpond: csd0: ") and not end


@pytest.mark.parametrize("wrong", [{"serial": "9"}, {"slot": ["A"]}, {"trial": None}, {"more": 1}])
def test_what_a_device_says_that_it_runs_has_its_types(wrong: dict[str, object]) -> None:
    """Before: a TypeError ended a roll-out."""
    with pytest.raises(LocalError):
        running_of(RUNNING | wrong)


@pytest.mark.parametrize("code", ["time.sleep(600)", "print('rea', end='', flush=True); time.sleep(600)"])
def test_a_mounter_that_says_nothing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Before: the daemon's one thread for mounts waited for it, and with it all jobs and the daemon's end."""
    fleet = make_fleet(tmp_path / "fleet", "qemu-virt")
    program = f"import time; {code}"
    monkeypatch.setattr(mounts, "MOUNT_SECONDS", 1.0)
    monkeypatch.setattr(mounts, "command", lambda *_: [sys.executable, "-c", program])
    found = VolumeMounts(fleet)
    with pytest.raises(RemoteError, match="said nothing for 1 s"):
        found.folder("dev0")
    found.close()


def test_the_complaint_of_a_mounter_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what a device says. Before: it was logged as it came."""
    fleet = make_fleet(tmp_path / "fleet", "qemu-virt")
    program = f"import sys; sys.exit({EVIL[:40]!r})"
    monkeypatch.setattr(mounts, "command", lambda *_: [sys.executable, "-c", program])
    found = VolumeMounts(fleet)
    with pytest.raises(RemoteError) as error:
        found.folder("dev0")
    assert is_clean(str(error.value))
    found.close()
