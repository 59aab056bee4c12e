# SPDX-License-Identifier: Apache-2.0
"""The policy of a device for masked updates, noise and questions about private folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from millpond.agent.policy.questions import check_counted, check_question
from millpond.agent.policy.rules import check_job
from millpond.agent.policy.settings import Budget, Policy
from millpond.aggregate.encoding.layout import Encoding
from millpond.base.errors import Refused
from millpond.privacy.spec import PrivacySpec
from millpond.train.job.signed_code import digest
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import Folder
from millpond.train.questions.messages import AskDevice
from millpond.train.questions.question import DataQuestion
from millpond.train.state.layout import Tensor
from millpond.train.strategies import LocalRule

from .policy_rig import FILES, JOB, PRIVATE, PUBLIC, SAMPLES, TENSORS, guard, refusal, state, work

MASKED = replace(JOB.work, secure="cohort", passes=1)


def test_with_a_pinned_cohort_private_folders_are_for_masked_jobs_alone() -> None:
    pinned = Policy(cohort=(f"csd1 {86 * 'A'}==",))
    error = refusal(pinned)
    assert error.text == "policy.cohort: private folders are for jobs with federated.secure alone"
    check_job(pinned, "csd0", replace(JOB, folders=(PUBLIC,)))
    check_job(pinned, "csd0", replace(JOB, work=MASKED, folders=(PRIVATE,)))


@pytest.mark.parametrize(
    "changes",
    [{"passes": 0}, {"held_out": 0.1}, {"encoding": Encoding("int8")}, {"local": LocalRule(normalized=True)}],
    ids=str,
)
def test_a_job_that_says_that_it_masks_and_would_tell_more_is_refused(changes: dict[str, Any]) -> None:
    error = refusal(Policy(), work=replace(MASKED, **changes))
    assert error.text == "secure: a job with masks or noise has rounds, means, and no scores of devices"


PINS = (f"csd1 {86 * 'A'}==",)
NOISY = replace(JOB.work, privacy=PrivacySpec(1.0), passes=1, clip=1.0, total=4)
GROUPS = replace(NOISY, privacy=PrivacySpec(1.0, unit="group"))


def test_each_round_is_charged_to_every_private_folder_of_its_worker() -> None:
    """The worker reads all of them, whichever samples the host names."""
    charged: list[Sequence[str]] = []
    asked = guard(charge=charged.append)
    asked.check(work((), ((0, SAMPLES),)), state(0))
    asked.check(work(((0, SAMPLES),), ()), state(0))
    asked.check(work((), (), synthetic=8), state(0))
    assert charged == [[PRIVATE.path], [PRIVATE.path]]


@pytest.mark.parametrize("bounded", [NOISY, MASKED], ids=["noise", "masks"])
def test_a_job_with_noise_or_masks_has_no_public_folders_beside_private_ones(bounded: WorkSpec) -> None:
    """The host knows updates of public samples: it would ask all devices but one for these."""
    assert "gets no public ones" in refusal(Policy(), work=bounded).text
    for folder in (PRIVATE, PUBLIC):
        check_job(Policy(), "csd0", replace(JOB, work=bounded, folders=(folder,)))


def test_noise_needs_a_clip_that_float32_can_keep() -> None:
    """The norm of smaller values is 0 in float32: their groups would not be clipped."""
    told = refusal(Policy(), work=replace(NOISY, clip=1e-13), folders=(PRIVATE,)).text
    assert "noise needs a clip" in told


def test_a_masked_update_is_of_all_samples_of_the_worker() -> None:
    """Else a host asks the other devices for as few as it may, and the sum is nearly the one update."""
    two = (PRIVATE, replace(PRIVATE, path="private/more"))
    asked = guard(folders=two, whole=True)
    every = ((0, SAMPLES),)
    asked.check(work(every, every), state(0))
    for ranges in [
        (((0, 8),), every),
        (every, ()),
        (((0, 8), (8, SAMPLES)), every),
        (every, ((8, SAMPLES),)),
    ]:
        with pytest.raises(Refused, match="secure: a masked update is of all samples"):
            asked.check(work(*ranges), state(0))


@pytest.mark.parametrize("policy", [Policy(budget=Budget(8.0), cohort=PINS), Policy(cohort=PINS)], ids=str)
@pytest.mark.parametrize("changes", [{"local_layers": ("head*",)}, {"local": LocalRule(alpha=0.5)}], ids=str)
def test_with_a_budget_or_a_cohort_jobs_keep_no_state(policy: Policy, changes: dict[str, Any]) -> None:
    own = replace(NOISY, secure="cohort", **changes)
    assert "jobs keep no state here" in refusal(policy, work=own, folders=(PRIVATE,)).text
    check_job(Policy(), "csd0", replace(JOB, work=own, folders=(PRIVATE,)))


@pytest.mark.parametrize(
    "changes",
    [{"local_layers": ("head*",)}, {"local": LocalRule(inner_rate=0.1)}, {"mini_epoch": 8}],
    ids=str,
)
def test_groups_with_noise_are_trained_alone(changes: dict[str, Any]) -> None:
    error = refusal(Policy(), work=replace(GROUPS, **changes), folders=(PRIVATE,))
    assert 'unit = "group" trains on each group alone' in error.text


def test_a_budget_pays_for_shares_of_noise_among_pinned_devices_alone() -> None:
    """A host that makes up the others would get the noise of one share for the price of all."""
    budget, masked = Policy(budget=Budget(8.0)), replace(NOISY, secure="cohort")
    told = "policy.budget: devices share the noise of a masked sum: pin them"
    assert refusal(budget, work=masked, folders=(PRIVATE,)).text.startswith(told)
    check_job(budget, "csd0", replace(JOB, work=NOISY, folders=(PRIVATE,)))
    check_job(replace(budget, cohort=PINS), "csd0", replace(JOB, work=masked, folders=(PRIVATE,)))


@pytest.mark.parametrize(("unit", "work"), [("device", GROUPS), ("group", NOISY)], ids=["device", "group"])
def test_a_budget_is_for_noise_of_its_unit(unit: Literal["device", "group"], work: WorkSpec) -> None:
    error = refusal(Policy(budget=Budget(8.0, unit=unit)), work=work, folders=(PRIVATE,))
    assert error.text.startswith(f'policy.budget: it is for unit = "{unit}", and the job has noise for')


def test_a_masked_job_exchanges_no_buffers() -> None:
    buffers = (*TENSORS, Tensor("mean", (10,), "float32", buffer=True))
    assert "keep them by federated.local" in refusal(Policy(), work=MASKED, tensors=buffers).text


@pytest.mark.parametrize(
    ("policy", "masked", "rule"),
    [
        (Policy(), True, ""),
        (Policy(), False, "policy.questions: private folders are for masked questions alone"),
        (Policy(questions="plain"), False, ""),
        (
            Policy(questions="plain", cohort=("csd1 A",)),
            False,
            "policy.cohort: private folders are for masked",
        ),
        (Policy(questions="none"), True, "policy.questions: the device answers no questions"),
        (Policy(folders=("private/other",)), True, "policy.folders: jobs may not read"),
    ],
    ids=str,
)
def test_the_device_decides_which_questions_it_answers(policy: Policy, masked: bool, rule: str) -> None:
    def check(*folders: Folder) -> None:
        check_question(policy, "csd0", AskDevice("a", DataQuestion("count"), folders, masked))

    check(PUBLIC)
    if not rule:
        check(PRIVATE)
        return
    with pytest.raises(Refused, match=rule):
        check(PUBLIC, PRIVATE)


def test_folders_with_a_budget_answer_questions_with_noise_alone() -> None:
    def check(unit: Literal["device", "group"], rho: float, cohort: tuple[str, ...] = PINS) -> None:
        policy = Policy(budget=Budget(1.0, unit=unit), cohort=cohort)
        check_question(policy, "csd0", AskDevice("a", DataQuestion("count"), (PRIVATE,), rho=rho))

    check("group", 0.1)
    with pytest.raises(Refused, match=r"policy.budget: .* questions need noise \(--epsilon\)"):
        check("group", 0.0)
    with pytest.raises(
        Refused, match=r"policy.budget: it is for the device, and noise of questions protects"
    ):
        check("device", 0.1)
    with pytest.raises(Refused, match=r"policy.budget: devices share the noise of a masked sum"):
        check("group", 0.1, ())


def test_noise_is_for_known_code_alone() -> None:
    """Unknown code decides itself what it counts."""
    model, question = next(iter(FILES.values())), DataQuestion("confusion")
    asked = AskDevice("a", question, (PRIVATE,), rho=0.1, work=JOB.work, files=FILES, model=model)
    with pytest.raises(Refused, match=r"policy.code: unknown code counts what it wants"):
        check_question(Policy(), "csd0", asked)
    check_question(Policy(), "csd0", replace(asked, rho=0.0))
    listed = Policy(code="listed", listed=(digest(JOB.work, FILES),))
    check_question(listed, "csd0", asked)
    with pytest.raises(Refused, match=r"policy.code: the job's code is not listed"):
        check_question(Policy(code="listed"), "csd0", asked)
    for wrong in ({"work": None}, {"model": None}, {"question": DataQuestion("count")}, {"rho": -1.0}):
        with pytest.raises(Refused, match=r"a model comes with|noise of -1|files that are not"):
            check_question(listed, "csd0", replace(asked, **wrong))  # type: ignore[arg-type]


def test_a_question_is_about_groups_of_samples() -> None:
    check_counted(Policy(), (PRIVATE, PUBLIC), {PRIVATE.path: 8, PUBLIC.path: 1})
    with pytest.raises(
        Refused, match=r"policy.least_samples: .* too few samples; an answer covers 8 or more"
    ):
        check_counted(Policy(), (PRIVATE,), {PRIVATE.path: 7})
