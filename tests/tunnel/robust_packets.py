"""Random packets for an interface: from its peer to it, and others."""

from __future__ import annotations

import ipaddress
import random

from .robust_setting import Setting

PAYLOADS = (0, 1, 8, 100, 1400, 9000, 65000)


def is_foreign(packet: bytes, setting: Setting) -> bool:
    """Whether it is not from the peer to the interface."""
    head, version = packet[setting.vnet_header :], setting.own.version
    start, width = (12, 4) if version == 4 else (8, 16)
    ends = [ipaddress.ip_address(head[at : at + width]) for at in (start, start + width)]
    return head[0] >> 4 != version or ends != [setting.peer, setting.own.ip]


class Packets:
    """Up to ``most`` bytes long, vnet header first."""

    def __init__(self, setting: Setting, source: random.Random, most: int) -> None:
        self._random, self._vnet, self._most = source, setting.vnet_header, most
        self._version = setting.own.version
        self._start = 12 if self._version == 4 else 8
        self._source, self._destination = setting.peer.packed, setting.own.ip.packed

    def good(self) -> bytes:
        """From the peer to the interface, of any length."""
        whole = self._head() + self._source + self._destination
        longest = self._most - len(whole)
        return whole + self._random.randbytes(self._random.choice((*PAYLOADS, *PAYLOADS, longest)))

    def bad(self) -> bytes:
        """Anything that must not pass, but that is no violation."""
        return self._random.choice((self._foreign, self._strayed, self._other_version, self._cut))()

    def _foreign(self) -> bytes:
        """From or to anybody else: one bit is another, or all are, or the two are exchanged."""
        source, destination, other = (
            self._source,
            self._destination,
            self._random.randbytes(len(self._source)),
        )
        changed = bytearray(source + destination)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        choices = (bytes(changed), source + other, other + destination, other + other, destination + source)
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

    def _head(self, version: int | None = None) -> bytes:
        """Up to the addresses; all but the version is anything."""
        head = bytearray(self._random.randbytes(self._vnet + self._start))
        head[self._vnet] = (self._version if version is None else version) << 4 | self._random.randrange(16)
        return bytes(head)

    def _rest(self) -> bytes:
        return self._random.randbytes(self._random.choice(PAYLOADS))
