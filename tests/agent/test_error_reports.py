# SPDX-License-Identifier: Apache-2.0
"""A worker's report of an error: millpond's own texts pass as they are; what a model makes up does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import IterableDataset

from millpond.agent.policy.error_reports import CODES, rebuilt
from millpond.base.errors import ConnectionLost, LocalError, Refused
from millpond.train import error_texts
from millpond.train.balance.ranges import Ranges
from millpond.train.data import rows
from millpond.train.data.errors import DataError
from millpond.train.data.labelled_images import LabelledImages
from millpond.train.data.read_ahead import ReadAhead
from millpond.train.data.streamed import StreamedSamples
from millpond.train.local.mini_epochs import MiniEpochReader
from millpond.train.local.prefetch import ReadingMeter
from millpond.train.local.selection import SampleFolders, Selection
from millpond.train.protocol import Folder, Work
from millpond.train.repeats import FixedRepeats
from millpond.train.state import flat
from millpond.train.state.flat_parameters import FlatParameters
from millpond.train.task.task import Task
from millpond.wire.messages import Failure

from ..train.wrong_samples import FOLDER, WRONG, data_error, npy

NAMES = (FOLDER, "csd0", "layer.weight", "net")
CODE = {"net.py": "class Odd(Exception): ...\n\n\ndef forward():\n    raise Odd\n", "lib/more.py": "x = 1"}
HIDDEN = "an error whose text stays on the device; the job's log there has it"


def expect_unchanged(error: LocalError, code: str = "data") -> None:
    failure = Failure(code, error.discreet if isinstance(error, DataError) else str(error))
    assert "anna." not in failure.text and "anna/" not in failure.text
    assert rebuilt(failure, NAMES, CODE) == failure


@pytest.mark.parametrize("what", WRONG)
def test_errors_of_samples_pass_as_they_are(tmp_path: Path, what: str) -> None:
    expect_unchanged(data_error(tmp_path, what))


def test_so_does_one_of_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    npy()(tmp_path / FOLDER)
    monkeypatch.setattr(rows, "_LARGEST", 100)
    with pytest.raises(DataError, match="is larger than 100 bytes") as caught:
        rows.content(tmp_path, f"{FOLDER}/images.npy")
    expect_unchanged(caught.value)
    whole = f"{FOLDER}/images.npy is larger than {16 << 30} bytes"
    assert rebuilt(Failure("io", whole), NAMES, CODE) == Failure("io", whole)


def cut_error(tmp_path: Path) -> DataError:
    """Return the error of a file that is cut while it is open."""
    file, whole = tmp_path / "images-anna.npy", np.zeros((3, 8, 8), np.float32)
    np.save(file, whole)
    name = f"{FOLDER}/{file.name}"
    part = rows.FileRows(file, name, 128, whole.shape, whole.dtype)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError) as caught:
        part.read([2])
    return caught.value


def test_so_does_one_of_a_file_that_is_cut(tmp_path: Path) -> None:
    expect_unchanged(cut_error(tmp_path))


class User:
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


def dataset(count: int, side: int = 2) -> LabelledImages:
    images = rows.ArrayRows(np.zeros((count, 1, side, side), np.float32))
    return LabelledImages([images], np.arange(count), [FOLDER], FOLDER)


def raising(error: Exception) -> Callable[[], ReadAhead]:
    def connect() -> ReadAhead:
        raise error

    return connect


def exchange_errors() -> Iterator[DataError]:
    task, part, none = Task(User()), dataset(9), dataset(0)
    folder = Folder(FOLDER, "csd0")
    asked: list[tuple[LabelledImages, tuple[Ranges, ...], int]] = [
        (part, (), 0),
        (part, ((),), 0),
        (part, (((5, 12),),), 0),
        (none, ((),), 5),
    ]
    for own, ranges, synthetic in asked:
        request, held = Work(1, 0, 0, ranges, synthetic), SampleFolders(task, 0, [folder], [own])
        with pytest.raises(DataError) as caught:
            held.synthetic(synthetic) if synthetic else held.take(request)
        yield caught.value
    with pytest.raises(DataError) as caught:
        one_group = Selection(task, [part], [np.arange(9)], np.array([9]))
        reader = MiniEpochReader(9, 2, FixedRepeats(1), ReadingMeter())
        next(reader.repetitions(one_group, torch.Generator(), lambda _: (0.0, None, None)))
    yield caught.value
    for error in (Refused("", "data", "no folder"), Refused("", "protocol", "x"), ConnectionLost("away")):
        with pytest.raises(DataError) as caught:
            StreamedSamples(raising(error), FOLDER, "csd0")
        assert caught.value.transient == (getattr(error, "code", "") != "data")
        yield caught.value
    for parts in ([part, dataset(9, 3)], [part]):
        with pytest.raises(DataError) as caught:
            task.check(parts, task.model())
        yield caught.value


def test_errors_of_exchanges_pass_as_they_are() -> None:
    for error in exchange_errors():
        expect_unchanged(error)


def model_errors() -> Iterator[LocalError]:
    wide, holding = nn.Linear(1, 1), nn.Linear(1, 1)
    wide.register_buffer("net", torch.zeros(1, dtype=torch.complex128))
    holding.register_buffer("net", torch.zeros(1, dtype=torch.int64))
    tensors = flat.describe(holding)
    holding.net.fill_(1 << 25)  # type: ignore[operator, union-attr]
    size = np.zeros(1, np.float32)
    attempts: list[Callable[[], object]] = [
        lambda: flat.describe(nn.Flatten()),
        lambda: flat.describe(wide),
        lambda: flat.read(holding, np.zeros(3, np.float32), tensors),
        lambda: flat.read(nn.Linear(1, 1), size),
        lambda: flat.whole(np.full(1, np.inf, np.float32), "net"),
        lambda: FlatParameters(nn.Linear(1, 1)).check_unchanged(np.ones(2, np.float32)),
    ]
    for attempt in attempts:
        with pytest.raises(LocalError) as caught:
            attempt()
        yield caught.value


def test_errors_of_models_pass_with_names_that_the_host_knows() -> None:
    names = {*NAMES, "weight", "bias"}
    for error in model_errors():
        failure = Failure("model", str(error))
        assert rebuilt(failure, names, CODE) == failure
        names_one = "'" in failure.text.replace("model's", "")
        assert rebuilt(failure, (), CODE).text == (HIDDEN if names_one else failure.text)
    for text in (
        "csd0 builds another model than the host",
        "csd0 builds other frozen parameters or local layers than the host: 'net' differs beyond rounding",
        "the model has no parameter that may be trained",
        error_texts.CHANGED_PARAMETER("layer.weight"),
        "there are 3 states, and none with number 7",
    ):
        assert rebuilt(Failure("model", text), NAMES, CODE).text == text


def test_errors_of_shards_pass_but_for_names_that_the_host_does_not_know() -> None:
    for text in ("x holds a sparse file", "x is not a whole tar file", "missing data: x has no *.tar"):
        assert rebuilt(Failure("data", text), {"x"}, CODE).text == text
        assert rebuilt(Failure("data", text), (), CODE).text == HIDDEN
    for text in ("x has no column 'y'", "x holds y.jpg twice"):
        assert rebuilt(Failure("data", text), {"x"}, CODE).text == HIDDEN


class Wrong:
    """A task whose hook returns this as a data set."""

    def __init__(self, dataset: object) -> None:
        self.dataset = lambda *_: dataset

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)


class Stream(IterableDataset[int]):
    """One with a length; torch's base class has a method for items, which raises."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("items", [3, iter(range(3)), {1, 2}, Stream()])
