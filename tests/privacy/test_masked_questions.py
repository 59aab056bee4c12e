# SPDX-License-Identifier: Apache-2.0
"""Masked answers of devices: their sum, and a malicious host that asks the others for sums that it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.questions.counting import CountedSums
from millpond.agent.questions.release import QuestionMember
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.messages import Agreed, Offered, OffersTaken, Shares
from millpond.aggregate.masking.stream import mask_add
from millpond.base.errors import Refused
from millpond.train.protocol import Folder
from millpond.train.questions.messages import AskDevice
from millpond.train.questions.question import DataQuestion

NAMES = ("csd0", "csd1", "csd2")
ASKED = AskDevice("a", DataQuestion("histogram", "label", 0, 10, 3), (Folder("private/digits", ""),))


def device(name: str, folder: Path, asked: AskDevice) -> QuestionMember:
    (folder / name).mkdir(exist_ok=True)
    return QuestionMember(AgentConfig(name, LinkConfig("10.77.0.2/30", "s"), state=str(folder / name)), asked)


def unmasked(members: dict[str, QuestionMember], sums: dict[str, np.ndarray[Any, Any]]) -> list[int]:
    """Return the sum that a host learns."""
    exchange = MaskedExchange({name: one.counted().cohort_key for name, one in members.items()}, bytes(16))

    def answers(requests: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
        found = {name: members[name].answer(request) for name, request in requests.items()}
        assert all(isinstance(each, kind) for each in found.values())
        return found

    for name, offer in answers(dict.fromkeys(NAMES, exchange.opening()), Offered).items():
        assert not exchange.offered(name, offer)
    for name, taken in answers(exchange.dealing(1.0), OffersTaken).items():
        exchange.taken(name, taken)
    masked = {name: members[name].masked(CountedSums(each, {})) for name, each in sums.items()}
    for name, tags in answers(dict.fromkeys(NAMES, exchange.agreeing(NAMES)), Agreed).items():
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


@pytest.mark.parametrize(
    "change",
    [
        lambda asked: replace(asked, question=replace(asked.question, low=5)),
        lambda asked: replace(asked, question=replace(asked.question, column="image")),
        lambda asked: replace(asked, folders=(Folder("private/empty", ""),)),
        lambda asked: replace(asked, folders=(Folder("private/digits", "", public=True),)),
    ],
    ids=("bounds", "column", "folder", "public"),
)
def test_no_device_unmasks_its_answer_among_those_to_other_questions(
    tmp_path: Path, change: Callable[[AskDevice], AskDevice]
) -> None:
    members = {name: device(name, tmp_path, ASKED if name == "csd1" else change(ASKED)) for name in NAMES}
    with pytest.raises(CohortFailed, match="0 of 3 devices have unmasked the sum"):
        unmasked(members, dict.fromkeys(NAMES, np.zeros(6, np.int64)))
