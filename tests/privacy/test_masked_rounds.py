# SPDX-License-Identifier: Apache-2.0
"""Attacks of a malicious host on masked rounds: it has devices mask updates that are none."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.node.masked_update import MaskedUpdates
from millpond.agent.node.update_noise import NoisyUpdates, UpdateNoise
from millpond.agent.policy.settings import Policy
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.messages import Agreed, Offered, OffersTaken, Shares, Unmask
from millpond.base.errors import Refused
from millpond.host.workers.masked_reduction import fresh_session
from millpond.privacy.spec import PrivacySpec
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import Folder, PrepareWorker, Update, Work
from millpond.train.state.layout import Tensor

from ..identities import issued

NAMES, SIZE = ("csd0", "csd1", "csd2"), 4
WORK = WorkSpec("job", ModelSpec("net"), optimizer=OptimizerSpec("sgd", 0.1), passes=1)
PREPARED = PrepareWorker(
    replace(WORK, secure="cohort", clip=1.0),
    "",
    (Folder("private/digits", ""),),
    {},
    (Tensor("weight", (SIZE,), "float32"),),
)
Values = np.ndarray[tuple[int], np.dtype[np.float32]]
ASKED, STATE = Work(1, 0, 1, (((0, 8),),)), np.ones(SIZE, np.float32)


def device(
    name: str, folder: Path, prepared: PrepareWorker, cohort: tuple[str, ...] = (), least: int = 3
) -> MaskedUpdates:
    """Return the part of a device, by default with nothing pinned."""
    (folder / name).mkdir(exist_ok=True)
    link, policy = LinkConfig("10.77.0.2/30", "socket"), Policy(cohort=cohort, least_devices=least)
    state, identity = str(folder / name), issued(name, folder / name)
    return MaskedUpdates(
        AgentConfig(name, link, state=state, identity=identity, policy=policy), prepared, SIZE
    )


def exchange_of(devices: dict[str, MaskedUpdates]) -> MaskedExchange:
    """Return an exchange of devices, as a host begins it."""
    members = {name: one.member for name, one in devices.items()}
    certificates = {name: one.certificate for name, one in members.items()}
    return MaskedExchange({name: one.public for name, one in members.items()}, fresh_session(), certificates)


def answer(one: MaskedUpdates, asked: Work, state: Values) -> None:
    """Have a device mask an update."""
    values = np.full(SIZE, 0.5, np.float32)
    one.begin(asked, memoryview(state.tobytes()))
    update = Update(1, 8, 8.0, 0.5, 1.0, 0.1, 0.0, 0, {"loss": (1.0, 8.0)})
    one.write(update, asked, values.tobytes(), memoryview(bytearray(one.bytes)))


def others(
    work: Callable[[WorkSpec], WorkSpec] = lambda work: work,
    folder: str = "private/digits",
    public: bool = False,
) -> PrepareWorker:
    """Return the request by which the other devices are prepared."""
    return replace(PREPARED, work=work(PREPARED.work), folders=(Folder(folder, "", public=public),))


@pytest.mark.parametrize(
    ("prepared", "asked", "state"),
    [
        (PREPARED, ASKED, STATE),
        (PREPARED, ASKED, 0 * STATE),
        (PREPARED, replace(ASKED, epoch=9), STATE),
        (others(lambda work: replace(work, optimizer=OptimizerSpec("sgd", 0.0))), ASKED, STATE),
        (others(lambda work: replace(work, clip=1e-9)), ASKED, STATE),
        (others(folder="public/known", public=True), ASKED, STATE),
        (others(folder="private/other"), ASKED, STATE),
        (replace(PREPARED, unsent=("weight",)), ASKED, STATE),
    ],
    ids=["the same", "a state", "an epoch", "a rate", "a clip", "a public folder", "a folder", "frozen"],
)
def test_no_sum_of_updates_of_other_states_or_jobs(
    prepared: PrepareWorker, asked: Work, state: Values, tmp_path: Path
) -> None:
    """Two of three devices are made to answer with nothing, or with what the host knows."""
    devices = {name: device(name, tmp_path, PREPARED if name == "csd0" else prepared) for name in NAMES}
    host = exchange_of(devices)
    for name, one in devices.items():
        offer = one.answer(host.opening())
        assert isinstance(offer, Offered) and not host.offered(name, offer)
    for name, request in host.dealing(1.0).items():
        assert isinstance(devices[name].answer(request), OffersTaken)
        answer(devices[name], ASKED if name == "csd0" else asked, STATE if name == "csd0" else state)
    for name, one in devices.items():
        agreed = one.answer(host.agreeing(NAMES))
        assert isinstance(agreed, Agreed)
        host.agreed(name, agreed)
    is_same = (prepared, asked, state.tobytes()) == (PREPARED, ASKED, STATE.tobytes())
    if not is_same:
        with pytest.raises(CohortFailed, match="do not cancel"):
            host.unmasking()
        words = host._agreed
        unmask = Unmask({name: word.signature for name, word in words.items()})
        for one in devices.values():
            with pytest.raises(Refused, match="devices agree about job, state"):
                one.answer(unmask)
        return
    for name, request in host.unmasking().items():
        found = devices[name].answer(request)
        assert isinstance(found, Shares) and found.shares


def begun(folder: Path, prepared: PrepareWorker, scale: float) -> MaskedUpdates:
    """Return the part of a device that is to mask an update in this unit."""
    devices = {name: device(name, folder, prepared) for name in NAMES}
    host = exchange_of(devices)
    for name, one in devices.items():
        offer = one.answer(host.opening())
        assert isinstance(offer, Offered) and not host.offered(name, offer)
    devices["csd0"].answer(host.dealing(scale)["csd0"])
    return devices["csd0"]


def exchange(
    devices: dict[str, MaskedUpdates], survivors: tuple[str, ...], between: Work | None = None
) -> None:
    """Unmask the sum of ``survivors`` at one state, with a request ``between`` masking and unmasking."""
    host = exchange_of(devices)
    for name, one in devices.items():
        offer = one.answer(host.opening())
        assert isinstance(offer, Offered) and not host.offered(name, offer)
    for name, request in host.dealing(1.0).items():
        devices[name].answer(request)
    for name in survivors:
        answer(devices[name], ASKED, STATE)
        if between:
            devices[name].begin(between, memoryview(os.urandom(16)))
    for name in survivors:
        agreed = devices[name].answer(host.agreeing(survivors))
        assert isinstance(agreed, Agreed) and not host.agreed(name, agreed)
    for name, unmask in host.unmasking().items():
        shares = devices[name].answer(unmask)
        assert isinstance(shares, Shares) and not host.shared(name, shares)
    assert list(host.masks())


def test_pinned_devices_tell_no_second_sum_of_others_at_a_state(tmp_path: Path) -> None:
    """The difference of the two sums would be the update of one device, also when agents have begun anew."""
    names = (*NAMES, "csd3")
    made = {name: device(name, tmp_path, PREPARED) for name in names}
    pins = tuple(f"{name} {base64.b64encode(one.member.public).decode()}" for name, one in made.items())

    def begun() -> dict[str, MaskedUpdates]:
        return {name: device(name, tmp_path, PREPARED, pins, 2) for name in names}

    exchange(begun(), names)
    exchange(begun(), names)
    with pytest.raises(Refused, match=r"policy\.cohort: at this state a sum of other devices was told"):
        exchange(begun(), NAMES)


@pytest.mark.parametrize("between", [replace(ASKED, synthetic=1), replace(ASKED, held_out=True), ASKED])
def test_a_request_after_masking_does_not_change_of_which_state_a_sum_is_noted(
    between: Work, tmp_path: Path
) -> None:
    made = {name: device(name, tmp_path, PREPARED) for name in (*NAMES, "csd3")}
    pins = tuple(f"{name} {base64.b64encode(one.member.public).decode()}" for name, one in made.items())
    devices = {name: device(name, tmp_path, PREPARED, pins, 2) for name in made}
    exchange(devices, tuple(made), between)
    with pytest.raises(Refused, match="at this state a sum of other devices was told"):
        exchange(devices, NAMES, between)


def test_no_session_is_opened_twice_by_agents_that_have_begun_anew(tmp_path: Path) -> None:
    """Else the old offer of a device that is said to be lost would give its other secret."""
    devices = {name: device(name, tmp_path, PREPARED) for name in NAMES}
    opening = exchange_of(devices).opening()
    for name, one in devices.items():
        assert isinstance(one.answer(opening), Offered)
        for again in (one, device(name, tmp_path, PREPARED)):
            with pytest.raises(Refused, match="this session was opened before"):
                again.answer(opening)


@pytest.mark.parametrize("values", [0 * STATE, STATE, 4 * STATE], ids=["none", "small", "large"])
def test_a_unit_is_refused_or_not_whatever_the_values_are(values: Values, tmp_path: Path) -> None:
    """Else a host would learn the size of one device's values by units in which they do not fit."""
    norm = float(np.linalg.norm(values))
    update = Update(1, 8, 8.0, float(values.max()), norm, 0.1, 0.0, 0, {"loss": (1.0, 8.0)})
    for scale, fits in ((2.0**46, True), (2.0**47, False)):
        one = begun(tmp_path, PREPARED, scale)
        out = memoryview(bytearray(one.bytes))
        one.begin(ASKED, memoryview(STATE.tobytes()))
        with contextlib.nullcontext() if fits else pytest.raises(Refused, match="too large in this unit"):
            one.write(update, ASKED, values.tobytes(), out)


