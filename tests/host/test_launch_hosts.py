# SPDX-License-Identifier: Apache-2.0
"""The hosts of a launch: names, addresses, what each daemon is told, failures, losses; without daemons."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, ProtocolError
from millpond.host.api.launch import (
    BeginLaunch,
    EndLaunch,
    JoinLaunch,
    LaunchEnded,
    LaunchLost,
    LaunchOpened,
    LaunchOutput,
    LaunchPart,
    LaunchWaits,
    OtherHost,
    RestartLaunch,
    WorkerEnd,
)
from millpond.host.client import launch_hosts
from millpond.host.client.launch_hosts import (
    HostName,
    LaunchHosts,
    _channel,
    _Part,
    _shell,
    addressed,
    hosts_of,
)
from millpond.wire.channel import Channel
from millpond.wire.messages import Message


def test_hosts_have_names_for_the_shell_and_for_their_workers() -> None:
    first, second, third = hosts_of("localhost,root@b.example=192.0.2.7,c")
    assert (first.name, second.name, second.target) == ("localhost", "b.example", "root@b.example")
    assert (second.address, third.address) == ("192.0.2.7", "")
    assert first.is_here and HostName(socket.gethostname()).is_here and not second.is_here


def test_this_host_has_the_address_by_which_it_reaches_the_others() -> None:
    hosts = addressed(hosts_of("localhost,b=127.0.0.2"))
    assert [host.address for host in hosts] == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,,b", "'' is no name of a host"),
        ("a,-oProxyCommand=x", "'-oProxyCommand' is no name of a host"),
        ("a,b c", "'b c' is no name of a host"),
        ("root@a,a", "a is named twice"),
    ],
)
def test_a_mistake_in_the_hosts_gets_one_line(text: str, words: str) -> None:
    with pytest.raises(LocalError, match=words):
        hosts_of(text)


@dataclass
class Hosts:
    """A launch over two hosts, and the daemons' ends of its connections."""

    launch: LaunchHosts
    daemons: dict[str, Channel]

    def told(self, name: str) -> Message:
        return self.daemons[name].receive(Deadline.after(5)).message

    def say(self, name: str, *messages: Message) -> None:
        for message in messages:
            self.daemons[name].send(message, Deadline.after(5))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    launch = LaunchHosts(hosts_of("a=192.0.2.1,b=192.0.2.2"), "false", True, Path())
    daemons = {}
    for host in launch.hosts:
        ours, theirs = socket.socketpair()
        launch._parts.append(_Part(host, _channel(ours, host), workers=("host", "csd0")))
        daemons[host.name] = Channel(theirs, "the command")
    yield Hosts(launch, daemons)
    for channel in (*daemons.values(), *(part.channel for part in launch._parts)):
        channel.close()


def part(number: int, key: str = "") -> LaunchPart:
    workers = ((f"10.77.{number}.1", "host"), (f"10.77.{number}.2", "csd0"))
    return LaunchPart(workers, (f"10.77.{number}.0/30",), 40000 + number, key, 5000 + number)


def ended(error: str = "") -> LaunchEnded:
    return LaunchEnded((WorkerEnd("host", 0, 0), WorkerEnd("csd0", 1, 0)), error, 1.0)


def test_all_hosts_get_one_run_and_the_ranks_in_their_order(hosts: Hosts) -> None:
    for number, name in enumerate("ab"):
        hosts.say(name, part(number), LaunchOpened())
    hosts.launch._join()
    first, second = hosts.told("a"), hosts.told("b")
    assert isinstance(first, JoinLaunch) and isinstance(second, JoinLaunch)
    assert (first.first, second.first, first.size, first.run) == (0, 2, 4, second.run)
    assert {(each.master_address, each.master_port) for each in (first, second)} == {("10.77.0.1", 40000)}
    assert second.names == (("10.77.0.1", "host.a"), ("10.77.0.2", "csd0.a"))
    assert second.others == (OtherHost("a", "192.0.2.1", ("10.77.0.0/30",), "", 5000),)
    assert isinstance(hosts.told("a"), BeginLaunch) and isinstance(hosts.told("b"), BeginLaunch)


