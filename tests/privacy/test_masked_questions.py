# SPDX-License-Identifier: Apache-2.0
"""Masked answers of devices: their sum, and a malicious host that asks the others for sums that it knows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.job_files import LaidOutFiles
from millpond.agent.policy.budget_ledger import BudgetLedger
from millpond.agent.policy.settings import Budget, Policy
from millpond.agent.questions import counting
from millpond.agent.questions.noise import SumsNoise
from millpond.agent.questions.release import QuestionMember
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.messages import Agreed, Offered, OffersTaken, Shares
from millpond.aggregate.masking.stream import mask_add
from millpond.base.errors import Refused
from millpond.host.workers.masked_reduction import fresh_session
from millpond.privacy.accounting import sigma_of_sum
from millpond.train.protocol import Folder
from millpond.train.questions.messages import AskDevice
from millpond.train.questions.question import UNIT, DataQuestion
from millpond.train.worker.start import WorkerFiles
from millpond.wire.messages import Failure

from ..identities import issued

NAMES = ("csd0", "csd1", "csd2")
ASKED = AskDevice("a", DataQuestion("histogram", "label", 0, 10, 3), (Folder("private/digits", ""),))


def device(name: str, folder: Path, asked: AskDevice, policy: Policy | None = None) -> QuestionMember:
    (folder / name).mkdir(exist_ok=True)
    link = LinkConfig("10.77.0.2/30", "s")
    state, identity = str(folder / name), issued(name, folder / name)
    config = AgentConfig(name, link, state=state, identity=identity, policy=policy or Policy())
    ledger = BudgetLedger(folder / name / "budget")
    return QuestionMember(config, asked, SumsNoise(config, asked, ledger) if asked.rho else None)


def begun(members: dict[str, QuestionMember]) -> MaskedExchange:
    """Return an exchange of devices, as a host begins it."""
    counted = {name: one.counted() for name, one in members.items()}
    certificates = {name: one.cohort_certificate for name, one in counted.items()}
    return MaskedExchange(
        {name: one.cohort_key for name, one in counted.items()}, fresh_session(), certificates
    )


def unmasked(members: dict[str, QuestionMember], sums: dict[str, np.ndarray[Any, Any]]) -> list[int]:
    """Return the sum that a host learns."""
    exchange = begun(members)

    def answers(requests: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
        found = {name: members[name].answer(request) for name, request in requests.items()}
        assert all(isinstance(each, kind) for each in found.values())
        return found

    for name, offer in answers(dict.fromkeys(members, exchange.opening()), Offered).items():
        assert not exchange.offered(name, offer)
    for name, taken in answers(exchange.dealing(1.0), OffersTaken).items():
        exchange.taken(name, taken)
    masked = {name: members[name].told(each) for name, each in sums.items()}
    for name, tags in answers(dict.fromkeys(members, exchange.agreeing(members)), Agreed).items():
        exchange.agreed(name, tags)
    for name, shares in answers(exchange.unmasking(), Shares).items():
        assert not exchange.shared(name, shares)
    total = sum(masked.values(), np.zeros(6, np.uint64))
    mask_add(total, list(exchange.masks()))
    return list(total.view(np.int64).tolist())


def test_the_sum_is_exact_and_there_is_one(tmp_path: Path) -> None:
    members = {name: device(name, tmp_path, ASKED) for name in NAMES}
    sums = {name: np.arange(6) - 3 * number for number, name in enumerate(NAMES)}  # noise makes them negative
    assert unmasked(members, sums) == np.sum([*sums.values()], axis=0).tolist()
    with pytest.raises(Refused, match="a question is answered once"):
        unmasked(members, sums)


def test_pinned_devices_answer_a_question_with_one_set_of_devices(tmp_path: Path) -> None:
    """Else the difference would be the answer of one."""
    for name in NAMES:
        device(name, tmp_path, ASKED)  # makes its key
    lines = tuple((tmp_path / name / "cohort.pub").read_text().strip() for name in NAMES)
    policy = Policy(cohort=lines, least_devices=2)

    def asked(names: tuple[str, ...], question: AskDevice = ASKED) -> None:
        members = {name: device(name, tmp_path, question, policy) for name in names}
        unmasked(members, dict.fromkeys(names, np.zeros(6, np.int64)))

    asked(NAMES)
    asked(NAMES)
    with pytest.raises(Refused, match="a sum of other devices was told"):
        asked(NAMES[:2])
    asked(NAMES[:2], replace(ASKED, folders=(Folder("private/other", ""),)))
    known = replace(ASKED, folders=(Folder("public/known", "", public=True),))
    asked(NAMES, known)
    asked(NAMES[:2], known)


def test_a_question_opens_no_session_of_another_one(tmp_path: Path) -> None:
    made = {name: device(name, tmp_path, ASKED) for name in NAMES}
    opening = begun(made).opening()
    assert isinstance(made["csd0"].answer(opening), Offered)
    with pytest.raises(Refused, match="this session was opened before"):
        device("csd0", tmp_path, ASKED).answer(opening)


def test_the_sum_has_the_noise_of_the_fewest_devices_and_each_device_has_paid(tmp_path: Path) -> None:
    asked, rho, size = replace(ASKED, rho=0.01), 0.01, ASKED.question.words
    sums = {name: np.arange(size) * UNIT for name in NAMES}
    found = []
    for number in range(60):
        (tmp_path / str(number)).mkdir()
        members = {name: device(name, tmp_path / str(number), asked) for name in NAMES}
        found.append(np.array(unmasked(members, sums)) - 3 * sums["csd0"])
    sigma = sigma_of_sum(rho, 15 * UNIT, 3, size)  # all of three devices must be in the sum
    assert sigma == pytest.approx(15 * UNIT / math.sqrt(2 * rho * 3), rel=0.01)
    assert np.std(found) == pytest.approx(math.sqrt(3) * sigma, rel=0.2)
    assert abs(np.mean(found)) < 5 * math.sqrt(3 / len(found) / size) * sigma
    for name in NAMES:
        spent = BudgetLedger(tmp_path / "0" / name / "budget").spent("private/digits")
        assert spent == pytest.approx(rho)


def test_a_budget_is_for_all_questions_together(tmp_path: Path) -> None:
    policy = Policy(budget=Budget(1.0, unit="group"))
    assert policy.budget
    asked, zeros = replace(ASKED, rho=policy.budget.rho / 3), dict.fromkeys(NAMES, np.zeros(6, np.int64))
    for _ in range(3):
        unmasked({name: device(name, tmp_path, asked, policy) for name in NAMES}, zeros)
    with pytest.raises(Refused, match=r"policy.budget: .*private/digits"):
        unmasked({name: device(name, tmp_path, asked, policy) for name in NAMES}, zeros)


def test_an_answer_that_cannot_be_paid_does_not_leave(tmp_path: Path) -> None:
    members = {name: device(name, tmp_path, replace(ASKED, rho=0.01)) for name in NAMES}
    (tmp_path / "csd1" / "budget").mkdir()
    with pytest.raises(Refused, match=r"policy.budget: .* cannot be written"):
        unmasked(members, dict.fromkeys(NAMES, np.zeros(6, np.int64)))


@pytest.mark.parametrize(
    "change",
    [
        lambda asked: replace(asked, rho=1.0),
        lambda asked: replace(asked, question=replace(asked.question, low=5)),
        lambda asked: replace(asked, question=replace(asked.question, column="image")),
        lambda asked: replace(asked, folders=(Folder("private/empty", ""),)),
        lambda asked: replace(asked, folders=(Folder("private/digits", "", public=True),)),
    ],
    ids=("noise", "bounds", "column", "folder", "public"),
)
def test_no_device_unmasks_its_answer_among_those_to_other_questions(
    tmp_path: Path, change: Callable[[AskDevice], AskDevice]
) -> None:
    members = {name: device(name, tmp_path, ASKED if name == "csd1" else change(ASKED)) for name in NAMES}
    with pytest.raises(CohortFailed, match="do not cancel"):
        unmasked(members, dict.fromkeys(NAMES, np.zeros(6, np.int64)))


def test_noise_for_smaller_groups_is_no_share_of_that_for_larger_ones(tmp_path: Path) -> None:
    """A device with large groups has paid for a sum with as much noise as all shares for these."""
    asked, large = replace(ASKED, rho=0.01), Policy(least_samples=100)
    members = {name: device(name, tmp_path, asked, large if name == "csd1" else None) for name in NAMES}
    with pytest.raises(CohortFailed, match="do not cancel"):
        unmasked(members, dict.fromkeys(NAMES, np.zeros(6, np.int64)))


@pytest.mark.parametrize(
    ("masked", "rho", "full"), [(True, 0.0, False), (False, 0.1, False), (False, 0.0, True)]
)
def test_with_masks_or_noise_no_text_of_an_error_leaves(
    masked: bool, rho: float, full: bool, tmp_path: Path
) -> None:
    """Also where the owner lets all other errors leave: code of a model could put samples into them."""
    privacy = Privacy(errors="full")
    config = AgentConfig("csd0", LinkConfig("10.77.0.2/30", "s"), state=str(tmp_path), privacy=privacy)
    files = LaidOutFiles(WorkerFiles(tmp_path), ())
    asked, failure = replace(ASKED, masked=masked, rho=rho), Failure("model", "ValueError: 0.4711")
    assert ("0.4711" in counting._discreet(config, asked, files, failure).text) is full
