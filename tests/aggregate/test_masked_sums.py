# SPDX-License-Identifier: Apache-2.0
"""Masked sums of cohorts: the bits of exact sums, whoever is lost, and what a host can learn."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest

from millpond.aggregate.exact import ExactSum, scale_of
from millpond.aggregate.masking import fixed_point, keys
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.member import CohortMember, dealing, dealt_of, threshold_of
from millpond.aggregate.masking.messages import (
    Agree,
    Agreed,
    Offered,
    OffersTaken,
    Shares,
    ShowShares,
    TakeOffers,
    Unmask,
)
from millpond.aggregate.masking.roster import CohortRoster
from millpond.aggregate.masking.stream import MaskedVector
from millpond.base.errors import Refused

SIZE = 300


class Fleet:
    """Devices and a host in this process. Each of ``lost`` is lost before the step that is given."""

    def __init__(self, count: int, lost: dict[str, int], least: int = 2, bits: int = 64) -> None:
        self.names = [f"csd{number}" for number in range(count)]
        secrets = {name: os.urandom(32) for name in self.names}
        self.keys = {name: keys.LastingKey(secret).public for name, secret in secrets.items()}
        roster = CohortRoster(least, self.keys)
        self.members = {
            name: CohortMember(name, secrets[name], roster, os.urandom, set[bytes]().add)
            for name in self.names
        }
        self.lost, self.host = lost, MaskedExchange(self.keys, os.urandom(16))
        self.values = {name: np.random.default_rng(n).normal(size=SIZE) for n, name in enumerate(self.names)}
        self.bits, self.came = bits, dict[str, MaskedVector]()
        self.scale = scale_of(8.0, count, fixed_point.bits_of_sum(bits))
        self.survivors: list[str] = []

    def present(self, step: int) -> list[str]:
        return [name for name in self.names if self.lost.get(name, 9) > step]

    def begin(self) -> None:
        for name in self.present(0):
            assert not self.host.offered(name, self.members[name].open(self.host.opening()))
        self.deal(self.host.dealing(self.scale))

    def deal(self, dealing: dict[str, TakeOffers]) -> None:
        for name in set(self.present(1)) & dealing.keys():
            assert not self.host.taken(name, self.members[name].take(dealing[name]))
        self.show()

    def show(self) -> None:
        for name, asked in self.host.showing().items():
            self.host.shown(name, self.members[name].show(asked))
        for name, shown in self.host.handing().items():
            self.members[name].take_shown(shown)

    def answer(self) -> None:
        for name in self.present(2):
            words = MaskedVector(SIZE, self.bits)
            values = self.values[name].astype(np.float32)
            quantiser = fixed_point.Quantiser(self.bits, self.scale, 1.0, 8.0, len(self.names))
            quantiser.write(values, words.values)
            words.figures[:] = [fixed_point.whole_figure(figure) for figure in (0.5, 3.0)]
            words.add_masks(self.members[name].masks())
            self.came[name] = words
        self.survivors = list(self.came)
        request = self.host.agreeing(self.survivors)
        for name in self.present(3):
            self.host.agreed(name, self.members[name].agree(request))

    def unmask(self) -> None:
        asked = self.host.unmasking()
        for name in self.present(4):
            assert not self.host.shared(name, self.members[name].unmask(asked[name]))

    def sum(self) -> MaskedVector:
        total = MaskedVector(SIZE, self.bits)
        for name in self.survivors:
            total.add(self.came[name])
        total.add_masks(list(self.host.masks()))
        return total

    def run(self) -> MaskedVector:
        self.begin()
        self.answer()
        self.unmask()
        return self.sum()


def exact(fleet: Fleet) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    total, mean = ExactSum(SIZE), np.empty(SIZE, np.float32)
    total.begin(fleet.scale)
    for name in reversed(fleet.survivors):
        total.add(fleet.values[name].astype(np.float32))
    total.divide(3.0, mean)
    return mean


def test_any_devices_lost_at_any_step_and_the_sum_has_the_bits_of_the_exact_one_or_there_is_none() -> None:
    ended = 0
    for schedule in range(200):
        rng = random.Random(schedule)
        count = rng.randint(2, 9)
        few = rng.sample(range(count), rng.randint(0, count // 3 + (schedule % 4 == 0)))
        fleet = Fleet(
            count,
            {f"csd{rank}": rng.randint(0, 4) for rank in few},
            rng.randint(2, 3),
            (32, 64)[schedule % 2],
        )
        try:
            found = fleet.run()
        except (CohortFailed, Refused):
            check_what_the_host_knows(fleet)
            continue
        ended += 1
        mean = np.empty(SIZE, np.float32)
        figures = fixed_point.divide(found, fleet.scale, 3.0, mean)
        assert figures == (0.5 * len(fleet.survivors), 3.0 * len(fleet.survivors))
        assert mean.tobytes() == exact(fleet).tobytes()
        check_what_the_host_knows(fleet)
    assert 100 < ended < 200


def check_what_the_host_knows(fleet: Fleet) -> None:
    """Of no member both secrets can be known, and of the masks of own seeds those of a set that is large
    enough: without its own seed no update, nor a sum with it, can be had.
    """
    known = {name for name, shares in fleet.host._shares.items() if len(shares) >= fleet.host.threshold}
    own = known & set(fleet.survivors)
    assert not own or len(own) == len(fleet.survivors) >= max(fleet.host.threshold, 2)


def test_masked_values_alone_are_noise() -> None:
    fleet = Fleet(3, {})
    fleet.values = {name: np.zeros(SIZE) for name in fleet.names}
    fleet.begin()
    fleet.answer()
    sum_of_two = MaskedVector(SIZE, 64)
    for name in ("csd0", "csd1"):
        sum_of_two.add(fleet.came[name])
    for words in (*fleet.came.values(), sum_of_two):
        bits = np.unpackbits(words.data).mean()
        assert abs(bits - 0.5) < 0.02


def test_a_host_that_names_other_survivors_to_each_gets_no_share() -> None:
    fleet = Fleet(6, {})
    fleet.begin()
    told = [fleet.names[:5], fleet.names[1:]]
    signatures: dict[str, bytes] = {}
    for number, name in enumerate(fleet.names[1:5]):
        fleet.members[name].masks()
        signatures[name] = fleet.members[name].agree(Agree(tuple(told[number % 2]))).signature
    for name in fleet.names[1:5]:
        with pytest.raises(Refused, match=r"2 devices agree about .* who has answered, 5 must"):
            fleet.members[name].unmask(Unmask(signatures))


@pytest.mark.parametrize("odd", [1, 2, 5])
@pytest.mark.parametrize("differs", ["what", "scale"])
def test_devices_that_mask_for_other_states_or_units_give_no_share(differs: str, odd: int) -> None:
    """A host could give all but one a state, or a unit, at which their updates are 0: the sum would be the
    update of that one. Up to a third may differ; the others are as many as each of them asks for.
    """
    fleet, threshold = Fleet(6, {}, least=5), 5
    for name in fleet.names:
        fleet.host.offered(name, fleet.members[name].open(fleet.host.opening()))
    for number, (name, dealt) in enumerate(fleet.host.dealing(1.0).items()):
        is_odd = number < odd
        fleet.members[name].take(replace(dealt, scale=0.5 if is_odd and differs == "scale" else 1.0))
        fleet.members[name].masks(b"other" * (is_odd and differs == "what"))
    signatures, request = dict[str, bytes](), fleet.host.agreeing(fleet.names)
    for name in fleet.names:
        answer = fleet.members[name].agree(request)
        assert not fleet.host.agreed(name, answer)
        signatures[name] = answer.signature
    with pytest.raises(CohortFailed, match="do not cancel") as caught:
        fleet.host.unmasking()
    assert set(caught.value.wrong) == set(fleet.names[:odd] if odd < 3 else fleet.names[odd:])
    for number, name in enumerate(fleet.names):
        same = odd if number < odd else 6 - odd
        if same < threshold:
            with pytest.raises(Refused, match=f"{same} devices agree about job, state"):
                fleet.members[name].unmask(Unmask(signatures))
        else:
            assert fleet.members[name].unmask(Unmask(signatures)).shares


@pytest.mark.parametrize("differs", ["what", "scale"])
def test_the_update_of_one_device_with_another_state_is_in_no_sum(differs: str) -> None:
    """The others, whose updates are 0, are enough to unmask: the masks of the one must not cancel."""
    fleet = Fleet(6, {})
    for name in fleet.names:
        fleet.host.offered(name, fleet.members[name].open(fleet.host.opening()))
    total = MaskedVector(SIZE, 64)
    for name, dealt in fleet.host.dealing(1.0).items():
        is_odd = name == "csd0"
        fleet.members[name].take(replace(dealt, scale=0.5 if is_odd and differs == "scale" else 1.0))
        words = MaskedVector(SIZE, 64)
        words.values[:] = 1000 * is_odd
        words.add_masks(fleet.members[name].masks(b"other" * (is_odd and differs == "what")))
        total.add(words)
    request, words = fleet.host.agreeing(fleet.names), dict[str, Agreed]()
    for name in fleet.names:
        words[name] = fleet.members[name].agree(request)
        fleet.host.agreed(name, words[name])
    signatures = {name: word.signature for name, word in words.items()}
    fleet.host._masked = words["csd1"].masked
    for name in fleet.names[1:]:
        fleet.host.shared(name, fleet.members[name].unmask(Unmask(signatures)))
    total.add_masks(list(fleet.host.masks()))
    assert abs(np.unpackbits(total.values.view(np.uint8)).mean() - 0.5) < 0.02


@pytest.mark.parametrize(("wrong", "left"), [(1, True), (2, False)])
def test_members_that_have_not_signed_who_has_answered_are_named_alone(wrong: int, left: bool) -> None:
    fleet = Fleet(4, {})
    fleet.begin()
    request = fleet.host.agreeing(fleet.names)
    for number, name in enumerate(fleet.names):
        fleet.members[name].masks()
        answer = fleet.members[name].agree(request)
        if number < wrong:
            fault = fleet.host.agreed(name, replace(answer, signature=bytes(64)))
            assert fault == "it has not signed which devices have answered"
        else:
            assert not fleet.host.agreed(name, answer)
    if not left:
        with pytest.raises(CohortFailed, match="2 of 4 devices agree"):
            fleet.host.unmasking()
        return
    for name, asked in fleet.host.unmasking().items():
        assert not fleet.host.shared(name, fleet.members[name].unmask(asked))
    assert len(list(fleet.host.masks())) == 4


def test_shares_are_given_once_and_of_each_member_one() -> None:
    fleet = Fleet(6, {"csd5": 2})
    fleet.run()
    member = fleet.members["csd0"]
    for again in (lambda: member.unmask(Unmask({})), lambda: member.agree(Agree(tuple(fleet.names)))):
        with pytest.raises(Refused, match="not the next step"):
            again()
    with pytest.raises(Refused, match="not the next step"):
        member.masks()
    assert {len(shares) for shares in fleet.host._shares.values()} == {5}


@pytest.mark.parametrize("least", [3, 5])
def test_a_device_unmasks_no_sum_of_fewer_than_it_allows(least: int) -> None:
    fleet = Fleet(6, {}, least=least)
    fleet.begin()
    fleet.members["csd0"].masks()
    with pytest.raises(
        Refused, match=f"2 of 6 devices have answered; 5 must answer, .*least_devices {least}"
    ):
        fleet.members["csd0"].agree(Agree(("csd0", "csd1")))


def test_members_that_the_device_has_not_pinned_are_refused() -> None:
    fleet = Fleet(3, {})
    opening = fleet.host.opening()
    for odd in ("csd1", "made-up"):
        with pytest.raises(Refused, match=f"policy.cohort: '{odd}' is not pinned with this key"):
            strange = {**opening.members, odd: keys.LastingKey(os.urandom(32)).public}
            fleet.members["csd0"].open(replace(opening, members=strange))


def offers(fleet: Fleet) -> dict[str, Offered]:
    return {name: fleet.members[name].open(fleet.host.opening()) for name in fleet.names}


def signed(fleet: Fleet, sender: str, offer: Offered) -> Offered:
    """Return an offer with the sender's signatures of what it now is."""
    key = fleet.members[sender]._key
    signatures = {
        name: key.sign(dealing(fleet.host.opening().session, sender, name, dealt_of(offer, name)))
        for name in offer.sealed
    }
    return replace(offer, signatures=signatures)


