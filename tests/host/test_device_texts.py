# SPDX-License-Identifier: Apache-2.0
"""Texts of devices that reach a terminal or a log: clean in all messages, found by the types of fields."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
import threading
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import msgpack
import pytest

import millpond
from millpond.aggregate.encoding.layout import Encoding
from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, ProtocolError, RemoteError
from millpond.fs.proto.status import StatusIs
from millpond.host.cli import exits
from millpond.host.fleet import mounts, provisioning
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.mounts import VolumeMounts
from millpond.host.remote import ssh, volume_report
from millpond.host.remote.device_update import Running, running_of
from millpond.host.remote.errors import SshFailed
from millpond.host.store.store import Store
from millpond.linux.confinement.sandbox import Sandbox, exit_code, spawn
from millpond.linux.network import loopback_up
from millpond.tunnel.endpoint.pumps import LinkPump
from millpond.tunnel.endpoint.zygote_client import EndpointZygote
from millpond.wire import messages, tls
from millpond.wire.channel import Channel
from millpond.wire.control_messages import CONTROL_PORT, GetLog, Log
from millpond.wire.framing import PREFIX, Limits, Receiver, encode
from millpond.wire.messages import Message, Ok

from ..waiting import eventually
from .update_support import make_fleet

EVIL = "\x1b[2J\x1b]0;title\x07\u202egpj.exe\u2028\r\n\x9b31m"
SECONDS = 10.0
LONG = EVIL + 5000 * "x"
RUNNING = {"version": "1", "serial": 1, "board": "b", "slot": "A", "trial": False, "boot": "1"}


def is_clean_line(text: str) -> bool:
    return text.isprintable() and len(text) <= 1000


def test_what_a_device_says_that_it_runs_is_cleaned() -> None:
    """Before: it was printed as it came."""
    names = [field.name for field in dataclasses.fields(Running) if field.type == "str"]
    assert names == ["version", "board", "slot", "boot", "report"]
    found = running_of(RUNNING | dict.fromkeys(names, LONG))
    assert all(is_clean_line(getattr(found, name)) for name in names)


def test_what_a_volumes_server_says_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: 'millpond volume' printed the state of its sandbox as it came."""

    @contextmanager
    def dialled(*_: object) -> Iterator[Channel]:
        ours, theirs = socket.socketpair()
        with Channel(ours, "csd0") as channel, Channel(theirs, "host") as server:
            server.send(StatusIs(None, None, None, 1.0, (), False, 0, LONG), Deadline.after(10))
            yield channel

    monkeypatch.setattr(volume_report, "_dialled", dialled)
    assert is_clean_line(volume_report._status(Path(), "csd0", count=False).sandbox)


@pytest.mark.parametrize("kind", [b"V", b"I", b"L", b"B"])
def test_the_last_words_of_a_pump_are_cleaned(kind: bytes) -> None:
    """A pump may have been taken over by the packets of its peer."""
    reader, writer = os.pipe()
    os.write(writer, kind + LONG[:300].encode())
    os.close(writer)
    try:
        assert is_clean_line(str(LinkPump(0, reader).verdict()))
    finally:
        os.close(reader)


@pytest.mark.expected_log("")  # a traceback of paramiko, a record for each line
def test_the_words_of_an_ssh_server_are_cleaned(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path, "farm", ("csd0",))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"SSH-" + LONG[:4].encode() + b"-x\r\n")
        with pytest.raises(SshFailed) as error, ssh.connected(fleet, "csd0", ours):
            pass
    assert "Incompatible version" in str(error.value) and is_clean_line(str(error.value))


def test_the_error_of_a_command_is_one_clean_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RemoteError(f"csd0: {LONG}")

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
    program = f"import sys; sys.exit({LONG[:40]!r})"
    monkeypatch.setattr(mounts, "command", lambda *_: [sys.executable, "-c", program])
    found = VolumeMounts(fleet)
    with pytest.raises(RemoteError) as error:
        found.folder("dev0")
    assert is_clean_line(str(error.value))
    found.close()


def all_messages() -> list[type[Message]]:
    """Return the classes of all messages of all components."""
    for module in pkgutil.walk_packages(millpond.__path__, "millpond."):
        if {"api", "proto", "protocol"} & set(module.name.split(".")) or module.name.endswith("messages"):
            importlib.import_module(module.name)
    return list(messages._registry.values())


