# SPDX-License-Identifier: Apache-2.0
"""Pure: the host's side of one masked exchange: what it asks of whom, and the masks that it may remove."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from millpond.aggregate.masking import keys, shamir
from millpond.aggregate.masking.keys import Mask
from millpond.aggregate.masking.member import pair_seed, threshold_of
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
        self._accused: dict[str, list[str]] = {}
        self._survivors: frozenset[str] = frozenset()
        self._tags: dict[str, dict[str, bytes]] = {}
        self._shares: dict[str, dict[int, bytes]] = {}

    def opening(self) -> OpenCohort:
        """Return the request to all members."""
        return OpenCohort(self._session, self._members)

    def offered(self, name: str, offer: Offered) -> str:
        """Note a member's offer. Returns what is wrong with it, "" if nothing is seen."""
        if not offer.sealed.keys() == offer.digests.keys() == self._members.keys():
            return "its shares are not for the members of the cohort"
        if len(offer.public) != KEY_BYTES:
            return "its key is none"
        self._offers[name] = offer
        return ""

    def dealing(self, scale: float) -> dict[str, TakeOffers]:
        """Return the request to each member that has made an offer. Raises CohortFailed for too few."""
        self._check_enough(len(self._offers), "take part")
        return {
            name: TakeOffers(
                {
                    each: Dealt(offer.public, offer.commitment, offer.sealed[name], offer.digests[name])
                    for each, offer in self._offers.items()
                },
                scale,
            )
            for name in self._offers
        }

    def _check_enough(self, count: int, text: str, wrong: Mapping[str, str] = {}) -> None:
        if count < self.threshold:
            told = f"{count} of {len(self._members)} devices {text}, {self.threshold} must"
            raise CohortFailed(told, wrong)

    def taken(self, name: str, answer: OffersTaken) -> None:
        """Note of whom a member has wrong shares."""
        for wrong in answer.wrong:
            self._accused.setdefault(wrong, []).append(name)

    def check_taken(self) -> None:
        """Raise CohortFailed if shares are wrong: a member of whom most others say so is at fault, else those
        that say so.
        """
        wrong = dict[str, str]()
        for name, by in self._accused.items():
            if len(by) > len(self._offers) // 2:
                wrong[name] = "the shares of its masks that it has sent to others are wrong"
            else:
                wrong |= dict.fromkeys(by, f"it says that the shares of {name} are wrong")
        if wrong:
            raise CohortFailed("shares of masks are wrong", wrong)

    def agreeing(self, survivors: Collection[str]) -> Agree:
        """Return the request to all whose masked updates have come. Raises CohortFailed for too few."""
        self._check_enough(len(survivors), "have answered")
        self._survivors = frozenset(survivors)
        return Agree(tuple(sorted(survivors)))

    def agreed(self, name: str, answer: Agreed) -> None:
        """Note the tags of a member."""
        self._tags[name] = answer.tags

    def unmasking(self) -> dict[str, Unmask]:
        """Return the request to each member that has agreed. Raises CohortFailed for too few."""
        self._check_enough(len(self._tags), "agree about who has answered")
        return {
            name: Unmask({each: tags[name] for each, tags in self._tags.items() if name in tags})
            for name in self._tags
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
            for name in self._survivors:
                public = self._offers[name].public
                try:
                    seed = pair_seed(self._session, secrets[lost], public, lost, name)
                except ValueError:
                    raise CohortFailed(f"{name}: its key is none", {name: "its key is none"}) from None
                # The survivor has added it if its name comes first.
                yield Mask(seed, subtract=name < lost)

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