def test_a_host_that_changes_an_offer_is_not_believed_and_shown_nothing() -> None:
    """Neither by the one that gets it, nor by the sender, when the host says that there is a complaint."""
    fleet = Fleet(3, {})
    for name, offer in offers(fleet).items():
        fleet.host.offered(name, offer)
    requests = fleet.host.dealing(1.0)
    offer = requests["csd0"].offers["csd1"]
    for forged in (replace(offer, public=keys.public_of(os.urandom(32))), replace(offer, sealed=bytes(160))):
        answer = fleet.members["csd0"].take(
            replace(requests["csd0"], offers={**requests["csd0"].offers, "csd1": forged})
        )
        assert answer.wrong == {"csd1": b""}
        fleet.members["csd0"]._next = "take"
    fleet.members["csd1"].take(requests["csd1"])
    about = dealing(fleet.host.opening().session, "csd1", "csd0", replace(offer, sealed=bytes(160)))
    for complaint in (b"", fleet.members["csd0"]._key.sign(keys.digest("complaint", about))):
        with pytest.raises(Refused, match="'csd0' has not complained about what it was sent"):
            fleet.members["csd1"].show(ShowShares({"csd0": complaint}))
        fleet.members["csd1"]._next = "mask"
    fleet.members["csd0"]._next = "mask"
    with pytest.raises(Refused, match="the host goes on with members whose shares are wrong"):
        fleet.members["csd0"].masks()


