# SPDX-License-Identifier: Apache-2.0
"""Waits for child processes have deadlines: a child that says nothing, or does not end, holds up nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from millpond.base.errors import LocalError, RemoteError
from millpond.host.fleet import mounts, provisioning
from millpond.host.fleet.mounts import VolumeMounts
from millpond.host.remote import device_data
from millpond.linux import child
from millpond.linux.zygote import client
from millpond.linux.zygote.client import Zygote
from millpond.tunnel.endpoint import handle
from millpond.tunnel.endpoint.handle import EndpointHandle, Process

from ..conftest import InNamespace
from ..waiting import eventually

LONG = 20  # seconds for which a child hangs: longer than each deadline here, and the end of a test that fails
SILENT = f"import time; time.sleep({LONG})"
STAYING = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.run(["mount", "--bind", "{volume}", sys.argv[1]], check=True)
print("ready: bound", flush=True)
time.sleep({long})
"""
Become = Callable[[str], None]


@pytest.fixture
def mounter(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Returns a function that has a program take the place of the mounter's; its argument is the folder."""
    monkeypatch.setattr(mounts, "MOUNT_SECONDS", 1.0)
    monkeypatch.setattr(mounts, "END_SECONDS", 1.0)

    def become(program: str) -> None:
        monkeypatch.setattr(
            mounts, "command", lambda _fleet, _device, place, *_: [sys.executable, "-c", program, str(place)]
        )

    return become


def test_a_child_that_speaks_netlink_and_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: an endpoint waited for it, and its tunnel stayed down."""
    monkeypatch.setattr(child, "CHILD_SECONDS", 6.0)  # it has begun by then
    reader, writer = os.pipe()

    def work(_netlink: object) -> None:
        os.write(writer, str(os.getpid()).encode())
        time.sleep(LONG)

    assert child.in_child(work) == "the process said nothing for 6 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(os.read(reader, 20)), 0)
    os.close(reader)
    os.close(writer)


def test_nothing_is_deleted_in_a_volume_whose_mounter_does_not_end(
    tmp_path: Path, mounter: Become, in_namespace: InNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the folder was removed with all below it, which was the device's public part."""
    (volume := tmp_path / "volume").mkdir()
    (volume / "sample").write_text("mine")
    mounter(STAYING.format(volume=volume, long=LONG))
    monkeypatch.setattr(mounts, "MOUNT_SECONDS", 60.0)  # this one does mount, on a slow machine, too

    def body() -> None:
        with device_data.mounted(tmp_path, "csd0") as place:
            assert (place / "sample").exists()
        assert (volume / "sample").exists() and not place.exists()

    in_namespace(body)


def test_a_mounter_that_ends_without_a_word_has_not_mounted(
    tmp_path: Path, mounter: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: it counted as mounted, until the kernel found nothing there."""
    mounter("")
    monkeypatch.setattr(mounts, "MOUNT_SECONDS", 60.0)  # its end counts, however late it comes
    found = VolumeMounts(provisioning.create(tmp_path / "fleet", "farm", ("csd0",)))
    with pytest.raises(RemoteError, match="its process ended without a word"):
        found.folder("csd0")
    found.close()


class LateProcess:
    """An endpoint's process that starts late."""

    def __init__(self) -> None:
        self.killed = threading.Event()

    def terminate(self) -> None:
        self.killed.set()

    kill = terminate

    def wait(self) -> None:
        self.killed.wait(LONG)


def test_an_endpoint_that_does_not_start_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: its device's thread waited, and the end of the daemon for that."""
    monkeypatch.setattr(handle, "START_SECONDS", 0.5)
    started, process = threading.Event(), LateProcess()

    def start(_status: int, _counters: int) -> Process:
        started.wait(LONG)
        return cast(Process, process)

    with pytest.raises(LocalError, match=r"it has not started in 0\.5 s"):
        EndpointHandle(start)
    started.set()
    eventually(process.killed.is_set, "the late process is killed")


def test_a_zygote_that_does_not_start_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: whoever needed a worker waited for the program to be read from a disk that hung, and with the
    lock that each other one needs.
    """
    monkeypatch.setattr(client, "START_SECONDS", 0.5)
    begun, made = threading.Event(), list[subprocess.Popen[bytes]]()
    really = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.wait(LONG)
        made.append(really(*arguments, **options))
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    zygote = Zygote("millpond.linux.zygote.trial", idle=600.0)
    with pytest.raises(TimeoutError, match=r"has not started in 0\.5 s"):
        zygote.warm_up()
    begun.set()
    eventually(lambda: made and made[0].poll() is not None, "the late zygote ends")
    monkeypatch.setattr(subprocess, "Popen", really)
    monkeypatch.setattr(client, "START_SECONDS", 30.0)
    zygote.warm_up()
    zygote.close()