def made(hint: Any) -> Any:
    """Return a value of a type, with bad texts wherever it can have any."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return arguments[0]
    if origin in (typing.Union, types.UnionType):
        return made(next(each for each in arguments if each is not type(None)))
    if origin is tuple:
        return tuple(made(each) for each in arguments if each is not ...)
    if origin is dict:
        return {made(arguments[0]): made(arguments[1])}
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return next(iter(hint))
    assert dataclasses.is_dataclass(hint), f"a value of {hint} can have texts: have 'cleaned' find them"
    hints = typing.get_type_hints(hint)
    return cast(Any, hint)(**{field.name: made(hints[field.name]) for field in dataclasses.fields(hint)})


PLAIN = {str: EVIL, int: 1, float: 0.0, bool: False, bytes: b"x", Any: EVIL, object: EVIL}
PLAIN[Encoding] = Encoding()  # which takes no other names than its own


def texts(value: object) -> Iterator[str]:
    """Yield all texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts([*value, *value.values()])
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from texts(item)
    elif dataclasses.is_dataclass(value):
        yield from texts([getattr(value, field.name) for field in dataclasses.fields(value)])


def is_clean(value: object) -> bool:
    return all(text.isprintable() and len(text) <= 4096 for text in texts(value))


def test_no_text_of_any_message_passes_a_clean_channel_as_it_is() -> None:
    kinds = all_messages()
    ours, theirs = socket.socketpair()
    with Channel(ours, "csd0", clean=True) as channel, theirs:
        for message in map(made, kinds):
            theirs.sendall(encode(message))
            found = channel.receive(Deadline.after(SECONDS)).message
            assert type(found) is type(message) and is_clean(found), message.NAME
            kept = found == message if is_clean(message) else any("[2J" in text for text in texts(found))
            assert kept, message.NAME
    assert len(kinds) > 200 and sum(not is_clean(made(kind)) for kind in kinds) > 50


def test_a_message_that_cannot_be_read_is_told_in_clean_words() -> None:
    """Before: a key that should not be there, or the path to a value of a wrong type, came as it was."""
    for head in (["ledger", {"sent": {EVIL: "x"}}], ["welcome", {EVIL: 1}], [EVIL, {}]):
        data = msgpack.packb(head)
        receiver = Receiver(Limits(), "csd0")
        with pytest.raises(ProtocolError) as error:
            for part in (PREFIX.pack(b"mp", 10, len(data), 0), data):
                receiver.buffer()[:] = part
                receiver.received(len(part))
        assert is_clean(str(error.value))


class FakeAgent:
    """Answers every request on connections to a device's address as a bad agent does."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        etc = fleet.device_directory(name) / "etc"
        self._context = tls.Identity.in_directory(etc).context(server=True)
        self._listener = socket.create_server((fleet.addresses(name).device_ip, CONTROL_PORT))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for encrypted in (True, False):
            sock, _ = self._listener.accept()
            if encrypted:
                sock = tls.accept(sock, self._context, tls.HOST, Deadline.after(SECONDS))
            channel = Channel(sock, "the host")
            if not encrypted:
                channel.receive(Deadline.after(SECONDS))
                channel.send(Ok(), Deadline.after(SECONDS))
            channel.receive(Deadline.after(SECONDS))
            channel.send(made(Log), Deadline.after(SECONDS))


def a_device(fleet: Fleet, zygote: object = None) -> Device:
    store = Store(fleet.database)
    return Device(fleet, fleet.device("csd0"), store, cast(EndpointZygote, zygote))


def test_the_daemons_connections_to_a_device_are_clean(tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path, "farm", ("csd0",))

    def inside() -> int:
        loopback_up()
        subprocess.run(["ip", "addr", "add", "10.77.0.2/30", "dev", "lo"], check=True)
        FakeAgent(fleet, "csd0")
        device = a_device(fleet)
        with device.control(Deadline.after(SECONDS)) as control:
            assert is_clean(found := control.call(GetLog(1), Log, Deadline.after(SECONDS)))
        with device.bulk(b"x", False, Deadline.after(SECONDS)) as bulk:
            assert is_clean(bulk.call(GetLog(1), Log, Deadline.after(SECONDS)))
        assert found.lines and found.position
        return 0

    assert exit_code(os.waitpid(spawn(Sandbox(own_network=True), inside), 0)[1]) == 0


class FakeZygote:
    """Starts an endpoint that says bad things of itself, as one does that a device has taken over."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def start(self, arguments: Sequence[str], status: int, counters: int) -> FakeZygote:
        words = dict.fromkeys(("state", "reason", "engine", "confinement"), EVIL)
        os.write(status, json.dumps(words).encode() + b"\n")
        return self

    def terminate(self) -> None:
        self._ended.set()

    kill = terminate

    def wait(self) -> None:
        self._ended.wait(SECONDS)


def test_all_that_the_daemon_tells_of_a_device_is_clean(tmp_path: Path) -> None:
    device = a_device(provisioning.create(tmp_path, "farm", ("csd0",)), FakeZygote())
    device.start()
    try:
        reason = eventually(lambda: "[2J" in device.status.reason and device.status.reason, "a reason", 20)
        assert is_clean(reason) and is_clean(device.status)
        assert "[2J" in device.tunnel().engine and is_clean(device.tunnel())
    finally:
        device.stop()
