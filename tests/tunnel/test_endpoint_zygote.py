# SPDX-License-Identifier: Apache-2.0
"""The endpoint zygote: its forks live and die as endpoints that are started alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.linux.confinement.sandbox import Sandbox, exit_code, spawn
from millpond.tunnel.endpoint import zygote_client
from millpond.tunnel.endpoint.handle import EndpointHandle, spawn_endpoint
from millpond.tunnel.endpoint.zygote_client import EndpointZygote

from ..waiting import eventually
from .processes import children, runs


def in_a_namespace(body: Callable[[], int]) -> int:
    return exit_code(os.waitpid(spawn(Sandbox(own_network=True), body), 0)[1])


def host_end(zygote: EndpointZygote, folder: Path, number: int) -> EndpointHandle:
    return spawn_endpoint(
        "host", folder / str(number), f"pond{number}", f"10.77.{number}.1/30", zygote=zygote
    )


def device_end(folder: Path, number: int) -> EndpointHandle:
    return spawn_endpoint("device", folder / str(number), f"dev{number}", f"10.77.{number}.2/30")


def test_ends_of_one_zygote_are_apart(tmp_path: Path, tun_works: None) -> None:
    def body() -> int:
        zygote = EndpointZygote()
        devices = [device_end(tmp_path, number) for number in range(3)]
        hosts = [host_end(zygote, tmp_path, number) for number in range(3)]
        for end in (*devices, *hosts):
            assert end.wait_up(Deadline.after(30))["generation"] == 1
        assert len(children(zygote.pid)) == 3
        hosts[1].stop()
        assert not hosts[1].alive and hosts[0].alive and hosts[2].alive
        eventually(lambda: len(children(zygote.pid)) == 2, "the one that ended is buried")
        again = host_end(zygote, tmp_path, 1)
        assert again.wait_up(Deadline.after(30))["generation"] == 2
        process = zygote.pid
        zygote.close()
        eventually(lambda: not runs(process), "the zygote has ended")
        eventually(lambda: not any(end.alive for end in (*hosts, again)), "its ends have ended")
        for end in devices:
            end.stop()
        return 0

    assert in_a_namespace(body) == 0


def test_a_killed_zygote_takes_its_ends_with_it_and_is_followed_by_another(
    tmp_path: Path, tun_works: None
) -> None:
    def body() -> int:
        zygote = EndpointZygote()
        device, host = device_end(tmp_path, 0), host_end(zygote, tmp_path, 0)
        host.wait_up(Deadline.after(30))
        first = zygote.pid
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not host.alive, "the end has died with its zygote")
        again = host_end(zygote, tmp_path, 0)
        assert again.wait_up(Deadline.after(30))["generation"] == 2
        assert zygote.pid != first and not runs(first)
        zygote.close()
        device.stop()
        return 0

    assert in_a_namespace(body) == 0


def test_a_zygote_dies_with_whoever_began_it(tmp_path: Path, tun_works: None) -> None:
    pids = tmp_path / "pids"

    def body() -> int:
        zygote = EndpointZygote()
        host_end(zygote, tmp_path, 0)
        pids.write_text(" ".join(map(str, [zygote.pid, *children(zygote.pid)])))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    in_a_namespace(body)
    processes = [int(pid) for pid in pids.read_text().split()]
    assert len(processes) == 2
    eventually(lambda: not any(map(runs, processes)), "they have ended")


@pytest.mark.expected_log("does not answer: starting another")
def test_a_stalled_zygote_ends_no_tunnel(tmp_path: Path, tun_works: None) -> None:
    def body() -> int:
        zygote = EndpointZygote()
        devices = [device_end(tmp_path, number) for number in range(2)]
        host = host_end(zygote, tmp_path, 0)
        host.wait_up(Deadline.after(30))
        stalled = zygote.pid
        os.kill(stalled, signal.SIGSTOP)
        zygote_client._ANSWER_SECONDS = 1.0
        with pytest.raises(LocalError, match="timed out"):
            host_end(zygote, tmp_path, 1)
        assert host.alive and host.status["state"] == "up"
        zygote_client._ANSWER_SECONDS = 30.0
        second = host_end(zygote, tmp_path, 1)
        assert second.wait_up(Deadline.after(30))["generation"] == 1
        os.kill(stalled, signal.SIGCONT)  # what was asked of it is started late, and for nobody
        time.sleep(1.0)
        eventually(lambda: len(children(stalled)) == 1, "the end that nobody wants has ended")
        assert host.alive and second.alive and second.status["generation"] == 1
        os.kill(stalled, signal.SIGSTOP)
        host.stop()
        eventually(lambda: not runs(stalled), "a stalled zygote without ends is ended")
        zygote.close()
        for end in devices:
            end.stop()
        return 0

    assert in_a_namespace(body) == 0


def test_an_end_that_ends_at_once_harms_no_other(tmp_path: Path, tun_works: None) -> None:
    def body() -> int:
        zygote = EndpointZygote()
        device, host = device_end(tmp_path, 0), host_end(zygote, tmp_path, 0)
        host.wait_up(Deadline.after(30))
        reader, closed = os.pipe()
        os.close(reader)  # nobody listens to its status: it ends with the first word
        counters = os.memfd_create("counters")
        os.truncate(counters, 4096)
        told = ["host", "--socket", str(tmp_path / "1"), "--interface", "pond1", "--address", "10.77.1.1/30"]
        for child in [zygote.start(told, closed, counters) for _ in range(20)]:
            child.wait()
        eventually(lambda: len(children(zygote.pid)) == 1, "those that ended are buried")
        assert host.alive and host.status["state"] == "up"
        os.kill(children(zygote.pid)[0], signal.SIGKILL)
        eventually(lambda: host.status["state"] == "down", "a dead end is called down")
        zygote.close()
        device.stop()
        return 0

    assert in_a_namespace(body) == 0


def test_what_an_end_cannot_mean_is_refused(tmp_path: Path, tun_works: None) -> None:
    zygote = EndpointZygote()
    counters = os.memfd_create("counters")
    reader, writer = os.pipe()
    try:
        for arguments, complaint in ((["host", "--socket"], "wrong arguments"), (["x" * 5000], "too long")):
            with pytest.raises(OSError, match=complaint):
                zygote.start(arguments, writer, counters)
    finally:
        zygote.close()
        for descriptor in (counters, reader, writer):
            os.close(descriptor)
