# SPDX-License-Identifier: Apache-2.0
"""Pure: the consumer's side of a connection: what it tells the service, over any number of connections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from millpond.base.errors import ProtocolError, RemoteError
from millpond.data.streaming.protocol import messages
from millpond.data.streaming.protocol.credit import ByteCredit
from millpond.data.streaming.protocol.fetches import Fetches
from millpond.data.streaming.protocol.inbox import Inbox, Piece, S
from millpond.data.streaming.protocol.leases import EpochState
from millpond.data.streaming.protocol.messages import LEASED
from millpond.train.balance.curve import Ints
from millpond.train.balance.ranges import Ranges, count
from millpond.wire.messages import Message

Told = messages.CommitPositions | messages.LeaveRun
"""What the service has to hear, whatever becomes of a connection."""


@dataclass(frozen=True, slots=True)
class RunWish:
    """Which run a consumer takes part in, by what name; and its order and first state, see JoinRun."""

    run: str
    consumer: str
    seed: int = 0
    shuffle: int = 0
    state: EpochState = field(default_factory=EpochState)


class StreamConsumer(Inbox[S]):
    """Takes part in the epochs of a run; its chunks have ``chunk`` samples, and at most ``window`` bytes are
    on the way to it or wait. Messages for the service gather in ``outgoing``. A consumer without a ``wish``
    only fetches.
    """

    def __init__(self, wish: RunWish | None, window: int, chunk: int = 1) -> None:
        super().__init__(-1)
        self.wish, self.window, self.chunk = wish, window, chunk
        self.outgoing: list[Message] = []
        self.fetches = Fetches[S]()
        self.ended, self.drained, self._joined, self._begins = False, False, False, False
        self.state: messages.RunState | None = None
        self._credit, self._owed, self._welcome = ByteCredit(), 0, False
        self._turn = ""
        self._finished: list[Told] = []
        self._asks, self._said = False, 0

    @property
    def starved(self) -> bool:
        """Whether the service has credit for whatever it has: if nothing comes, it or the link is slow."""
        return self._credit.room * 2 >= self.window

    def connected(self) -> None:
        """Begin a new connection: what was to be said on the last one counts no more."""
        self.outgoing.clear()
        self._credit, self._owed, self.drained = ByteCredit(), 0, False
        self._welcome = self.wish is None
        if self.wish is None:
            self._grant(self.window)
            self.outgoing += self.fetches.again()
            return
        state, now = self.wish.state, self.epoch if self._joined else -1
        who = (self.wish.run, self.wish.consumer, self.wish.seed, self.wish.shuffle)
        begin = (state.epoch, state.cursor, state.returned)
        self.outgoing.append(messages.JoinRun(*who, *begin, now, self.done, self.still, state.samples))

    def check_credit(self, size: int) -> None:
        """Raise ProtocolError for a chunk of more bytes than the service has credit for."""
        self._credit.check(size)

    def receive(self, message: Message, samples: S | None = None, size: int = 0) -> None:
        """Take in a message, and the ``size`` bytes of a chunk's samples. Raises RemoteError."""
        if isinstance(message, messages.DataChunk):
            self._credit.spend(size)
            self._chunk(message, samples, size)
        elif isinstance(message, messages.RunJoined):
            self._rejoined(message)
        elif isinstance(message, messages.EpochBegun):
            self.epoch, self._begins = message.epoch, False
        elif isinstance(message, messages.EpochDrained):
            self.drained = message.epoch == self.epoch
        elif isinstance(message, messages.EpochEnded):
            self.ended = self.ended or message.epoch == self.epoch
        elif isinstance(message, messages.RunState):
            self.state, self._asks = message, False
            del self._finished[: self._said]  # the service had heard it by then
            self._said = 0
        else:
            raise ProtocolError(f"the data service sent '{type(message).NAME}'")

    def _chunk(self, message: messages.DataChunk, samples: S | None, size: int) -> None:
        if samples is None:
            raise ProtocolError("a chunk has come without samples")
        if message.number != LEASED:
            self.fetches.add(message.number, samples)
            self._grant(size)
        elif message.epoch == self.epoch and len(samples) == count(message.ranges):
            self.add(samples, message.ranges, size)
            self.drained = False
        else:
            raise ProtocolError("a chunk has come that does not belong to the epoch")

    def fetch(self, indices: Sequence[int] | Ints) -> int:
        """Ask for samples by their indices. Returns the number of the fetch. Raises LocalError."""
        message = self.fetches.ask(indices)
        self.outgoing.append(message)
        return message.number

    def _rejoined(self, message: messages.RunJoined) -> None:
        if self._joined and message.fresh:
            text = "it was started again without the state of its runs, or forgot this one among too many"
            raise RemoteError(f"the data service does not know how far the epoch is: {text}")
        if message.refused:
            text = f"{message.refused} samples that were done here came to other consumers again"
            raise RemoteError(
                f"{text}: the connection was lost for longer than the grace of the data service"
            )
        if self._joined and message.epoch == self.epoch:
            if back := self.keep(message.held):
                self.outgoing.append(messages.CommitPositions(self.epoch, (), back))
        elif self._joined:
            self.drop()
        self._joined = True
        self.outgoing += self._finished
        if self._asks:
            self.outgoing.append(messages.AskRunState())
        self.freed = self._owed = 0
        self._welcome = True
        self._grant(max(0, self.window - self.bytes))
        if self._begins or self.epoch >= 0:
            self.outgoing.append(messages.BeginEpoch(self.epoch, self._turn if self._begins else ""))

    def begin(self, epoch: int = -1, turn: str = "") -> None:
        """Take part in an epoch, see BeginEpoch. The last one must have ended, or be the same."""
        self.epoch, self.done, self._turn = epoch, (), turn
        self.ended, self.drained, self._begins = False, False, True
        self.outgoing.append(messages.BeginEpoch(epoch, turn))

    @property
    def begun(self) -> bool:
        """Whether the service has said which epoch this is."""
        return not self._begins

    def take(self, wanted: int) -> Sequence[Piece[S]]:
        """Return samples, see ``Inbox.take``; the service gets credit for chunks that are used up."""
        found = super().take(wanted)
        self._credit_freed()
        return found

    def finish_step(self, samples: int | None = None) -> None:
        """Tell the service that all steps with taken samples, or with the first of them, are done."""
        if found := self.commit(samples):
            self.outgoing.append(messages.CommitPositions(self.epoch, found))

    def finish(self, consumer: str, epoch: int, ranges: Ranges) -> None:
        """Tell the service that steps with samples of another consumer are done, one that reads for it."""
        self.tell([messages.CommitPositions(epoch, ranges, (), consumer)])

    def leave(self, consumer: str = "") -> None:
        """Tell the service that a consumer has ended, this one if empty: its samples go to others now."""
        self.tell([messages.LeaveRun(consumer)])

    def tell(self, messages: Sequence[Told]) -> None:
        """Tell the service what consumers before this one were not sure that it has heard, see ``untold``."""
        self._finished += messages
        self.outgoing += messages

    def untold(self) -> list[Told]:
        """Return what the service may not have heard, in words that another consumer can tell it."""
        if not (self.wish and self._joined):
            return [each for each in self._finished if each.consumer]  # the service knows of no own ones
        own = self.wish.consumer
        done = [messages.CommitPositions(self.epoch, self.done, (), own)] if self.done else []
        return [*done, *(replace(each, consumer=each.consumer or own) for each in self._finished)]

    def retune(self, chunk: int, window: int) -> None:
        """Ask for chunks of another number of samples, and for as many bytes on the way, from now on."""
        if (chunk, window) == (self.chunk, self.window):
            return
        self._owed += self.window - window
        self.chunk, self.window = chunk, window
        if self._welcome:
            self._grant(0)

    def ask_state(self) -> None:
        """Ask for the state of the run, which then is in ``state``."""
        self.state, self._asks, self._said = None, True, len(self._finished)
        self.outgoing.append(messages.AskRunState())

    def _credit_freed(self) -> None:
        if self.freed and self._welcome:
            self._grant(self.freed)
            self.freed = 0

    def _grant(self, size: int) -> None:
        """Grant ``size`` bytes, less what a window that has become smaller is to lose."""
        size, self._owed = max(0, size - self._owed), max(0, self._owed - size)
        self._credit.grant(size)
        self.outgoing.append(messages.GrantCredit(size, self.window, self.chunk))
