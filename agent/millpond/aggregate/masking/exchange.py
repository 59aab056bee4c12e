# SPDX-License-Identifier: Apache-2.0
"""Pure: the host's side of one masked exchange: what it asks of whom, and the masks that it may remove."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from millpond.aggregate.masking import keys, shamir
from millpond.aggregate.masking.keys import Mask
from millpond.aggregate.masking.member import agreement, dealing, dealt_of, mask_seed, pair_seed, threshold_of
from millpond.aggregate.masking.messages import (
    KEY_BYTES,
    Agree,
    Agreed,
    KeyCertificate,
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
from millpond.aggregate.masking.shamir import SHARE_BYTES
from millpond.base.errors import RemoteError


class CohortFailed(RemoteError):
    """The exchange is to be repeated: too few devices are left. ``wrong`` are those at fault, by name."""

    def __init__(self, text: str, wrong: Mapping[str, str] = {}) -> None:
        super().__init__(text)
        self.wrong = wrong


class MaskedExchange:
    """One exchange of the ``members`` with these lasting public keys, under a ``session`` of its own."""

    def __init__(
        self, members: Mapping[str, bytes], session: bytes, certificates: Mapping[str, KeyCertificate] = {}
    ) -> None:
        self._certificates = dict(certificates)
        self._members, self._session = dict(sorted(members.items())), session
        self._numbers = {name: number for number, name in enumerate(self._members, 1)}
        self.threshold = threshold_of(len(members))
        self._offers: dict[str, Offered] = {}
        self._wrong: dict[str, str] = {}
        self._complaints: dict[str, dict[str, bytes]] = {}
        self._shown: dict[str, dict[str, bytes]] = {}
        self._survivors: frozenset[str] = frozenset()
        self._agreed: dict[str, Agreed] = {}
        self._masked = b""
        self._shares: dict[str, dict[int, bytes]] = {}

    def opening(self) -> OpenCohort:
        """Return the request to all members."""
        return OpenCohort(self._session, self._members, self._certificates)

    def offered(self, name: str, offer: Offered) -> str:
        """Note a member's offer. Returns what is wrong with it, "" if nothing is seen."""
        by_member = offer.sealed, offer.digests, offer.signatures
        if not all(each.keys() == self._members.keys() for each in by_member):
            return "its shares are not for the members of the cohort"
        if not keys.is_public(offer.public):
            return "its key is none"
        if not 0 < offer.least <= len(self._members):
            return f"least_devices: {len(self._members)} devices are in the cohort; it needs {offer.least}"
        self._offers[name] = offer
        return ""

    def dealing(self, scale: float, bits: int = 64) -> dict[str, TakeOffers]:
        """Return the request to each member that has made an offer: to round values to multiples of
        ``1 / scale`` in words of so many ``bits``. Raises CohortFailed for too few.
        """
        self._check_enough(len(self._offers), "take part")
        return {
            name: TakeOffers(
                {each: dealt_of(offer, name) for each, offer in self._offers.items()},
                scale,
                bits,
            )
            for name in self._offers
        }

    def _check_enough(self, count: int, text: str, wrong: Mapping[str, str] = {}, least: int = 0) -> None:
        if count < (needed := max(self.threshold, least)):
            told = f"{count} of {len(self._members)} devices {text}, {needed} must"
            raise CohortFailed(told, wrong)

    def taken(self, name: str, answer: OffersTaken) -> str:
        """Note of whom a member has wrong shares, by its word. Returns what is wrong with that, "" if nothing
        is seen.
        """
        for each, signature in answer.wrong.items():
            if each not in self._offers:
                return "it complains about others than take part"
            dealt = dealt_of(self._offers[each], name)
            about = dealing(self._session, each, name, dealt)
            if not keys.is_signed(self._members[each], about, dealt.signature):
                self._wrong[each] = f"it has not signed the shares of its masks for {name}"
            elif keys.is_signed(self._members[name], keys.digest("complaint", about), signature):
                self._complaints.setdefault(each, {})[name] = signature
            else:
                return f"it has not signed its complaint about the shares of {each}"
        return ""

    def showing(self) -> dict[str, ShowShares]:
        """Return the request to each member of whom others have wrong shares, by their word."""
        return {name: ShowShares(complaints) for name, complaints in self._complaints.items()}

    def shown(self, name: str, answer: ShownShares) -> None:
        """Note the shares that a member shows, if they are those that it has announced."""
        for other in self._complaints[name]:
            data = answer.shares.get(other, b"")
            found = keys.digest(data[:SHARE_BYTES]), keys.digest(data[SHARE_BYTES:])
            if found == self._offers[name].digests[other]:
                self._shown.setdefault(other, {})[name] = data

    def handing(self) -> dict[str, TakeShares]:
        """Return the request to each member that has complained: the shares that were shown. Raises
        CohortFailed with the members at fault, which have shown none or wrong ones, or have signed nothing.
        """
        wrong = self._wrong | {
            name: f"its shares of its masks for {other} are wrong"
            for name, complaints in self._complaints.items()
            for other in complaints
            if name not in self._shown.get(other, {})
        }
        if wrong:
            raise CohortFailed("shares of masks are wrong", wrong)
        return {name: TakeShares(shares) for name, shares in self._shown.items()}

    def agreeing(self, survivors: Collection[str]) -> Agree:
        """Return the request to all whose masked updates have come. Raises CohortFailed for too few."""
        least = max((self._offers[name].least for name in survivors), default=0)
        self._check_enough(len(survivors), "have answered", least=least)
        self._survivors = frozenset(survivors)
        return Agree(tuple(sorted(survivors)))

    def agreed(self, name: str, answer: Agreed) -> str:
        """Note the word of a member. Returns what is wrong with it, "" if nothing is seen."""
        publics = {each: offer.public for each, offer in self._offers.items()}
        about = agreement(self._session, publics, answer.masked, self._survivors)
        if not keys.is_signed(self._members[name], about, answer.signature):
            return "it has not signed which devices have answered"
        self._agreed[name] = answer
        return ""

    def unmasking(self) -> dict[str, Unmask]:
        """Return the request to each member that has agreed. Raises CohortFailed for too few, and with those
        whose masks do not cancel, as they have masked something else than most.
        """
        self._check_enough(len(self._agreed), "agree about who has answered")
        counts = Counter(each.masked for each in self._agreed.values())
        self._masked, count = counts.most_common(1)[0]
        if odd := [name for name, each in self._agreed.items() if each.masked != self._masked]:
            text = "it has masked for another job, state or unit than most"
            wrong = dict.fromkeys(odd, text) if count > len(odd) else {}
            raise CohortFailed("masks for other jobs, states or units do not cancel", wrong)
        return {
            name: Unmask({each: told.signature for each, told in self._agreed.items() if each != name})
            for name in self._agreed
        }

    def shared(self, name: str, answer: Shares) -> str:
        """Note the shares of a member. Returns what is wrong with them, "" if nothing is."""
        if answer.shares.keys() != self._offers.keys():
            return "it gives shares of others than take part"
        for each, share in answer.shares.items():
            if keys.digest(share) != self._offers[each].digests[name][each not in self._survivors]:
                return f"its share of a mask of {each} is wrong"
        for each, share in answer.shares.items():
            self._shares.setdefault(each, {})[self._numbers[name]] = share
        return ""

    def masks(self) -> Iterator[Mask]:
        """Yield the masks in the sum of the survivors. Raises CohortFailed for too few shares, or a member
        whose shares are of no secret.
        """
        secrets = {name: self._secret_of(name) for name in self._offers}
        for name in self._survivors:
            yield Mask(secrets[name], subtract=True)
        for lost in self._offers.keys() - self._survivors:
            private = keys.private(secrets[lost])
            for name in self._survivors:
                public = self._offers[name].public
                seed = pair_seed(self._session, private, public, lost, name)
                # The survivor has added it if its name comes first.
                yield Mask(mask_seed(seed, self._masked), subtract=name < lost)

    def _secret_of(self, name: str) -> bytes:
        shares, offer = self._shares.get(name, {}), self._offers[name]
        self._check_enough(len(shares), "have unmasked the sum")
        try:
            found = shamir.join(dict(sorted(shares.items())[: self.threshold]))
        except ValueError:
            found = b""
        if name in self._survivors:
            is_right = keys.digest(found) == offer.commitment
        else:
            is_right = len(found) == KEY_BYTES and keys.public_of(found) == offer.public
        if not is_right:
            text = "the shares of its masks are of no mask"
            raise CohortFailed(f"{name}: {text}", {name: text})
        return found
