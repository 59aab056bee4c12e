# SPDX-License-Identifier: Apache-2.0
"""The noise of a masked sum: that of the job, by however few devices a sum is of, and no less."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.node.masked_update import MaskedUpdates
from millpond.agent.node.update_noise import UpdateNoise
from millpond.agent.policy.settings import Policy
from millpond.aggregate.masking import fixed_point
from millpond.aggregate.masking.exchange import MaskedExchange
from millpond.aggregate.masking.member import threshold_of
from millpond.aggregate.masking.messages import Agreed, Offered, Shares
from millpond.aggregate.masking.stream import MaskedVector
from millpond.host.workers.masked_reduction import fresh_session
from millpond.privacy.spec import PrivacySpec
from millpond.train.job.spec import ModelSpec, OptimizerSpec, WorkSpec
from millpond.train.protocol import Folder, PrepareWorker, Update, Work
from millpond.train.state.layout import Tensor

from ..identities import issued

Floats = NDArray[np.float64]
SIZE, CLIP, ROUNDS, SCALE = 20_000, 0.5, 6, 2.0**20
GROUPS = WorkSpec("job", ModelSpec("net"), optimizer=OptimizerSpec("sgd", 0.1), passes=1, clip=CLIP)
GROUPS = replace(GROUPS, secure="cohort", total=ROUNDS, privacy=PrivacySpec(3.0, unit="group"))
ASKED, STATE = Work(1, 0, 1, (((0, 16),),)), bytes(4 * SIZE)
ZEROS = Update(1, 16, 16.0, 0.0, 0.0, 0.1, 0.0, 0, {"loss": (1.0, 16.0)})


def config(name: str, state: Path) -> AgentConfig:
    state.mkdir(exist_ok=True)
    link, identity = LinkConfig("10.77.0.2/30", "socket"), issued(name, state)
    return AgentConfig(name, link, state=str(state), identity=identity, policy=Policy())


def noise_of(folder: Path, work: WorkSpec, members: int, survivors: int) -> Floats:
    """Return the sum of updates of zeros of the first ``survivors``: it is the noise alone."""
    names = [f"csd{number}" for number in range(members)]
    prepared = PrepareWorker(
        work, "", (Folder("private/digits", ""),), {}, (Tensor("weight", (SIZE,), "float32"),)
    )
    devices = {name: MaskedUpdates(config(name, folder / name), prepared, SIZE) for name in names}
    keys = {name: one.member.public for name, one in devices.items()}
    certificates = {name: one.member.certificate for name, one in devices.items()}
    host = MaskedExchange(keys, fresh_session(), certificates)
    for name, one in devices.items():
        offer = one.answer(host.opening())
        assert isinstance(offer, Offered) and not host.offered(name, offer)
    total = MaskedVector(SIZE, 64)
    for name, request in host.dealing(SCALE).items():
        devices[name].answer(request)
    for name in names[:survivors]:
        one, out = devices[name], MaskedVector(SIZE, 64)
        one.begin(ASKED, memoryview(STATE))
        one.write(ZEROS, ASKED, STATE, memoryview(out.data))
        total.add(out)
    for name in names[:survivors]:
        agreed = devices[name].answer(host.agreeing(names[:survivors]))
        assert isinstance(agreed, Agreed) and not host.agreed(name, agreed)
    for name, unmask in host.unmasking().items():
        shares = devices[name].answer(unmask)
        assert isinstance(shares, Shares) and not host.shared(name, shares)
    total.add_masks(list(host.masks()))
    found = np.empty(SIZE, np.float32)
    fixed_point.divide(total, SCALE, 1.0, found)
    return found.astype(np.float64)


@pytest.mark.parametrize("unit", ["device", "group"])
@pytest.mark.parametrize(("members", "survivors"), [(4, 3), (4, 4), (6, 5)])
def test_a_sum_has_the_noise_of_the_job(unit: str, members: int, survivors: int, tmp_path: Path) -> None:
    """All that is planned by the fewest devices; more devices add more, in proportion."""
    spec = replace(PrivacySpec(3.0), unit=unit)  # type: ignore[arg-type]
    found = noise_of(tmp_path, replace(GROUPS, privacy=spec), members, survivors)
    planned = (CLIP * spec.multiplier(ROUNDS)) ** 2 * survivors / threshold_of(members)
    assert abs(found.mean()) < 6 * math.sqrt(planned / SIZE)
    assert abs(found.var() / planned - 1) < 6 * math.sqrt(2 / SIZE)


@pytest.mark.parametrize("epsilon", [8.0, 1.0])
@pytest.mark.parametrize("scale", [2.0**8, SCALE, 2.0**40])
def test_no_sum_has_less_noise_than_its_cost(epsilon: float, scale: float, tmp_path: Path) -> None:
    """Exactly, by the integers that devices draw by: for each size of a cohort, the fewest updates pay for
    all of what a round is charged, and their noise is at most .2 % above in deviation, and a unit.
    """
    work = replace(GROUPS, privacy=PrivacySpec(epsilon))
    assert work.privacy
    noise, rho = UpdateNoise(config("csd0", tmp_path / "csd0"), work, SIZE), work.privacy.rho(ROUNDS)
    for members in range(3, 41):
        fewest = threshold_of(members)
        sigma = noise.sigma(scale, fewest)
        sensitivity = CLIP * scale + math.sqrt(SIZE)
        assert sensitivity**2 / (2 * fewest * sigma**2) <= rho
        least = sensitivity / math.sqrt(2 * rho * fewest)
        assert sigma <= 1.002 * least + 1
