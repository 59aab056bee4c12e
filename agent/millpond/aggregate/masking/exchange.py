# SPDX-License-Identifier: Apache-2.0
"""Pure: the host's side of one masked exchange: what it asks of whom, and the masks that it may remove."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from millpond.aggregate.masking import keys, shamir
from millpond.aggregate.masking.keys import Mask
from millpond.aggregate.masking.member import mask_seed, pair_seed, threshold_of
from millpond.aggregate.masking.messages import (
    KEY_BYTES,
    Agree,
    Agreed,
    Dealt,
    Offered,
    OffersTaken,
    OpenCohort,
    Shares,
    TakeOffers,
    Unmask,
)
from millpond.base.errors import RemoteError


class CohortFailed(RemoteError):
    """The exchange is to be repeated: too few devices are left. ``wrong`` are those at fault, by name."""

    def __init__(self, text: str, wrong: Mapping[str, str] = {}) -> None:
        super().__init__(text)
        self.wrong = wrong


class MaskedExchange:
    """One exchange of the ``members`` with these lasting public keys, under a ``session`` of its own."""

    def __init__(self, members: Mapping[str, bytes], session: bytes) -> None:
        self._members, self._session = dict(sorted(members.items())), session
        self._numbers = {name: number for number, name in enumerate(self._members, 1)}
        self.threshold = threshold_of(len(members))
        self._offers: dict[str, Offered] = {}
        self._disputes = set[frozenset[str]]()
        self._survivors: frozenset[str] = frozenset()
        self._tags: dict[str, dict[str, bytes]] = {}
        self._shares: dict[str, dict[int, bytes]] = {}
        self._masked: dict[str, bytes] = {}

    def opening(self) -> OpenCohort:
        """Return the request to all members."""
        return OpenCohort(self._session, self._members)

    def offered(self, name: str, offer: Offered) -> str:
        """Note a member's offer. Returns what is wrong with it, "" if nothing is seen."""
        if not offer.sealed.keys() == offer.digests.keys() == self._members.keys():
            return "its shares are not for the members of the cohort"
        if len(offer.public) != KEY_BYTES:
            return "its key is none"
        if not 0 < offer.least <= len(self._members):
            return f"least_devices: {len(self._members)} devices are in the cohort; it needs {offer.least}"
        self._offers[name] = offer
        return ""

    def dealing(self, scale: float) -> dict[str, TakeOffers]:
        """Return the request to each member that has made an offer. Raises CohortFailed for too few."""
        self._check_enough(len(self._offers), "take part")
        return {
            name: TakeOffers(
                {
                    each: Dealt(
                        offer.public, offer.commitment, offer.sealed[name], offer.digests[name], offer.least
                    )
                    for each, offer in self._offers.items()
                },
                scale,
            )
            for name in self._offers
        }

    def _check_enough(self, count: int, text: str, wrong: Mapping[str, str] = {}, least: int = 0) -> None:
        if count < (needed := max(self.threshold, least)):
            told = f"{count} of {len(self._members)} devices {text}, {needed} must"
            raise CohortFailed(told, wrong)

    def taken(self, name: str, answer: OffersTaken) -> None:
        """Note of whom a member has wrong shares."""
        self._dispute(name, answer.wrong)

    def _dispute(self, name: str, wrong: Iterable[str]) -> None:
        known = self._members.keys() & set(wrong) - {name}
        self._disputes |= {frozenset({name, each}) for each in known}

    def check_taken(self) -> None:
        """Raise CohortFailed if shares are wrong, with those at fault (see ``_at_fault``)."""
        if wrong := self._at_fault(len(self._offers), "about the shares of its masks"):
            raise CohortFailed("shares of masks are wrong", wrong)

    def _at_fault(self, members: int, about: str) -> dict[str, str]:
        """Return who is at fault in the disputes of so many members, and why: those with the most disputes if
        these are with more than a third of the members, as fewer lie, then those of what is left, and both
        members of any other dispute, as one of them lies.
        """
        wrong, left = dict[str, str](), set(self._disputes)
        while left:
            counts = Counter(name for pair in left for name in pair)
            most = max(counts.values())
            if most <= max(1, members // 3):
                break
            found = {name for name, count in counts.items() if count == most}
            wrong |= dict.fromkeys(found, f"more than a third of the devices disagree with it {about}")
            left = {pair for pair in left if not pair & found}
        for one, other in (sorted(pair) for pair in left):
            wrong[one], wrong[other] = (f"{each} and it disagree {about}" for each in (other, one))
        return wrong

    def agreeing(self, survivors: Collection[str]) -> Agree:
        """Return the request to all whose masked updates have come. Raises CohortFailed for too few."""
        least = max((self._offers[name].least for name in survivors), default=0)
        self._check_enough(len(survivors), "have answered", least=least)
        self._survivors = frozenset(survivors)
        return Agree(tuple(sorted(survivors)))

    def agreed(self, name: str, answer: Agreed) -> str:
        """Note the tags of a member. Returns what is wrong with them, "" if nothing is seen."""
        if answer.tags.keys() != self._survivors - {name}:
            return "its tags are not for the devices that have answered"
        self._tags[name] = answer.tags
        return ""

    def unmasking(self) -> dict[str, Unmask]:
        """Return the request to each member that has agreed. Raises CohortFailed for too few."""
        self._check_enough(len(self._tags), "agree about who has answered")
        return {
            name: Unmask({each: tags[name] for each, tags in self._tags.items() if name in tags})
            for name in self._tags
        }

    def shared(self, name: str, answer: Shares) -> str:
        """Note the shares of a member. Returns what is wrong with them, "" if nothing is."""
        self._dispute(name, answer.wrong)
        if answer.wrong and not answer.shares:
            return ""
        if answer.shares.keys() != self._offers.keys():
            return "it gives shares of others than take part"
        for each, share in answer.shares.items():
            if keys.digest(share) != self._offers[each].digests[name][each not in self._survivors]:
                return f"its share of a mask of {each} is wrong"
        self._masked[name] = answer.masked
        for each, share in answer.shares.items():
            self._shares.setdefault(each, {})[self._numbers[name]] = share
        return ""

    def disagreeing(self) -> dict[str, str]:
        """Return the members at fault whose tags are wrong, and why (see ``_at_fault``)."""
        return self._at_fault(len(self._tags), "about job, state, unit or who has answered")

    def masks(self) -> Iterator[Mask]:
        """Yield the masks in the sum of the survivors. Raises CohortFailed for too few shares, or a member
        whose shares are of no secret.
        """
        secrets = {name: self._secret_of(name) for name in self._offers}
        masked = Counter(self._masked.values()).most_common(1)[0][0]
        for name in self._survivors:
            yield Mask(secrets[name], subtract=True)
        for lost in self._offers.keys() - self._survivors:
            private = keys.private(secrets[lost])
            for name in self._survivors:
                public = self._offers[name].public
                try:
                    seed = pair_seed(self._session, private, public, lost, name)
                except ValueError:
                    raise CohortFailed(f"{name}: its key is none", {name: "its key is none"}) from None
                # The survivor has added it if its name comes first.
                yield Mask(mask_seed(seed, masked), subtract=name < lost)

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
