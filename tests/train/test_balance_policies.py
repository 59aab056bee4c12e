# SPDX-License-Identifier: Apache-2.0
"""The three policies by name, with workers that join and leave."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest

from millpond.train.balance.curve import Curve
from millpond.train.balance.equal_time import Cohort, WorkerKind
from millpond.train.balance.policy import PolicyName, policy_of

DEVICE = Curve((2, 5, 15), (1.2, 2.2, 5.4))
CREW = Cohort([WorkerKind(DEVICE, 999)], [0, 0, 0])
NAMES: tuple[PolicyName, ...] = get_args(PolicyName)


@pytest.mark.parametrize("name", NAMES)
def test_all_begin_with_the_same_batches(name: PolicyName) -> None:
    levels = np.array([1.0, 1.0, 2.0])
    plans = [policy_of(other, CREW, 30, None, levels=levels).plan for other in ("balance", name)]
    assert plans[0].batches.tolist() == plans[1].batches.tolist() and plans[1].batches.sum() == 30
    assert np.array_equal(plans[0].times, plans[1].times) and plans[1].deadline == math.inf
    with pytest.raises(ValueError, match="possible"):
        policy_of(name, CREW, 1000, None)


@pytest.mark.parametrize("name", NAMES)
def test_who_leaves_has_no_batch_until_it_joins(name: PolicyName) -> None:
    policy = policy_of(name, CREW, None, None, present=np.array([True, True, False]))
    assert (policy.plan.batches > 0).tolist() == [True, True, False]
    assert policy.leave(0).batches.tolist() == [0, 15, 0] and policy.plan.times[0] == 0
    assert policy.join(2).batches.tolist() == [0, 15, 15]
    assert policy.join(0, 2.0) is policy.plan and policy.slowness.tolist() == [2, 1, 1]
    assert (policy.plan.batches[0] < 15) == (name == "balance")


def test_fixed_batches_stay_whatever_happens() -> None:
    policy = policy_of("fixed", CREW, None, 1.5)
    before = policy.plan
    assert before.deadline == pytest.approx(1.5 * 5.4)
    for _ in range(50):
        assert not policy.observe(before.batches, 4 * before.times, np.full(3, 0.75))
    assert policy.plan is before


def test_only_the_controller_has_patience_with_a_slow_worker() -> None:
    deadlines = {name: policy_of(name, CREW, None, 1.5).plan.deadline for name in NAMES}
    assert deadlines == pytest.approx({"balance": 8.1, "fixed": 8.1, "stannis": math.inf})