def test_errors_of_data_sets_pass_as_they_are(tmp_path: Path, items: object) -> None:
    with pytest.raises(LocalError) as caught:
        Task(Wrong(dataset=items)).dataset(tmp_path, ".", "train")
    expect_unchanged(caught.value, "model")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError at net.py:4 in forward; its message", "ValueError at net.py:4 in forward; "),
        ("Odd at lib/more.py:1; x", "Odd at lib/more.py:1; "),
        ("Odd at net.py:4 in anna; x", "Odd at net.py:4; "),
        ("Anna at net.py:4 in forward; x", "an exception at net.py:4 in forward; "),
        ("MemoryError outside of the model's files; x", "MemoryError outside of the model's files; "),
        (
            "Odd at millpond/train/zoo/models.py:40 in forward; x",
            "Odd at millpond/train/zoo/models.py:40 in ",
        ),
        ("KeyError at net.py:8; x", "KeyError; "),
        ("KeyError at millpond/train/zoo/models.py:4000; x", "KeyError; "),
        ("KeyError at anna.py:1 in forward; x", "KeyError; "),
        ("KeyError at anna:1; x", "KeyError; "),
        ("KeyError at lib/../net.py:1; x", "KeyError; "),
        ("KeyError at millpond/train/anna/smith.py:1; x", "KeyError; "),
        ("KeyError at millpond/train/data/../anna.py:1; x", "KeyError; "),
    ],
)
def test_other_exceptions_tell_a_type_and_a_place(text: str, expected: str) -> None:
    assert rebuilt(Failure("model", text), NAMES, CODE).text.startswith(expected)
    assert rebuilt(Failure("model", text), NAMES, CODE).text.endswith("its message stays on the device")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "anna smith",
        "missing data: there is no folder private/ben",
        f"missing data: there is no folder {FOLDER}/ben.npy",
        f"missing data: there is no folder {FOLDER}\n",
        f"missing data: {FOLDER} has no imagesXnpy",
        f"{FOLDER} is not a whole Xnpy file of numbers",
        "ben builds another model than the host",
        "csd0 builds other frozen parameters or local layers than the host: 'anna' differs beyond rounding",
        "anna_smith_has_the_disease builds another model than the host",
        "the model's forward changes its parameter 'anna'; only the optimizer may",
        f"{FOLDER} holds samples of 1x8x8, private/ben of 1x9x9",
        f"{FOLDER} holds samples of 1x8x8, {FOLDER} of 1x9x9x9x9x9",
        f"{FOLDER} holds float32 of shape (1 2 3 4 ), not images",
        f"{FOLDER} holds anna of shape (3,), not images",
        f"{FOLDER}: Anna has it",
        "samples of \u0967\u0968 folders are wanted; there are 1",
        "samples of 007 folders are wanted; there are 1",
        "samples of 123456789 folders are wanted; there are 1",
        "samples of -1 folders are wanted; there are 1",
        "ValueError at anna:0 in forward; x",
        "ValueError at net.py:\u0967 in forward; x",
        "missing data: there are no samples" + 5000 * " ",
        5000 * "ValueError at net.py:4 in forward; ",
    ],
)
def test_a_text_that_a_model_made_up_stays(text: str) -> None:
    assert rebuilt(Failure("model", text), NAMES, CODE) == Failure("model", HIDDEN)


