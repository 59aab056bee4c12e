# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages of a data service and its consumers, on a connection of the consumer's own.

After DataOpened both sides send when they like. A consumer either fetches samples by their indices, as a
group's data plan deals them, or joins a run, in which the service leases positions of the epoch's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond.train.balance.ranges import Ranges
from millpond.wire.messages import Kind, Message, message

At = Literal["server", "worker"]
MOST_HEAD = 4 << 20
"""Most bytes of a head, which has shapes of single samples where these differ."""
MOST_FETCHED = 1 << 16
"""Most samples of a FetchSamples."""
MOST_WAITING = 64 * MOST_FETCHED
"""Most samples that a connection has asked for by their indices and has not got."""
MOST_FETCHES = 1024
"""Most FetchSamples of a connection that are not answered."""
LEASED = -1
"""The number of a chunk of leased positions, which nobody has asked for by indices."""


@message("data.open", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class OpenData(Message):
    """Open the data set ``name``, a folder. It is decoded ``at`` the server or the worker; ``transform`` is
    the name of one that the server has. It has labelled images in ``format``, with labels by ``classes`` as a
    job has them, or without it what its files look like. Answered by DataOpened.
    """

    name: str
    secret: str = ""
    at: At = "worker"
    transform: str = ""
    format: Literal["", "npy", "idx", "images"] = ""
    classes: tuple[str, ...] = ()


@message("data.opened", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class DataOpened(Message):
    """The samples of each shard, one shard if any sample can be read at the same cost; the bytes of a sample;
    and what is left to decode at the worker.
    """

    shards: tuple[int, ...]
    sample_bytes: int
    decode: str = ""


@message("data.alive", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ServiceAlive(Message):
    """The service has nothing to send, and is there. If this does not come, it or the link has stopped."""


@message("data.join", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class JoinRun(Message):
    """Take part in the epochs of a ``run`` as ``consumer``; the first one to join gives seed, shuffle window
    and the state to go on from: ``epoch``, ``cursor`` and ``returned``, of a set of ``samples``, 0 if it is
    the state of none yet. One that was here before says what it has ``done`` of the epoch ``now``, and what
    it ``still`` has. Answered by RunJoined.
    """

    run: str
    consumer: str
    seed: int
    window: int = 0
    epoch: int = 0
    cursor: int = 0
    returned: Ranges = ()
    now: int = -1
    done: Ranges = ()
    still: Ranges = ()
    samples: int = 0


@message("data.joined", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class RunJoined(Message):
    """The consumer is in, with positions ``held`` of the ``epoch``. So many of the positions that it has done
    are ``refused``: others have them by now. ``fresh`` if the service knew nothing of the run.
    """

    epoch: int
    held: Ranges
    refused: int
    fresh: bool


@message("data.begin", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class BeginEpoch(Message):
    """Take leases of an ``epoch``, -1 for the one under way; consumers with the same ``turn`` get the same
    one. Answered by EpochBegun.
    """

    epoch: int = -1
    turn: str = ""


@message("data.begun", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class EpochBegun(Message):
    """Samples of the epoch will come; after them EpochEnded. It may be taken back by another one before any
    came.
    """

    epoch: int


@message("data.drained", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class EpochDrained(Message):
    """All positions of the epoch are leased: more samples come only if another consumer gives some back."""

    epoch: int


@message("data.ended", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class EpochEnded(Message):
    """All positions of the epoch are done, by all consumers."""

    epoch: int


@message("data.grant", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GrantCredit(Message):
    """Allow ``size`` more bytes of samples, of the ``window`` that the consumer has in all, in chunks of
    ``chunk`` samples from now on.
    """

    size: int
    window: int
    chunk: int


@message("data.fetch", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class FetchSamples(Message):
    """Send samples, by their ``indices`` (int64), in that order. Answered by chunks of this ``number``."""

    number: int
    indices: bytes


@message("data.commit", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class CommitPositions(Message):
    """The steps with these positions of the epoch are ``done``; those ``back`` are not wanted. They are those
    of a ``consumer``, the one of this connection if empty: a process may speak for those that read for it.
    """

    epoch: int
    done: Ranges = ()
    back: Ranges = ()
    consumer: str = ""


@message("data.leave", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class LeaveRun(Message):
    """Forget a ``consumer`` that has ended, this one if empty: what it has not done goes back now."""

    consumer: str = ""


@message("data.ask_state", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class AskRunState(Message):
    """Answered by RunState."""


@message("data.state", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class RunState(Message):
    """The state of the run, of a set of ``samples``, that any number of consumers can go on from."""

    epoch: int
    cursor: int
    returned: Ranges
    samples: int = 0


@message("data.chunk", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class DataChunk(Message):
    """Samples, see ``columns``: its ``head``, and its payload behind this. They are at ``ranges`` of the
    epoch's order if the ``number`` is LEASED.
    """

    number: int
    epoch: int
    ranges: Ranges
    head: bytes
