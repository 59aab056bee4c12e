# SPDX-License-Identifier: Apache-2.0
"""A job, and what a policy says of it and of its answers, for the tests of policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from millpond.agent.policy.rules import ExchangeGuard, StateAnswers, check_job
from millpond.agent.policy.settings import Policy
from millpond.base.errors import Refused
from millpond.train.balance.ranges import Ranges
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import Folder, PrepareWorker, Work
from millpond.train.state.layout import Tensor

from ..job_files import described

PRIVATE, PUBLIC = Folder("private/digits", "csd0"), Folder("public/digits", "csd0", public=True)
CODE = {"net.py": "def Net(): ...", "more.py": "x = 1"}
FILES = described(CODE)
TENSORS = (Tensor("weight", (10, 10), "float32"), Tensor("bias", (10,), "float32"))
JOB = PrepareWorker(WorkSpec("job", ModelSpec("net:Net")), "csd0", (PRIVATE, PUBLIC), FILES, TENSORS)
SAMPLES = 40


def work(*ranges: Ranges, epoch: int = 0, seed: int = 0, synthetic: int = 0) -> Work:
    return Work(1, seed, epoch, ranges, synthetic)


def state(number: int) -> memoryview:
    return memoryview(bytes([number]) * 16)


def guard(
    policy: Policy | None = None,
    answers: StateAnswers | None = None,
    folders: tuple[Folder, ...] = (PRIVATE, PUBLIC),
    parts: tuple[int, ...] = (SAMPLES, SAMPLES),
    held: tuple[int, ...] | None = None,
    charge: Callable[[Sequence[str]], None] = lambda _folders: None,
    *,
    whole: bool = False,
) -> ExchangeGuard:
    policy = policy or Policy()
    held = tuple(0 for _ in parts) if held is None else held
    answers = answers or StateAnswers(policy.answers_per_state)
    return ExchangeGuard(policy, answers, folders, parts, held, charge, whole=whole)


def refusal(policy: Policy, **changes: object) -> Refused:
    with pytest.raises(Refused) as caught:
        check_job(policy, "csd0", replace(JOB, **changes))  # type: ignore[arg-type]
    return caught.value
