# SPDX-License-Identifier: Apache-2.0
"""Pure: pair two endpoints over memory that outlives both of them.

Each side writes a session word, with a random number of its own, and a heartbeat counter:

| offset in page 0 | register of 64 bits |
|------------------|---------------------|
| 3040h, 3080h     | the host's word and heartbeat |
| 30C0h, 3100h     | the device's word and heartbeat |

| bits of a word | hold                                                                          |
|----------------|-------------------------------------------------------------------------------|
| 1:0            | state: 0 none, 1 the host asks, 2 the device answers, 3 the host accepts      |
| 17:2           | the writer's ID at the doorbell server, to which notifications go              |
| 40:18          | the host's number, drawn for each question                                    |
| 63:41          | the device's number, drawn for each answer; 0 in a question                   |

The host asks with its pumps dead. The device, with its own dead, makes the region anew and answers. The host
repeats both numbers and only then touches the region. After its death a side writes another word, which the
other side detects; a word that does not match counts as none, so a hostile peer can cost a link and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from millpond.tunnel.ring.barrier import barrier
from millpond.tunnel.ring.layout import PAGE

HOST_WORD, HOST_HEARTBEAT, DEVICE_WORD, DEVICE_HEARTBEAT = 0x3040, 0x3080, 0x30C0, 0x3100
NUMBERS = 1 << 23

Draw = Callable[[], int]
"""Draws a random number from 1 to NUMBERS - 1."""


class PairingState(IntEnum):
    """The state that a session word announces."""

    NONE = 0
    ASKS = 1
    ANSWERS = 2
    ACCEPTS = 3


@dataclass(frozen=True, slots=True)
class Word:
    """A session word."""

    state: PairingState = PairingState.NONE
    peer: int = 0
    host: int = 0
    device: int = 0

    def pack(self) -> int:
        """Pack the word as the 64-bit register."""
        return self.state | self.peer << 2 | self.host << 18 | self.device << 41

    @staticmethod
    def unpack(value: int) -> Word:
        """Unpack a word from any 64 bits."""
        peer, host = value >> 2 & 0xFFFF, value >> 18 & NUMBERS - 1
        return Word(PairingState(value & 3), peer, host, value >> 41)


class Mailbox:
    """The four registers as ``role`` sees them: its own to write, the peer's to read."""

    def __init__(self, memory: memoryview, role: str) -> None:
        quads = memory[:PAGE].cast("Q")
        places = (HOST_WORD, HOST_HEARTBEAT, DEVICE_WORD, DEVICE_HEARTBEAT)
        if role == "device":
            places = (DEVICE_WORD, DEVICE_HEARTBEAT, HOST_WORD, HOST_HEARTBEAT)
        registers = [quads[place // 8 : place // 8 + 1] for place in places]
        self._own, self._own_heartbeat, self._peer, self._peer_heartbeat = registers

    def write(self, word: Word) -> None:
        """Write this side's word, after all memory that it announces."""
        barrier()
        self._own[0] = word.pack()

    @property
    def own_word(self) -> Word:
        """This side's word, as this endpoint or an earlier one left it."""
        return Word.unpack(self._own[0])

    @property
    def peer_word(self) -> Word:
        """The peer's word; the memory that it announces may be read afterwards."""
        value = self._peer[0]
        barrier()
        return Word.unpack(value)

    def send_heartbeat(self) -> None:
        """Increment this side's heartbeat."""
        self._own_heartbeat[0] = (self._own_heartbeat[0] + 1) & 0xFFFF_FFFF

    @property
    def peer_heartbeat(self) -> int:
        """The peer's heartbeat, which changes while the peer lives."""
        return int(self._peer_heartbeat[0])


def draw_other(draw: Draw, former: int) -> int:
    """Draw a number that differs from ``former``."""
    while (number := draw()) == former:
        pass
    return number


class HostSession:
    """The host's side of one link's session."""

    def __init__(self, mailbox: Mailbox, position: int, draw: Draw) -> None:
        self._mailbox = mailbox
        self._question = Word(PairingState.ASKS, position, draw_other(draw, mailbox.own_word.host))
        self._answer = Word()

    def ask(self) -> None:
        """Write the question. The pumps of an earlier link must be dead. To be repeated: the peer can
        overwrite it.
        """
        self._mailbox.write(self._question)

    def answer(self) -> Word | None:
        """Return the device's answer to this very question, None without one."""
        word = self._mailbox.peer_word
        return word if word.state == PairingState.ANSWERS and word.host == self._question.host else None

    def accept(self, answer: Word) -> None:
        """Accept the answer: the region is in use from now on."""
        self._answer = answer
        question = self._question
        self._mailbox.write(Word(PairingState.ACCEPTS, question.peer, question.host, answer.device))

    @property
    def intact(self) -> bool:
        """Whether the device still is the one that answered."""
        return self._mailbox.peer_word == self._answer


class DeviceSession:
    """The device's side of one link's session."""

    def __init__(self, mailbox: Mailbox, position: int, draw: Draw) -> None:
        self._mailbox, self._position, self._draw = mailbox, position, draw
        self._former = mailbox.own_word.device
        self._answer = self._accepted = Word()
        self.repeat()

    def question(self) -> Word | None:
        """Return the host's question, None if it asks nothing."""
        word = self._mailbox.peer_word
        return word if word.state == PairingState.ASKS and word.host else None

    def answer(self, question: Word) -> None:
        """Offer the region, which has been prepared anew. To be repeated by ``repeat``."""
        self._former = number = draw_other(self._draw, self._former)
        self._accepted = Word(PairingState.ACCEPTS, question.peer, question.host, number)
        self._answer = Word(PairingState.ANSWERS, self._position, question.host, number)
        self.repeat()

    def repeat(self) -> None:
        """Write the last answer again: the peer can overwrite it."""
        self._mailbox.write(self._answer)

    @property
    def intact(self) -> bool:
        """Whether the host has accepted this very answer, and nothing since."""
        return self._mailbox.peer_word == self._accepted


class Pulse:
    """Measures for how long the peer's heartbeat has not changed."""

    def __init__(self, beat: int, now: float) -> None:
        self._beat, self._since = beat, now

    def unchanged_for(self, beat: int, now: float) -> float:
        """Return the seconds since the last change."""
        if beat != self._beat:
            self._beat, self._since = beat, now
        return now - self._since