@pytest.mark.parametrize(("noise", "masks"), [(True, False), (False, True), (True, True)])
def test_no_refusal_tells_that_values_are_small(noise: bool, masks: bool, tmp_path: Path) -> None:
    """A worker's float32 has no squares of such values: their norm is 0 by its word."""
    prepared = others(lambda work: replace(work, total=4, privacy=PrivacySpec(1.0) if noise else None))
    update = Update(1, 8, 8.0, 1e-23, 0.0, 0.1, 0.0, 0, {"loss": (1.0, 8.0)})
    values = (np.float32(1e-23) * STATE).tobytes()
    if masks:
        one = begun(tmp_path, prepared, 2.0**20)
        one.begin(ASKED, memoryview(STATE.tobytes()))
        assert one.write(update, ASKED, values, memoryview(bytearray(one.bytes))).samples == 8
    else:
        config = AgentConfig("csd0", LinkConfig("10.77.0.2/30", "socket"))
        plain = NoisyUpdates(config, prepared.work, SIZE)
        assert plain.write(update, ASKED, values, memoryview(bytearray(4 * SIZE))).samples == 8


@pytest.mark.parametrize("figure", [np.nan, np.inf, 1e30])
def test_no_refusal_tells_that_values_with_noise_are_not_finite(figure: float, tmp_path: Path) -> None:
    """The host chooses the state: one at which some samples make values overflow."""
    noisy = others(lambda work: replace(work, total=4, privacy=PrivacySpec(1.0)))
    one = begun(tmp_path, noisy, 2.0**20)
    one.begin(ASKED, memoryview(STATE.tobytes()))
    update = Update(1, 8, 8.0, figure, figure, 0.1, 0.0, 0, {"loss": (figure, 8.0)})
    head = one.write(update, ASKED, (figure * STATE).tobytes(), memoryview(bytearray(one.bytes)))
    assert (head.weight, head.largest, head.norm) == (1.0, 0.0, 0.0)


def test_noise_in_a_unit_that_nobody_can_draw_is_refused(tmp_path: Path) -> None:
    work = replace(WORK, clip=1e-9, total=4, privacy=PrivacySpec(1.0))
    noise = UpdateNoise(AgentConfig("csd0", LinkConfig("10.77.0.2/30", "socket")), work, SIZE)
    for scale in (1e200, 1e308):
        with pytest.raises(Refused, match="privacy"):
            noise.share(scale, 3)
