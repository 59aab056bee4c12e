# SPDX-License-Identifier: Apache-2.0
"""The structure of a batch leaves as words that the host has sent, known types, and shapes of images."""

from __future__ import annotations

import pytest

from millpond.agent.policy.batch_structure import rebuilt
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import BatchPart
from millpond.train.task.structure import GUESSED_IMAGES

CODE = {"task.py": "class Words:\n    def item(self):\n        return {'word': 1, 'mask': 2}\n"}
OWN = WorkSpec("own", ModelSpec("task:Words"), task=True)
ALONE = WorkSpec("alone", ModelSpec("net:build"))
GUESSED = WorkSpec("data-check", ModelSpec(GUESSED_IMAGES), task=True)
IMAGES = (BatchPart("[0]", "float32", (1, 8, 8)), BatchPart("[1]", "int64", ()))


@pytest.mark.parametrize(("work", "code"), [(ALONE, CODE), (GUESSED, {})])
def test_the_shape_of_a_folders_images_is_told(work: WorkSpec, code: dict[str, str]) -> None:
    assert rebuilt(IMAGES, work, code) == IMAGES
    assert [str(part) for part in IMAGES] == ["float32 Nx1x8x8", "int64 N"]


@pytest.mark.parametrize("work", [OWN, GUESSED])
def test_lengths_of_a_tasks_own_batch_stay(work: WorkSpec) -> None:
    found = rebuilt(IMAGES, work, CODE)
    assert [str(part) for part in found] == ["float32 Nx*x*x*", "int64 N"]


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("batch", "batch"),
        ("[12].mask", "[12].mask"),
        ("word[0][1]", "word[0][1]"),
        ("patient", "?"),
        ("word.patient", "word.?"),
        ("[123456]", "?"),
        ("word.word.word.word.word", "word.word.word.word"),
        ("", ""),
    ],
)
def test_a_place_is_of_words_that_the_host_has_sent(place: str, told: str) -> None:
    assert rebuilt([BatchPart(place, "str")], OWN, CODE) == (BatchPart(told, "str"),)


@pytest.mark.parametrize("kind", ["patient 7", "Patient", "float32 ", "int65"])
def test_a_type_that_is_none_of_the_known_stays(kind: str) -> None:
    assert rebuilt([BatchPart("batch", kind)], ALONE, {}) == (BatchPart("batch", "?"),)


def test_there_are_few_parts_of_few_lengths_each_of_which_is_short() -> None:
    long = BatchPart("batch", "int64", (1, 1 << 16, (1 << 16) + 1, -7, 5, 6))
    found = rebuilt([long] * 100, ALONE, {})
    assert found == (BatchPart("batch", "int64", (1, 1 << 16, -1, -1)),) * 16