def test_links_without_a_key_are_refused_unless_they_may_be_plain(hosts: Hosts) -> None:
    hosts.launch.plain = False
    hosts.say("a", part(0, "a key"))
    hosts.say("b", part(1))
    with pytest.raises(LocalError, match=r"^b: the kernel has no WireGuard"):
        hosts.launch._join()


def test_a_failure_on_one_host_ends_the_script_on_the_others(hosts: Hosts) -> None:
    hosts.say("b", ended("csd0 (rank 3): it ended with exit code 5; the others were ended"))
    followed = hosts.launch._follow()
    hosts.say("a", LaunchOutput("csd0", ("hello",)), ended())
    assert [event for event, _ in followed] == [LaunchOutput("csd0.a", ("hello",))]
    assert isinstance(hosts.told("a"), EndLaunch)
    whole = hosts.launch._whole()
    assert whole.error == "csd0.b (rank 3): it ended with exit code 5; the others were ended"
    assert [worker.name for worker in whole.workers] == ["host.a", "csd0.a", "host.b", "csd0.b"]


def test_elastic_scripts_start_again_when_a_worker_or_a_host_is_lost(hosts: Hosts) -> None:
    hosts.launch._elastic = True
    hosts.say("b", LaunchLost())
    followed = hosts.launch._follow()
    hosts.say("a", LaunchOutput("host", ("begins",)))
    assert next(followed)[0] == LaunchOutput("host.a", ("begins",))
    hosts.daemons["b"].close()
    lost, _ = next(followed)
    assert lost == LaunchOutput("all", ("b: the connection to its daemon has ended; the others go on",))
    hosts.say("a", ended())
    assert not list(followed)
    found = [hosts.told("a") for _ in range(3)]
    assert [type(message) for message in found] == [RestartLaunch, RestartLaunch, EndLaunch]
    assert (hosts.launch._whole().error, len(hosts.launch._whole().workers)) == ("", 2)


def test_a_worker_that_a_host_does_not_have_is_a_fault_of_its_daemon(hosts: Hosts) -> None:
    hosts.say("a", LaunchOutput("../csd7", ("hello",)))
    with pytest.raises(ProtocolError, match="a told of a worker that it does not have"):
        list(hosts.launch._follow())


def test_hosts_that_all_wait_for_lost_workers_wait_no_longer(hosts: Hosts) -> None:
    """Before: for ever, once the workers that were left had ended well."""
    hosts.launch._elastic = True
    a, b = hosts.launch._parts
    for part, waits in ((a, True), (a, False), (b, True)):
        hosts.say(part.host.name, LaunchWaits(waits))
        assert not list(hosts.launch._take(part))
    hosts.say("a", LaunchOutput("host", ("goes on",)))
    assert list(hosts.launch._take(a))
    hosts.say("a", LaunchWaits(True))
    assert not list(hosts.launch._take(a))
    assert isinstance(hosts.told("a"), EndLaunch) and isinstance(hosts.told("b"), EndLaunch)


def test_a_host_that_stands_still_in_a_message_is_lost(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: all others stood still, too."""
    monkeypatch.setattr(launch_hosts, "SEND_SECONDS", 0.2)
    hosts.daemons["b"].sock.sendall(bytes(3))
    with pytest.raises(ConnectionLost, match=r"^b: its daemon stood still for 0 s in the middle of"):
        list(hosts.launch._follow())


def test_a_dead_host_ends_its_ssh_connection() -> None:
    kept = ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
    assert _shell("/usr/bin/ssh -p 2222") == ["/usr/bin/ssh", "-p", "2222", *kept]
    assert _shell("rsh -4") == ["rsh", "-4"]


def test_a_host_controls_no_terminal(hosts: Hosts) -> None:
    hosts.say("b", LaunchOutput("csd0", ("\x1b]0;mine\x07a\tb",)))
    ((shown, _),) = hosts.launch._take(hosts.launch._parts[1])
    assert isinstance(shown, LaunchOutput) and shown.lines == (" ]0;mine a\tb",)


def test_a_host_without_a_worker_is_a_fault_of_its_daemon(hosts: Hosts) -> None:
    hosts.say("a", LaunchPart((), (), 0, "", 0))
    hosts.say("b", part(1))
    with pytest.raises(ProtocolError, match="a has no worker for the launch"):
        hosts.launch._join()