@given(st.text(max_size=200), st.text(max_size=20))
def test_whatever_a_model_says(text: str, code: str) -> None:
    found = rebuilt(Failure(code, text), (), {})
    assert found.code in CODES
    assert found.text == HIDDEN or re.fullmatch(r"[A-Za-z ]+; its message stays on the device", found.text)


KNOWN = "\n".join(
    (HIDDEN, *CODE.values(), *NAMES, "its message stays on the device outside of the exception")
)
WORD: st.SearchStrategy[str] = st.from_regex(r"[a-z0-9_]{6,12}", fullmatch=True)
TEXTS = (
    "{0} at {0}:1 in {0}; {0}",
    "{0} at net.py:1 in {0}; {0}",
    "ValueError at {0}:{1} in forward; {0}",
    "ValueError at {0}/net.py:1; {0}",
    "ValueError at millpond/train/{0}.py:1; {0}",
    "missing data: there is no folder {0}",
    "missing data: {0} has no images.npy",
    f"{FOLDER}/{{0}}/images.npy is not a picture that can be read",
    f"{FOLDER} holds {{0}} of shape (1,), not images",
    f"{FOLDER}: {{0}}",
    "{0} builds another model than the host",
    "'{0}' should be whole numbers, and is not finite",
)


@given(st.sampled_from(TEXTS), WORD, st.integers(0, 10**9), st.sampled_from([*CODES, "anna"]))
def test_no_word_of_a_models_own_leaves(text: str, word: str, number: int, code: str) -> None:
    assume(word not in KNOWN)
    found = rebuilt(Failure(code, text.format(word, number)), NAMES, CODE)
    assert word not in found.text and found.code in CODES


def test_codes_are_four_words() -> None:
    for code in ("anna", "", "protocol"):
        assert rebuilt(Failure(code, "missing data: there are no samples"), (), {}).code == "model"
    assert [rebuilt(Failure(code, ""), (), {}).code for code in CODES] == ["data", "model", "io", "memory"]
