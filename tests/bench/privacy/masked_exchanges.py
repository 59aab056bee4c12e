# SPDX-License-Identifier: Apache-2.0
"""Pure: masked exchanges in this process: how long 36 devices take to agree, devices that are lost, and what
an exchange costs in cohorts of up to 128 devices, each of which shares with each other one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

from bench.experiment import Run
from bench.rows import Row, summary
from millpond.aggregate.exact import scale_of
from millpond.aggregate.masking import keys
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.fixed_point import bits_of_sum, whole_figure
from millpond.aggregate.masking.keys import Mask
from millpond.aggregate.masking.member import CohortMember
from millpond.aggregate.masking.messages import KEY_BYTES
from millpond.aggregate.masking.roster import CohortRoster
from millpond.aggregate.masking.stream import MaskedVector
from millpond.base.errors import Refused
from millpond.wire.framing import encode

SETUP, SCHEDULES, STEPS = 36, 200, 5
LEAST = 3
COHORTS = (36, 64, 128)
COSTS = tuple(
    f"complete.{each}_{count}" for count in COHORTS for each in ("device_s", "bytes", "masks_s", "lost_s")
)
_VALUES, _MOST_MASKS = 2_029_642, 256
_SIZE = 32


class Cohort:
    """A host and its devices in this process."""

    def __init__(self, count: int) -> None:
        secrets = {f"csd{number}": os.urandom(KEY_BYTES) for number in range(count)}
        public = {name: keys.LastingKey(secret).public for name, secret in secrets.items()}
        roster = CohortRoster(LEAST, public)
        self.members = {
            name: CohortMember(name, secret, roster, os.urandom, set[bytes]().add)
            for name, secret in secrets.items()
        }
        self.host = MaskedExchange(public, os.urandom(16))

    def set_up(self, at_first: Sequence[str], then: Sequence[str], scale: float) -> None:
        """Have the members agree on their masks; those of ``then`` are left when offers are dealt."""
        for name in at_first:
            if fault := self.host.offered(name, self.members[name].open(self.host.opening())):
                raise RuntimeError(fault)
        dealing = self.host.dealing(scale)
        for name in then:
            self.host.taken(name, self.members[name].take(dealing[name]))
        self.host.handing()


def measure(run: Run) -> list[Row]:
    """Rows ``setup_36_s``, ``dropouts`` and COSTS."""
    emulation = "devices and host are objects of one process"
    seconds = [_setup() for _ in range(run.repeats)]
    what = f"seconds until {SETUP} devices have agreed on the masks of an exchange, one after the other"
    right, none = _dropouts()
    told = (
        f"of {SCHEDULES} exchanges with nearly a third of their devices lost at any step, those with the "
        f"exact sum of the others; in {none} there is no sum, and the round begins again"
    )
    return [
        summary("setup_36_s", what, seconds, "s", emulation=emulation),
        summary("dropouts", told, [float(right)], "exchanges", emulation=emulation),
        *_cost_rows(run.repeats, emulation),
    ]


def _cost_rows(repeats: int, emulation: str) -> list[Row]:
    texts = {
        "device_s": ("CPU of a device for keys, shares and signatures of an exchange", "s"),
        "bytes": ("bytes that a device sends and gets for them", "B"),
        "masks_s": (f"CPU of a device for its masks of {_VALUES:,} values of 64 bits", "s"),
        "lost_s": (
            "CPU of the host to remove the masks of nearly a third of the devices, which are lost",
            "s",
        ),
    }
    rows = []
    for count in COHORTS:
        found = [_costs(count) for _ in range(repeats)]
        for name, (text, unit) in texts.items():
            values = [each[name] for each in found]
            what = f"{text}; {count} devices, each with each"
            rows.append(summary(f"complete.{name}_{count}", what, values, unit, emulation=emulation))
    return rows


def _costs(count: int) -> dict[str, float]:
    """Return what one exchange costs, of which none is lost."""
    cohort, began = Cohort(count), time.process_time()
    host, members = cohort.host, cohort.members
    offers = {name: member.open(host.opening()) for name, member in members.items()}
    seconds = time.process_time() - began
    for name, offer in offers.items():
        host.offered(name, offer)
    dealing, began = host.dealing(1.0), time.process_time()
    for name, member in members.items():
        member.take(dealing[name])
    masks = {name: member.masks() for name, member in members.items()}
    agreed = {name: member.agree(host.agreeing(list(members))) for name, member in members.items()}
    seconds += time.process_time() - began
    for name, word in agreed.items():
        host.agreed(name, word)
    unmasking, began = host.unmasking(), time.process_time()
    shares = {name: member.unmask(unmasking[name]) for name, member in members.items()}
    seconds += time.process_time() - began
    first = next(iter(members))
    told = host.opening(), offers[first], dealing[first], agreed[first], unmasking[first], shares[first]
    lost = (count - 1) // 3
    removed = lost * (count - lost)
    return {
        "device_s": seconds / count,
        "bytes": float(sum(len(encode(each)) for each in told)),
        "masks_s": _masking(masks[first]),
        "lost_s": _masking(masks[first] * (_MOST_MASKS // count)) * removed / (_MOST_MASKS // count * count),
    }


def _masking(masks: Sequence[Mask]) -> float:
    """Return the CPU seconds that masks of 64 bits take."""
    vector, began = MaskedVector(_VALUES, 64), time.process_time()
    vector.add_masks(masks)
    return time.process_time() - began


def _setup() -> float:
    cohort = Cohort(SETUP)
    names = list(cohort.members)
    began = time.perf_counter()
    cohort.set_up(names, names, 1.0)
    return time.perf_counter() - began


def _dropouts() -> tuple[int, int]:
    """Return how many schedules end with the exact sum, and how many without a sum. Raises RuntimeError for a
    wrong sum, or for own masks of fewer devices than LEAST that are known to the host.
    """
    right = none = 0
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        count = rng.randint(4, 12)
        lost = {f"csd{each}": rng.randrange(STEPS) for each in rng.sample(range(count), (count - 1) // 3)}
        cohort = Cohort(count)
        try:
            survivors = _exchange(cohort, lost)
        except (CohortFailed, Refused):
            none += 1
        else:
            right += survivors >= LEAST
    return right, none


def _exchange(cohort: Cohort, lost: dict[str, int]) -> int:
    """Run an exchange in which devices are lost before their step. Returns how many are in its sum."""
    host, members = cohort.host, cohort.members
    present = [[name for name in members if lost.get(name, STEPS) > step] for step in range(STEPS)]
    scale = scale_of(1.0, len(members), bits_of_sum(32))
    cohort.set_up(present[0], present[1], scale)
    total, expected = MaskedVector(_SIZE, 32), 0
    for number, name in enumerate(present[2], 1):
        vector = MaskedVector(_SIZE, 32)
        vector.values[:], vector.figures[:] = number, whole_figure(number)
        vector.add_masks(members[name].masks())
        total.add(vector)
        expected += number
    agreeing = host.agreeing(present[2])
    for name in present[3]:
        host.agreed(name, members[name].agree(agreeing))
    asked = host.unmasking()
    for name in present[4]:
        if fault := host.shared(name, members[name].unmask(asked[name])):
            raise RuntimeError(f"{name}: {fault}")
    total.add_masks(list(host.masks()))
    if not (total.values == expected).all():
        raise RuntimeError("the sum is wrong")
    return len(present[2])
