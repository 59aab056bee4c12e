# SPDX-License-Identifier: Apache-2.0
"""Pure: the device's side of masked exchanges (Bonawitz et al. 2017, doi:10.1145/3133956.3133982).

An update leaves with the mask of the device's own seed and, for each other member, one that the two have in
common, which one of them adds and the other subtracts. After the survivors are known, the members give shares
of the seeds of the survivors and of the keys of the others: of each member either, never both. A member
gives its shares when ``threshold`` members, and as many as its own policy asks for, have been told of the
same survivors and have masked updates of the same job, state and unit: as more than half of them are needed,
there is one such set in an exchange. Masks of two members that have masked other things do not cancel.
Otherwise a host could give all members but one a state at which their updates are 0, and have the update of
the one (Pasquini et al. 2022, arXiv:2111.07380).

Members sign what they send, so that the host can tell who sends wrong things. Only shares are not for it to
see: a member that gets wrong ones signs a complaint about all that it has got, by which the sender shows the
two shares to the host (as in the verifiable sharing of Feldman 1987). An honest member complains of a
dishonest one alone, and an honest one shows only what it has sealed for a dishonest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from millpond.aggregate.masking import keys, shamir
from millpond.aggregate.masking.keys import Mask
from millpond.aggregate.masking.messages import (
    KEY_BYTES,
    WIDTHS,
    Agree,
    Agreed,
    Dealt,
    Offered,
    OffersTaken,
    OpenCohort,
    Shares,
    ShownShares,
    ShowShares,
    TakeOffers,
    TakeShares,
    Unmask,
)
from millpond.aggregate.masking.roster import CohortRoster, refuse
from millpond.aggregate.masking.shamir import SECRET_BYTES, SHARE_BYTES, Random
from millpond.base.errors import Refused


def threshold_of(members: int) -> int:
    """Return how many of so many members unmask a sum: the others, fewer than a third, may be lost. Two sets
    of so many have a member in common that is honest, if up to a third are not.
    """
    return members - (members - 1) // 3


class _Exchange:
    """The secrets of one exchange, and what was taken of the others."""

    def __init__(self, request: OpenCohort, random: Random) -> None:
        self.session, self.members = request.session, dict(sorted(request.members.items()))
        self.threshold = threshold_of(len(self.members))
        self.seed, self.secret = random(SECRET_BYTES), random(KEY_BYTES)
        self.private, self.public = keys.private(self.secret), keys.public_of(self.secret)
        self.dealt: dict[str, tuple[bytes, bytes]] = {}
        self.made = Offered(b"", b"", {}, {}, {}, 0)
        self.offers: dict[str, Dealt] = {}
        self.shares: dict[str, tuple[bytes, bytes]] = {}
        self.seeds: dict[str, bytes] = {}
        self.scale, self.bits, self.what = 0.0, 0, b""
        self.survivors: tuple[str, ...] = ()

    def about(self) -> bytes:
        """Return what the device says about the exchange, see ``agreement``."""
        publics = {name: each.public for name, each in self.offers.items()}
        return agreement(self.session, publics, self.masked(), self.survivors)

    def keep(self, name: str, data: bytes) -> bool:
        """Keep the two shares of a member. Returns whether they are those that it has announced."""
        found = data[:SHARE_BYTES], data[SHARE_BYTES:]
        is_right = (keys.digest(found[0]), keys.digest(found[1])) == self.offers[name].digests
        if is_right:
            self.shares[name] = found
        return is_right

    def masked(self) -> bytes:
        """Return a digest of what the update of the device is of, of its unit, and of the width of words."""
        return keys.digest(self.what, self.scale.hex(), str(self.bits))


class CohortMember:
    """The device ``name`` with its lasting ``secret`` key in the exchanges of one job. ``opened`` notes each
    session, and raises Refused for one that may have been opened with this key before. It is to be noted
    durably before the caller gives the shares of ``unmask`` away.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        roster: CohortRoster,
        random: Random,
        opened: Callable[[bytes], None],
    ) -> None:
        self.roster = roster  # a newer one is for the exchanges that are opened from then on
        self._name, self._random, self._opened = name, random, opened
        self._key = keys.LastingKey(secret)
        self._exchange: _Exchange | None = None
        self._next = ""
        self._in_common: dict[bytes, bytes] = {}  # the secrets in common with lasting keys of others

    @property
    def rounding(self) -> tuple[float, int]:
        """The number by which values are multiplied before they are rounded, and how many updates the sum is
        of. Raises Refused where no exchange has begun.
        """
        exchange = self._begun("mask", "mask")
        return exchange.scale, len(exchange.offers)

    @property
    def bits(self) -> int:
        """The bits of the words that are to be masked. Raises Refused where no exchange has begun."""
        return self._begun("mask", "mask").bits

    @property
    def survivors(self) -> tuple[str, ...]:
        """The devices of the sum of the present exchange, as far as the host has told them."""
        return self._exchange.survivors if self._exchange else ()

    @property
    def fewest(self) -> int:
        """The fewest updates of which the sum can be: as many on all devices that have taken the same
        offers.
        """
        return threshold_of(len(self._begun("mask", "mask").offers))

    def open(self, request: OpenCohort) -> Offered:
        """Begin an exchange; the last one ends unfinished. Raises Refused for another roster than the
        device's own, and for a session that is not new.
        """
        self._exchange, self._next = None, ""
        self.roster.check(request.members)
        if request.members.get(self._name) != self._key.public:
            refuse(f"cohort: the host gives '{self._name}' another key than it has")
        self._opened(request.session)
        made, count = _Exchange(request, self._random), len(request.members)
        public, commitment = made.public, keys.digest(made.seed)
        pairs = zip(
            *(shamir.split(each, count, made.threshold, self._random) for each in (made.seed, made.secret)),
            strict=True,
        )
        shares = dict(zip(made.members, pairs, strict=True))
        digests = {name: (keys.digest(one), keys.digest(two)) for name, (one, two) in shares.items()}
        sealed, signatures = dict[str, bytes](), dict[str, bytes]()
        for name, (one, two) in shares.items():
            key = self._pair_key("shares", made, self._name, name)
            sealed[name] = keys.seal(key, self._random(12), one + two, b"")
            dealt = Dealt(public, commitment, sealed[name], digests[name], self.roster.least, b"")
            signatures[name] = self._key.sign(dealing(made.session, self._name, name, dealt))
        made.dealt, made.made = (
            shares,
            Offered(public, commitment, sealed, digests, signatures, self.roster.least),
        )
        self._exchange, self._next = made, "take"
        return made.made

    def _pair_key(self, use: str, exchange: _Exchange, sender: str, receiver: str) -> bytes:
        """Return the key for what one member, of whom the device is one, sends to another."""
        other = exchange.members[receiver if sender == self._name else sender]
        if other not in self._in_common:
            try:
                self._in_common[other] = keys.in_common(self._key.agreement, other[:KEY_BYTES])
            except ValueError:
                refuse(f"cohort: a key of '{sender}' or '{receiver}' is none")
        return keys.derived(self._in_common[other], use, exchange.session, sender, receiver)

    def _begun(self, step: str, following: str) -> _Exchange:
        """Return the exchange if ``step`` is its next one. Raises Refused."""
        exchange = self._exchange
        if exchange is None or self._next != step:
            raise Refused("", "policy", f"cohort: '{step}' is not the next step of a masked exchange")
        self._next = following
        return exchange

    def take(self, request: TakeOffers) -> OffersTaken:
        """Take the shares of the members that take part. Raises Refused if these are too few, or others."""
        exchange = self._begun("take", "mask")
        if math.frexp(request.scale)[0] != 0.5:  # in other units words, and so noise, are of another size
            refuse(f"cohort: values are rounded to powers of two, not to multiples of 1 / {request.scale}")
        if request.bits not in WIDTHS:
            refuse(f"cohort: words of {request.bits} bits are none")
        taking_part = {name: exchange.members.get(name, b"") for name in request.offers}
        self.roster.check(taking_part)
        least = exchange.threshold
        if not exchange.members.keys() >= taking_part.keys() or len(taking_part) < least:
            refuse(f"cohort: {len(taking_part)} of {len(exchange.members)} members take part, {least} must")
        own = request.offers.get(self._name)
        if own is None or own.public != exchange.public:
            refuse("cohort: the host leaves the device's own offer out")
        exchange.offers, exchange.scale, exchange.bits = request.offers, request.scale, request.bits
        wrong = {}
        for name, offer in request.offers.items():
            about = dealing(exchange.session, name, self._name, offer)
            if not keys.is_signed(exchange.members[name], about, offer.signature):
                wrong[name] = b""
            elif not self._take_offer(exchange, name, offer):
                wrong[name] = self._key.sign(keys.digest("complaint", about))
        return OffersTaken(wrong)

    def _take_offer(self, exchange: _Exchange, name: str, offer: Dealt) -> bool:
        """Keep the shares that a member has sealed, and the seed in common with it. Returns whether they are
        what it has announced. Raises Refused for a key with which there is no secret in common.
        """
        try:
            seed = pair_seed(exchange.session, exchange.private, offer.public, self._name, name)
        except ValueError:
            refuse(f"cohort: the host goes on with '{name}', whose key is none")
        exchange.seeds[name] = seed
        data = keys.unseal(self._pair_key("shares", exchange, name, self._name), offer.sealed, b"")
        return data is not None and exchange.keep(name, data)

    def show(self, request: ShowShares) -> ShownShares:
        """Show shares to the members that have complained about what they have got of this device, and so to
        the host. Raises Refused for complaints about anything else.
        """
        exchange = self._begun("mask", "mask")
        made, shown = exchange.made, dict[str, bytes]()
        for name, signature in request.complaints.items():
            if name not in exchange.offers:
                refuse(f"cohort: '{name}' does not take part")
            about = dealing(exchange.session, self._name, name, dealt_of(made, name))
            if not keys.is_signed(exchange.members[name], keys.digest("complaint", about), signature):
                refuse(f"cohort: '{name}' has not complained about what it was sent")
            shown[name] = b"".join(exchange.dealt[name])
        return ShownShares(shown)

    def take_shown(self, request: TakeShares) -> OffersTaken:
        """Take shares that others have shown. Raises Refused for wrong ones."""
        exchange = self._begun("mask", "mask")
        for name, data in request.shares.items():
            if name not in exchange.offers or name in exchange.shares or not exchange.keep(name, data):
                refuse(f"cohort: the shares that the host gives for those of '{name}' are not its own")
        return OffersTaken()

    def masks(self, what: bytes = b"") -> list[Mask]:
        """Return the device's masks for its update, once in an exchange; ``what`` it is of is the same for
        all members. Raises Refused.
        """
        exchange = self._begun("mask", "agree")
        exchange.what = what
        if exchange.shares.keys() != exchange.offers.keys():
            refuse("cohort: the host goes on with members whose shares are wrong")
        pairs, masked = {n: seed for n, seed in exchange.seeds.items() if n != self._name}, exchange.masked()
        masks = [Mask(mask_seed(seed, masked), subtract=self._name > name) for name, seed in pairs.items()]
        return [Mask(exchange.seed), *masks]

    def agree(self, request: Agree) -> Agreed:
        """Tell the other members who survives, by the host's word. Raises Refused for too few."""
        exchange = self._begun("agree", "unmask")
        survivors = set(request.survivors)
        if not survivors <= exchange.offers.keys() or self._name not in survivors:
            refuse("cohort: the host names survivors that do not take part")
        fewest = max(exchange.offers[name].least for name in survivors)  # a sum without it needs no tag of it
        if len(survivors) < max(exchange.threshold, fewest):
            least = f"{exchange.threshold} must answer, and by least_devices {fewest}"
            refuse(f"cohort: {len(survivors)} of {len(exchange.offers)} devices have answered; {least}")
        exchange.survivors = tuple(sorted(survivors))
        return Agreed(exchange.masked(), self._key.sign(exchange.about()))

    def unmask(self, request: Unmask) -> Shares:
        """Give one share of each member that takes part, once in an exchange. Raises Refused unless enough
        members have masked the same and were told of the same survivors.
        """
        exchange = self._begun("unmask", "")
        about, least = exchange.about(), max(exchange.threshold, self.roster.least)
        agree = 1 + sum(
            name in exchange.survivors and keys.is_signed(exchange.members[name], about, signature)
            for name, signature in request.signatures.items()
            if name != self._name
        )
        if agree < least:
            text = "agree about job, state, unit and who has answered"
            refuse(f"cohort: {agree} devices {text}, {least} must")
        return Shares({name: both[name not in exchange.survivors] for name, both in exchange.shares.items()})


