# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages of a masked exchange, between the host and each device of its cohort.

The host asks: OpenCohort, TakeOffers, then Work, whose update is masked; of those whose updates have come,
Agree and Unmask. Each is answered once in an exchange, in this order, or by Failure. ShowShares and
TakeShares come before Work, and only where a member says that it has wrong shares of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from millpond.wire.messages import Kind, Message, message

KEY_BYTES = 32
LASTING_BYTES = 64
"""A lasting public key: one for secrets in common (X25519), one that verifies signatures (Ed25519)."""
LEAST_COHORT, MOST_COHORT = 2, 1024
WIDTHS: Final = (32, 64)
"""The bits that masked words may have."""
SumBits = Literal["auto", 64, 32]
"""The bits that a job wants, see ``fixed_point``."""


@dataclass(frozen=True, slots=True)
class KeyCertificate:
    """A ``signature`` of a device's lasting public key, by the key of the device's ``certificate`` (DER)."""

    certificate: bytes = b""
    signature: bytes = b""


NO_CERTIFICATE = KeyCertificate()


@message("cohort.open")
@dataclass(frozen=True, slots=True)
class OpenCohort(Message):
    """Begin an exchange of the ``members``, whose lasting public keys are given, under the name ``session``;
    a number of 16 bytes, which a device opens once; answered by Offered. The ``certificates`` of these keys
    are for devices that have pinned none.
    """

    session: bytes
    members: dict[str, bytes]
    certificates: dict[str, KeyCertificate] = field(default_factory=dict)


@message("cohort.offered")
@dataclass(frozen=True, slots=True)
class Offered(Message):
    """The ``public`` key of the device in this exchange, a ``commitment`` to the seed of its own mask, and
    the shares of both secrets: ``sealed`` by member, with the ``digests`` of either, and a signature of all
    that this member gets. A sum with its update is of ``least`` devices.
    """

    public: bytes
    commitment: bytes
    sealed: dict[str, bytes]
    digests: dict[str, tuple[bytes, bytes]]
    signatures: dict[str, bytes]
    least: int


@dataclass(frozen=True, slots=True)
class Dealt:
    """An offer as it is dealt to one of the other members."""

    public: bytes
    commitment: bytes
    sealed: bytes
    digests: tuple[bytes, bytes]
    least: int
    signature: bytes


@message("cohort.offers")
@dataclass(frozen=True, slots=True)
class TakeOffers(Message):
    """The ``offers`` of those that take part, by name. Values are to be rounded to multiples of
    ``1 / scale``, and masked as words of so many ``bits``. Answered by OffersTaken.
    """

    offers: dict[str, Dealt]
    scale: float
    bits: int = 64


@message("cohort.taken")
@dataclass(frozen=True, slots=True)
class OffersTaken(Message):
    """The members whose shares are ``wrong``, each with the device's signature of what it has got of it,
    empty if the member has not signed that.
    """

    wrong: dict[str, bytes] = field(default_factory=dict)


@message("cohort.show")
@dataclass(frozen=True, slots=True)
class ShowShares(Message):
    """The ``complaints`` of other members about the shares that the device has sealed for them, by name, as
    they have signed them; answered by ShownShares.
    """

    complaints: dict[str, bytes]


@message("cohort.shown", Kind.CONTROL)
@dataclass(frozen=True, slots=True)
class ShownShares(Message):
    """The two shares, one behind the other, of each member that has complained."""

    shares: dict[str, bytes]


@message("cohort.take")
@dataclass(frozen=True, slots=True)
class TakeShares(Message):
    """The ``shares`` that others have shown, by name, of which the device has complained; answered by
    OffersTaken.
    """

    shares: dict[str, bytes]


@message("cohort.agree")
@dataclass(frozen=True, slots=True)
class Agree(Message):
    """The members whose masked updates have come; answered by Agreed."""

    survivors: tuple[str, ...]


@message("cohort.agreed")
@dataclass(frozen=True, slots=True)
class Agreed(Message):
    """A digest of what the device has ``masked``, and its ``signature`` of that, of the offers that it has
    taken, and of the survivors.
    """

    masked: bytes
    signature: bytes


@message("cohort.unmask")
@dataclass(frozen=True, slots=True)
class Unmask(Message):
    """The ``signatures`` of the members that have masked the same; answered by Shares."""

    signatures: dict[str, bytes]


@message("cohort.shares", Kind.CONTROL)
@dataclass(frozen=True, slots=True)
class Shares(Message):
    """One share by member: of the seed of its own mask if it survives, else of its secret key."""

    shares: dict[str, bytes]