@pytest.mark.parametrize("kind", ["sealed", "digests", "unsigned", "silent"])
def test_a_member_with_wrong_shares_is_named_alone(kind: str) -> None:
    """By any number of complaints. One that shows right shares after all is as good as others."""
    for told in (1, 3):
        fleet = Fleet(4, {})
        made = offers(fleet)
        offer, some = made["csd2"], [name for name in fleet.names if name != "csd2"][:told]
        wrong = {"digests": {name: (bytes(32), bytes(32)) for name in some}}.get(kind, {})
        sealed = {name: b"wrong" for name in some if kind != "digests"}
        offer = replace(offer, sealed=offer.sealed | sealed, digests=offer.digests | wrong)
        made["csd2"] = offer if kind == "unsigned" else signed(fleet, "csd2", offer)
        fleet.members["csd2"]._exchange.made = made["csd2"]  # type: ignore[union-attr]
        for name, each in made.items():
            assert not fleet.host.offered(name, each)
        for name, asked in fleet.host.dealing(fleet.scale).items():
            assert not fleet.host.taken(name, fleet.members[name].take(asked))
        if kind == "sealed":
            fleet.show()
            fleet.answer()
            fleet.unmask()
            check_sum(fleet, fleet.sum())
            continue
        with pytest.raises(CohortFailed) as caught:
            if kind == "silent":
                fleet.host.handing()
            fleet.show()
        assert set(caught.value.wrong) == {"csd2"}


