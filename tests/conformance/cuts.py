# SPDX-License-Identifier: Apache-2.0
"""Edge: power cuts and kills under load, after each of which every acknowledged record is read back."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.context import Context, Update
from conformance.load import SIDES, Load, TooFew
from conformance.machine import DEVICE, PARTS, SERVER, machine
from conformance.outcomes import FIGURES, Outcome, entries
from conformance.places import make_flash
from conformance.power import Power, find
from conformance.readback import Fate
from conformance.records import Span
from conformance.results import missing_entry
from millpond.base.errors import LocalError

_BEFORE = 30  # records that each side must have been promised before the blow, or it shows nothing
_AFTER = 10  # and after it, if the side goes on
_LATEST = 1.0


@dataclass(frozen=True, slots=True)
class Blow:
    """What is killed, and whether the file system below loses its power."""

    name: str
    killed: Sequence[str]
    power: bool


_CUTS = (
    Blow("power cut of device and host", PARTS, power=True),
    Blow("power cut of the device alone", (DEVICE, SERVER), power=True),
)
_KILLS = tuple(Blow(f"kill -9 of {part}", (part,), power=False) for part in PARTS)


def blows(count: int) -> Iterator[Blow]:
    """So many power cuts, and after each a kill."""
    pairs = zip(itertools.cycle(_CUTS), itertools.cycle(_KILLS), strict=False)
    return itertools.chain.from_iterable(itertools.islice(pairs, count))


def run(context: Context, update: Update) -> None:
    """On a file system of its own."""
    count, seed = context.arguments.cuts, context.arguments.seed
    scratch = context.scratch / "cuts"
    scratch.mkdir()
    flash, kind = make_flash(scratch)
    power = find(flash)
    why = "" if power else f"no file can be mounted as ext4 here, and {kind} needs no power"
    if not power or not count:
        update([missing_entry(figure, "records", why or "none asked for") for figure in FIGURES])
        return
    outcomes = list[Outcome]()
    for outcome in strike(power, scratch, count, seed):
        outcomes.append(outcome)
        context.say(outcome.brief())
        update(entries(outcomes, count, seed))


def strike(power: Power, scratch: Path, count: int, seed: int) -> Iterator[Outcome]:
    """So many power cuts and as many kills; fewer, if the volume does not come up again after one."""
    try:
        with machine(power, scratch) as made:
            for number, blow in enumerate(blows(count), 1):
                chance = random.Random(f"{seed} {number}")
                load = Load(made, scratch / f"notes-{number}", f"load-{number}", chance)
                outcome = Outcome(f"{number}: {blow.name}", blow.power)
                _strike(load, blow, outcome)
                yield outcome
    except (LocalError, OSError) as error:
        yield Outcome("the volume", power=True, complaint=str(error))


def _strike(load: Load, blow: Blow, outcome: Outcome) -> None:
    without_power = None
    try:
        load.start()
        load.wait_for(_BEFORE)
        time.sleep(load.chance.uniform(0, _LATEST))
        if load.chance.random() < 0.5:
            load.leave_one()
        outcome.acknowledged = load.acknowledged()
        without_power = _hit(load, blow)
        load.wait_for(_AFTER)
    except TooFew as error:
        outcome.complaint = str(error)
    finally:
        load.stop()
    outcome.findings = load.read_back(without_power)
    if blow.power and not outcome.complaint and not _bit(outcome):
        outcome.complaint = "all that was not synced is there, too: no power was cut"
    load.remove()


def _hit(load: Load, blow: Blow) -> Span | None:
    """Kill, and start again. When there was no power, if it was cut."""
    made, begin = load.machine, time.monotonic()
    end = begin
    if blow.power:
        made.power.cut()
    made.kill(*blow.killed)
    if blow.power:
        load.stop([side for side, part in SIDES.items() if part in blow.killed])
        made.power.restore()
    for part in PARTS:
        if part == SERVER:
            end = time.monotonic()  # until now nobody can have been promised anything
        if part in blow.killed:
            made.start(part)
    return Span(begin, end) if blow.power else None


def _bit(outcome: Outcome) -> bool:
    return any(fate is not Fate.KEPT for fate, _ in outcome.fates)
