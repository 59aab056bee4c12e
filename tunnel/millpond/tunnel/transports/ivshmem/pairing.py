"""Pure: how the two ends of memory that outlives them both agree on who speaks with whom.

Each side has a word that only it writes, with a number that it drew, and a counter that shows that it lives:

| offset in page 0 | register of 64 bits |
|------------------|---------------------|
| 3040h, 3080h     | the host's word and beat   |
| 30C0h, 3100h     | the device's word and beat |

| bits of a word | hold                                                                          |
|----------------|-------------------------------------------------------------------------------|
| 1:0            | state: 0 none, 1 the host asks, 2 the device answers, 3 the host accepts      |
| 17:2           | the writer's ID at the doorbell server: whom to ring                          |
| 40:18          | the host's number, drawn for each question                                    |
| 63:41          | the device's number, drawn for each answer; 0 in a question                   |

The host asks with its pumps dead. The device, with its own dead, makes the region anew and answers. The host
repeats both numbers and only then touches the region. Either side's death leads to another word of its, which
the other side finds; a word that does not fit is as good as none, so the worst a peer can write costs a link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from millpond.tunnel.ring.barrier import barrier
from millpond.tunnel.ring.layout import PAGE

HOST_WORD, HOST_BEAT, DEVICE_WORD, DEVICE_BEAT = 0x3040, 0x3080, 0x30C0, 0x3100
NUMBERS = 1 << 23

Draw = Callable[[], int]
"""Draws a random number from 1 to NUMBERS - 1."""


class PairingState(IntEnum):
    """What a word says."""

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
        """The 64-bit register."""
        return self.state | self.peer << 2 | self.host << 18 | self.device << 41

    @staticmethod
    def unpack(value: int) -> Word:
        """Of any 64 bits."""
        peer, host = value >> 2 & 0xFFFF, value >> 18 & NUMBERS - 1
        return Word(PairingState(value & 3), peer, host, value >> 41)


class Mailbox:
    """The four registers as ``role`` sees them: its own to write, the peer's to read."""

    def __init__(self, memory: memoryview, role: str) -> None:
        quads = memory[:PAGE].cast("Q")
        places = (HOST_WORD, HOST_BEAT, DEVICE_WORD, DEVICE_BEAT)
        if role == "device":
            places = (DEVICE_WORD, DEVICE_BEAT, HOST_WORD, HOST_BEAT)
        registers = [quads[place // 8 : place // 8 + 1] for place in places]
        self._own, self._own_beat, self._theirs, self._their_beat = registers

    def say(self, word: Word) -> None:
        """Write this side's word, after all that it speaks of."""
        barrier()
        self._own[0] = word.pack()

    @property
    def said(self) -> Word:
        """This side's word, as it or a former self left it."""
        return Word.unpack(self._own[0])

    @property
    def heard(self) -> Word:
        """The peer's word; what it speaks of may be read afterwards."""
        said = self._theirs[0]
        barrier()
        return Word.unpack(said)

    def beat(self) -> None:
        """Show that this side lives."""
        self._own_beat[0] = (self._own_beat[0] + 1) & 0xFFFF_FFFF

    @property
    def their_beat(self) -> int:
        """Changes while the peer lives."""
        return int(self._their_beat[0])


def draw_other(draw: Draw, former: int) -> int:
    """A number that is not ``former``."""
    while (number := draw()) == former:
        pass
    return number


class HostSession:
    """The host's side of one link."""

    def __init__(self, box: Mailbox, position: int, draw: Draw) -> None:
        self._box = box
        self._question = Word(PairingState.ASKS, position, draw_other(draw, box.said.host))
        self._answer = Word()

    def ask(self) -> None:
        """The pumps of a former link must be dead. To be repeated: the peer can overwrite the question."""
        self._box.say(self._question)

    def answer(self) -> Word | None:
        """The device's answer to this very question."""
        heard = self._box.heard
        return heard if heard.state == PairingState.ANSWERS and heard.host == self._question.host else None

    def accept(self, answer: Word) -> None:
        """From here on the region is in use."""
        self._answer = answer
        question = self._question
        self._box.say(Word(PairingState.ACCEPTS, question.peer, question.host, answer.device))

    @property
    def intact(self) -> bool:
        """Whether the device still is the one that answered."""
        return self._box.heard == self._answer


class DeviceSession:
    """The device's side of one link."""

    def __init__(self, box: Mailbox, position: int, draw: Draw) -> None:
        self._box, self._position, self._draw = box, position, draw
        self._former = box.said.device
        self._answer = self._accepted = Word()
        self.repeat()

    def question(self) -> Word | None:
        """The host's question, if it asks."""
        heard = self._box.heard
        return heard if heard.state == PairingState.ASKS and heard.host else None

    def answer(self, question: Word) -> None:
        """Offer the region, which has been made anew. To be repeated by ``repeat``."""
        self._former = number = draw_other(self._draw, self._former)
        self._accepted = Word(PairingState.ACCEPTS, question.peer, question.host, number)
        self._answer = Word(PairingState.ANSWERS, self._position, question.host, number)
        self.repeat()

    def repeat(self) -> None:
        """Say the last answer again: the peer can overwrite it."""
        self._box.say(self._answer)

    @property
    def intact(self) -> bool:
        """Whether the host has accepted this very answer, and nothing since."""
        return self._box.heard == self._accepted


class Pulse:
    """Tells how long the peer's beat has stood still."""

    def __init__(self, beat: int, now: float) -> None:
        self._beat, self._since = beat, now

    def still(self, beat: int, now: float) -> float:
        """Seconds since the last change."""
        if beat != self._beat:
            self._beat, self._since = beat, now
        return now - self._since