def check_sum(fleet: Fleet, found: MaskedVector) -> None:
    mean = np.empty(SIZE, np.float32)
    fixed_point.divide(found, fleet.scale, 3.0, mean)
    assert mean.tobytes() == exact(fleet).tobytes()


def test_a_member_that_complains_of_right_shares_puts_nobody_out() -> None:
    fleet = Fleet(9, {})
    for name, offer in offers(fleet).items():
        assert not fleet.host.offered(name, offer)
    liar, session = fleet.members["csd0"], fleet.host.opening().session
    for name, asked in fleet.host.dealing(fleet.scale).items():
        answer = fleet.members[name].take(asked)
        if name == "csd0":
            wrong = {
                each: liar._key.sign(keys.digest("complaint", dealing(session, each, name, dealt)))
                for each, dealt in asked.offers.items()
                if each != name
            }
            answer = OffersTaken(wrong)
            liar._exchange.shares = {"csd0": liar._exchange.shares["csd0"]}  # type: ignore[union-attr]
            assert fleet.host.taken(name, OffersTaken(dict.fromkeys(wrong, bytes(64))))
        assert not fleet.host.taken(name, answer)
    assert len(fleet.host.showing()) == 8
    fleet.show()
    fleet.answer()
    fleet.unmask()
    check_sum(fleet, fleet.sum())


