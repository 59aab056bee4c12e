# SPDX-License-Identifier: Apache-2.0
"""Random packets for an interface: from its peer to its own address, and others."""

from __future__ import annotations

import ipaddress
import random

from millpond.tunnel.addresses import Network

from .robust_loop_context import Setting

PAYLOADS = (0, 1, 8, 100, 1400, 9000, 65000)


def is_foreign(packet: bytes, setting: Setting) -> bool:
    """Whether it is not from where it may come to where it may go."""
    head, version = packet[setting.vnet_header :], setting.own.version
    start, width = (12, 4) if version == 4 else (8, 16)
    if head[0] >> 4 != version:
        return True
    ends = [ipaddress.ip_address(head[at : at + width]) for at in (start, start + width)]
    return any(end not in network for end, network in zip(ends, setting.ends(), strict=True))


class Packets:
    """Up to ``most`` bytes long, vnet header first."""

    def __init__(self, setting: Setting, source: random.Random, most: int) -> None:
        self._random, self._vnet, self._most = source, setting.vnet_header, most
        self._version = setting.own.version
        self._start = 12 if self._version == 4 else 8
        self._ends = setting.ends()

    @property
    def _source(self) -> bytes:
        return self._within(self._ends[0])

    @property
    def _destination(self) -> bytes:
        return self._within(self._ends[1])

    def _within(self, network: Network) -> bytes:
        """An address of the network, its first and last as likely as all between."""
        last = network.num_addresses - 1
        return network[self._random.choice((0, last, self._random.randint(0, last)))].packed

    def _outside(self, network: Network) -> bytes:
        """An address that differs from one of the network in one bit of those that count."""
        address = bytearray(self._within(network))
        bit = self._random.randrange(network.prefixlen)
        address[bit // 8] ^= 0x80 >> bit % 8
        return bytes(address)

    def good(self) -> bytes:
        """From where it may come to where it may go, of any length."""
        whole = self._head() + self._source + self._destination
        longest = self._most - len(whole)
        return whole + self._random.randbytes(self._random.choice((*PAYLOADS, *PAYLOADS, longest)))

    def bad(self) -> bytes:
        """Anything that must not pass, but that is no violation."""
        kinds = [self._foreign, self._strayed, self._other_version, self._cut]
        return self._random.choice([*kinds, *([self._strange_header] if self._vnet else [])])()

    def _foreign(self) -> bytes:
        """From or to anybody else: one bit is another, or the two are exchanged."""
        source, destination = self._source, self._destination
        strange = [self._outside(network) for network in self._ends]
        choices = [strange[0] + destination, source + strange[1], strange[0] + strange[1]]
        if all(network.num_addresses == 1 for network in self._ends):
            choices.append(destination + source)
        return self._head() + self._random.choice(choices) + self._rest()

    def _strayed(self) -> bytes:
        """The right addresses in another place, as in a packet of the other IP version."""
        filler = self._random.randbytes(self._random.choice((1, 4, 12)))
        head = self._head(self._random.choice((self._version, 4, 6)))
        return head + filler + self._source + self._destination + self._rest()

    def _other_version(self) -> bytes:
        head = self._head(self._version ^ self._random.randrange(1, 16))
        return head + self._source + self._destination + self._rest()

    def _cut(self) -> bytes:
        """It ends within the addresses or before them."""
        whole = self._head() + self._source + self._destination
        return whole[: self._random.randrange(self._vnet + 1, len(whole))]

    def _strange_header(self) -> bytes:
        """A good packet behind fields of a vnet header that must not reach the kernel."""
        packet, where = bytearray(self.good()), self._random.randrange(max(self._vnet, 1))
        packet[where] = self._random.randrange(3 if where == 0 else 2, 256)
        return bytes(packet)

    def _head(self, version: int | None = None) -> bytes:
        """Up to the addresses; all of the IP header but the version is anything."""
        head = bytearray(self._vnet) + self._random.randbytes(self._start)
        if self._vnet:
            head[0] = self._random.choice((0, 2))
        head[self._vnet] = (self._version if version is None else version) << 4 | self._random.randrange(16)
        return bytes(head)

    def _rest(self) -> bytes:
        return self._random.randbytes(self._random.choice(PAYLOADS))