def dealing(session: bytes, sender: str, receiver: str, dealt: Dealt) -> bytes:
    """Return what a member signs of what another one gets of it."""
    parts = dealt.public, dealt.commitment, dealt.sealed, *dealt.digests, str(dealt.least)
    return keys.digest("dealt", session, sender, receiver, *parts)


def dealt_of(offer: Offered, receiver: str) -> Dealt:
    """Return what another member gets of an offer."""
    sealed, digests = offer.sealed[receiver], offer.digests[receiver]
    signature = offer.signatures[receiver]
    return Dealt(offer.public, offer.commitment, sealed, digests, offer.least, signature)


def agreement(
    session: bytes, publics: Mapping[str, bytes], masked: bytes, survivors: Collection[str]
) -> bytes:
    """Return what a member signs before the sum is unmasked: which offers it has taken, by their public keys,
    what it has ``masked``, and who survives.
    """
    offers = [part for name, public in sorted(publics.items()) for part in (name, public)]
    return keys.digest("agreed", session, *offers, "masked", masked, "survivors", *sorted(survivors))


def pair_seed(session: bytes, private: X25519PrivateKey, public: bytes, one: str, other: str) -> bytes:
    """Return the seed of the mask that two members have in common, by the key of either in the exchange.
    Raises ValueError for what is no public key.
    """
    return keys.derived(keys.in_common(private, public), "mask", session, *sorted((one, other)))


def mask_seed(seed: bytes, masked: bytes) -> bytes:
    """Return the seed of the mask that two members with a ``seed`` in common add to what they have
    ``masked``: if one of them has masked something else their masks do not cancel, and nothing removes them.
    """
    return keys.derived(seed, "masked", masked)