def test_a_member_without_a_key_is_named() -> None:
    assert not keys.is_public(bytes(32)) and not keys.is_public(b"short")
    assert not keys.is_lasting(bytes(64)) and not keys.is_lasting(keys.public_of(os.urandom(32)))
    fleet = Fleet(4, {})
    offer = offers(fleet)["csd2"]
    assert fleet.host.offered("csd2", replace(offer, public=bytes(32))) == "its key is none"


def test_a_member_that_gives_a_wrong_share_is_named() -> None:
    fleet = Fleet(4, {})
    fleet.begin()
    fleet.answer()
    asked = fleet.host.unmasking()
    answer = fleet.members["csd1"].unmask(asked["csd1"])
    wrong = Shares({**answer.shares, "csd3": bytes(66)})
    assert fleet.host.shared("csd1", wrong) == "its share of a mask of csd3 is wrong"
    assert fleet.host.shared("csd1", Shares({})) == "it gives shares of others than take part"


def test_a_member_whose_shares_are_of_no_secret_is_named() -> None:
    fleet = Fleet(3, {})
    for name in fleet.names:
        offer = fleet.members[name].open(fleet.host.opening())
        if name == "csd2":
            offer = signed(fleet, name, replace(offer, commitment=bytes(32)))
        fleet.host.offered(name, offer)
    fleet.deal(fleet.host.dealing(fleet.scale))
    fleet.answer()
    fleet.unmask()
    with pytest.raises(CohortFailed, match="csd2: the shares of its masks are of no mask"):
        fleet.sum()


@pytest.mark.parametrize("count", range(2, 40))
def test_no_two_sets_that_unmask_have_only_dishonest_members_in_common(count: int) -> None:
    """Up to a third of the devices work for the host: it could have both secrets of one device else."""
    assert count // 3 < 2 * threshold_of(count) - count
    assert threshold_of(count) > count - count / 3 - (count == 2)  # fewer than a third may be lost


@pytest.mark.parametrize("scale", [np.inf, np.nan, 0.0, -1.0, 1.9 * 2.0**40])
def test_a_unit_that_is_no_power_of_two_is_refused(scale: float) -> None:
    """Words in it would be up to a third larger than the noise is for."""
    fleet = Fleet(3, {})
    for name in fleet.names:
        fleet.host.offered(name, fleet.members[name].open(fleet.host.opening()))
    with pytest.raises(Refused, match="powers of two"):
        fleet.members["csd0"].take(fleet.host.dealing(scale)["csd0"])


def test_the_least_devices_of_a_member_hold_for_what_others_unmask() -> None:
    """The others alone could have removed the masks of a member that refuses the sum."""
    fleet = Fleet(7, {"csd6": 2})
    fleet.members["csd0"].roster = CohortRoster(7, fleet.keys)
    fleet.begin()
    with pytest.raises(CohortFailed, match="6 of 7 devices have answered, 7 must"):
        fleet.answer()
    for name in fleet.names[:6]:
        with pytest.raises(Refused, match=r"6 of 7 devices have answered; .* by least_devices 7"):
            fleet.members[name].agree(Agree(tuple(fleet.names[:6])))


def test_a_host_cannot_change_the_least_devices_of_a_member() -> None:
    fleet = Fleet(7, {})
    fleet.members["csd0"].roster = CohortRoster(7, fleet.keys)
    for name in fleet.names:
        assert not fleet.host.offered(name, fleet.members[name].open(fleet.host.opening()))
    for name, request in fleet.host.dealing(1.0).items():
        offers = request.offers | {"csd0": replace(request.offers["csd0"], least=2)}
        assert fleet.members[name].take(replace(request, offers=offers)).wrong == {"csd0": b""}
    with pytest.raises(Refused, match="shares are wrong"):
        fleet.members["csd1"].masks()
