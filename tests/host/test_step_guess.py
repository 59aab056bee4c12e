# SPDX-License-Identifier: Apache-2.0
"""Steps that nodes can make by themselves, and states that they have to be sent."""

from __future__ import annotations

import numpy as np

from millpond.host.workers.step_guess import StepGuess
from millpond.train.state.layout import Tensor

TENSORS = (
    Tensor("weight", (3, 100), "float32"),
    Tensor("running_mean", (10,), "float32"),
    Tensor("batches", (), "int64"),
    Tensor("bias", (5,), "float32"),
    Tensor("none", (0,), "float32"),
)


def test_a_step_by_the_mean_is_found_and_no_other() -> None:
    rng = np.random.default_rng(1)
    state, mean = rng.normal(size=(2, 316)).astype(np.float32)
    guess, now = StepGuess(TENSORS), state - mean
    now[300:310] = state[300:310] + mean[300:310]
    now[310] = 7
    assert guess.to(now) is None
    guess.state, guess.mean = guess.sample(state), guess.sample(mean)
    step = guess.to(now)
    assert step is not None and step.added == ((300, 310),) and step.fixed == ((310, 7.0),)
    now[312] += 1
    assert guess.to(now) is None
    now[312] -= 1
    guess.forget()
    assert guess.to(now) is None


def test_a_state_of_other_types_is_sent() -> None:
    guess = StepGuess((Tensor("half", (10,), "bfloat16"),))
    guess.state = guess.mean = guess.sample(np.zeros(10, np.float32))
    assert guess.to(np.zeros(10, np.float32)) is None
