# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages of a masked exchange, between the host and each device of its cohort.

The host asks: OpenCohort, TakeOffers, then Work, whose update is masked; of those whose updates have come,
Agree and Unmask. Each is answered once in an exchange, in this order, or by Failure.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Kind, Message, message

KEY_BYTES = 32
LEAST_COHORT, MOST_COHORT = 2, 1024


@message("cohort.open")
@dataclass(frozen=True, slots=True)
class OpenCohort(Message):
    """Begin an exchange of the ``members``, whose lasting public keys are given, under the name ``session``;
    a number of 16 bytes, which a device opens once; answered by Offered.
    """

    session: bytes
    members: dict[str, bytes]


@message("cohort.offered")
@dataclass(frozen=True, slots=True)
class Offered(Message):
    """The ``public`` key of the device in this exchange, a ``commitment`` to the seed of its own mask, and
    the shares of both secrets: ``sealed`` by member, with the ``digests`` of either. A sum with its update is
    of ``least`` devices.
    """

    public: bytes
    commitment: bytes
    sealed: dict[str, bytes]
    digests: dict[str, tuple[bytes, bytes]]
    least: int


@dataclass(frozen=True, slots=True)
class Dealt:
    """An offer as it is dealt to one of the other members."""

    public: bytes
    commitment: bytes
    sealed: bytes
    digests: tuple[bytes, bytes]
    least: int


@message("cohort.offers")
@dataclass(frozen=True, slots=True)
class TakeOffers(Message):
    """The ``offers`` of those that take part, by name. Values are to be rounded to multiples of
    ``1 / scale``. Answered by OffersTaken.
    """

    offers: dict[str, Dealt]
    scale: float


@message("cohort.taken")
@dataclass(frozen=True, slots=True)
class OffersTaken(Message):
    """The names of the members whose shares are ``wrong``."""

    wrong: tuple[str, ...] = ()


@message("cohort.agree")
@dataclass(frozen=True, slots=True)
class Agree(Message):
    """The members whose masked updates have come; answered by Agreed."""

    survivors: tuple[str, ...]


@message("cohort.agreed")
@dataclass(frozen=True, slots=True)
class Agreed(Message):
    """By member a tag for it, that this device was told of the same survivors."""

    tags: dict[str, bytes]


@message("cohort.unmask")
@dataclass(frozen=True, slots=True)
class Unmask(Message):
    """The ``tags`` of the other members for the device; answered by Shares."""

    tags: dict[str, bytes]


@message("cohort.shares", Kind.CONTROL)
@dataclass(frozen=True, slots=True)
class Shares(Message):
    """One share by member: of the seed of its own mask if it survives, else of its secret key; none if too
    few members agree with the device. ``wrong`` are the members whose tags say that they do not. ``masked``
    is a digest of what the device has masked, by which the host finds the masks of lost members.
    """

    shares: dict[str, bytes]
    wrong: tuple[str, ...] = ()
    masked: bytes = b""
