# SPDX-License-Identifier: Apache-2.0
"""The hosts of a launch: their names and addresses, and mistakes in them, which get one line."""

from __future__ import annotations

import socket

import pytest

from millpond.base.errors import LocalError
from millpond.host.client.launch_hosts import HostName, addressed, hosts_of


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
