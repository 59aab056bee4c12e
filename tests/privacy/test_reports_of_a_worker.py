# SPDX-License-Identifier: Apache-2.0
"""Attacks by words: a model that puts what it has read into names, texts and messages of its own. Neither the
host nor the agent's log, which the host can ask for, has a word of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgpack
import pytest

from millpond.agent.policy import error_reports
from millpond.agent.policy.error_reports import rebuilt
from millpond.base.errors import ConnectionLost, MillpondError, RemoteError
from millpond.linux.zygote.client import Zygote
from millpond.train.error_texts import TEXTS
from millpond.train.protocol import Ready, Update
from millpond.wire.framing import MAGIC, PREFIX, PROTOCOL, encode
from millpond.wire.messages import Failure, Message, Ok

from .support import SIZE, Device, Volume, device, model

SECRET = "patient4711"  # noqa: S105 - a private file might say it
RANGES = ((0, 8),)
JOIN = 'SECRET = "pat" + "ient" + str(47 * 100 + 11)\n'

RAISED = {
    "the text": "raise ValueError(SECRET)",
    "the class": "raise type(SECRET, (Exception,), {})(1)",
    "a class of the system's": "raise type(SECRET, (OSError,), {})(5, SECRET)",
    "the cause": "raise ValueError(1) from KeyError(SECRET)",
    "the function": """
        space = {}
        exec(compile(f"def {SECRET}(): raise ValueError", __file__, "exec"), space)
        space[SECRET]()
    """,
    "the file": """
        folder = __file__.rsplit("/", 1)[0]
        exec(compile("raise ValueError", f"{folder}/{SECRET}.py", "exec"), {})
    """,
    "a syntax error": """
        folder = __file__.rsplit("/", 1)[0]
        compile("(", f"{folder}/{SECRET}", "exec")
    """,
    "the line": 'exec(compile(4711 * "\\n" + "raise ValueError", __file__, "exec"), {})',
    "an error of millpond's": """
        from millpond.train.data.errors import DataError
        raise DataError(SECRET)
    """,
    "the exit code": "raise SystemExit(SECRET)",
}

FORGED = {
    "a text": Failure("data", SECRET),
    "a code": Failure(SECRET, "missing data: there are no samples"),
    "a file": Failure("model", f"ValueError at {SECRET}:1; its"),
    "line 0": Failure("model", f"ValueError at {SECRET}:0 in forward; its"),
    "a file of millpond's": Failure("model", f"ValueError at millpond/train/data/{SECRET[:7]}.py:3; its"),
    "a worker's name": Failure("model", f"{SECRET} builds another model than the host"),
    "a tensor's name": Failure("model", f"the model's forward changes its parameter '{SECRET}'; only the"),
    "a folder": Failure("data", f"missing data: there is no folder {SECRET}"),
    "digits of another script": Failure("data", "samples of \u0967 folders are wanted; there are 4711"),
    "a long text": Failure("model", SECRET * 50_000),
    "the other exchange": Update(4711, 8, 8.0, 0.0, 0.0, 0.0, 0.0, 0, {"loss": (0.0, 8.0)}),
    "the other samples": Update(7, 4711, 8.0, 0.0, 0.0, 0.0, 0.0, 0, {"loss": (0.0, 8.0)}),
    "names of metrics": Update(7, 8, 8.0, 0.0, 0.0, 0.0, 0.0, 0, {SECRET: (0.0, 8.0)}),
    "more metrics": Update(7, 8, 8.0, 0.0, 0.0, 0.0, 0.0, 0, {"loss": (0.0, 8.0), SECRET: (1.0, 8.0)}),
    "another message": Ready((8,), token=SECRET.encode()),
    "no answer": Ok(),
}


def framed(name: str, fields: dict[str, object], payload: bytes = b"") -> bytes:
    head: bytes = msgpack.packb([name, fields])
    return PREFIX.pack(MAGIC, PROTOCOL, len(head), len(payload)) + head + payload


_HEAD = asdict(Update(7, 8, 8.0, 0.0, 0.0, 0.0, 0.0, 0, {"loss": (0.0, 8.0)}))
BYTES = {
    "an unknown message": framed(SECRET, {}),
    "an unknown encoding": framed("update", {**_HEAD, "encoding": SECRET}),
    "a value of another type": framed("update", {**_HEAD, "norm": SECRET}),
    "a key of another type": framed("update", {**_HEAD, "metrics": {SECRET: SECRET}}),
    "a metric that is no pair": framed("update", {**_HEAD, "metrics": {"loss": [0.0, SECRET]}}),
    "a payload": framed("update", _HEAD, SECRET.encode()),
    "a payload of a failure": framed("failure", {"code": "io", "text": "x"}, SECRET.encode()),
    "no frame": SECRET.encode() * 3,
    "another version": PREFIX.pack(MAGIC, 4711, 5, 0) + bytes(5),
    "a long head": PREFIX.pack(MAGIC, PROTOCOL, 4711 << 10, 0),
}
WORDS = (SECRET.encode(), SECRET[:7].encode(), b"4711", "\u0967".encode())


def texts(error: MillpondError | None) -> bytes:
    return str(error).encode()


def expect_nothing_of_it(made: Device) -> None:
    for word in WORDS:
        assert word not in bytes(made.left.data) and word not in texts(made.error)


@pytest.fixture(scope="module")
def raising(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[Device]:
    cases = "".join(
        f"def case_{number}():\n" + "".join(f"    {line.strip()}\n" for line in text.strip().splitlines())
        for number, text in enumerate(RAISED.values())
    )
    choose = "def forward(model, images):\n    globals()[f'case_{torch.initial_seed()}']()\n"
    with device(Volume(tmp_path_factory.mktemp("raising")), zygote, model(JOIN + cases + choose)) as made:
        yield made


@pytest.mark.parametrize("what", RAISED)
def test_an_exception_tells_a_type_and_a_place(raising: Device, what: str) -> None:
    with raising.host() as host, pytest.raises(RemoteError, match="stays on the device") as caught:
        host.ask(RANGES, seed=list(RAISED).index(what))
    assert SECRET not in str(caught.value)
    expect_nothing_of_it(raising)


@pytest.mark.parametrize("what", [*FORGED, *BYTES])
def test_a_message_of_the_model_itself_is_rebuilt_or_refused(
    tmp_path: Path, zygote: Zygote, what: str
) -> None:
    data = encode(FORGED[what]) if what in FORGED else BYTES[what]
    code = model(f"SAID = {data!r}\n\ndef forward(model, images):\n    say_and_wait(SAID)\n")
    with device(Volume(tmp_path), zygote, code) as made:
        with made.host() as host, pytest.raises(RemoteError) as caught:
            host.ask(RANGES)
        if isinstance(caught.value, ConnectionLost):
            assert str(made.error).startswith(("the worker ", "the worker process sent an invalid answer"))
        expect_nothing_of_it(made)
        assert made.sent["parameters"] == 0


EARLY = ("a text", "a file", "a worker's name", "no answer", "an unknown message", "a payload", "no frame")


@pytest.mark.parametrize("what", EARLY)
def test_nor_does_it_get_through_while_the_model_is_built(tmp_path: Path, zygote: Zygote, what: str) -> None:
    data = encode(FORGED[what]) if what in FORGED else BYTES[what]
    code = model(f"SAID = {data!r}\n\ndef build(model):\n    say_and_wait(SAID)\n")
    with pytest.raises(RemoteError) as caught, device(Volume(tmp_path), zygote, code):
        pass
    assert not any(word in texts(caught.value) for word in WORDS)


def test_tensors_of_other_names_are_not_named(tmp_path: Path, zygote: Zygote) -> None:
    code = model(JOIN + "\ndef build(model):\n    model.register_buffer(SECRET, torch.zeros(1))\n")
    with pytest.raises(RemoteError, match="csd0 builds another model than the host"):
        Device(Volume(tmp_path), zygote, code)
    made = "torch.zeros(1, dtype=torch.complex128)"
    wide = model(JOIN + f"\ndef build(model):\n    model.register_buffer(SECRET, {made})\n")
    with pytest.raises(RemoteError, match="an error whose text stays on the device"):
        Device(Volume(tmp_path / "wide"), zygote, wide)


def test_what_is_left_in_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    """Count the texts that a model can choose among, where the host lets it have 1000 lines of 2000 words."""
    code = {"net.py": "\n".join(f"word{2 * n} = word{2 * n + 1}" for n in range(1000))}
    line = 999
    told = rebuilt(Failure("io", f"word5 at net.py:{line} in word77; its"), (), code)
    assert told.text.startswith(f"word5 at net.py:{line} in word77; ")
    for wrong in ("word5 at net.py:1001 in x; its", "word5 at other.py:1; its"):
        assert rebuilt(Failure("io", wrong), (), code).text == "word5; its message stays on the device"
    place = math.log2(len(error_reports.CODES)) + 2 * math.log2(2000) + math.log2(1000)
    numbers = max(len(re.findall(r"\[1-9\]", own.pattern.pattern)) for own in TEXTS)
    template = math.log2(3) + math.log2(len(TEXTS)) + numbers * math.log2(1e8)
    with capsys.disabled():
        print(f"\na report carries {place:.0f} bits in a place, at most {template:.0f} in {numbers} numbers")
    assert place < 64 and template < 300


def test_answers_of_a_worker_that_says_nothing_more_are_complete(tmp_path: Path, zygote: Zygote) -> None:
    """The way of an answer works: else these attacks would fail for another reason."""
    said: Message = Update(7, 8, 8.0, 0.0, 0.0, 0.0, 0.0, 0, {"loss": (0.5, 8.0)})
    code = model(f"def forward(model, images):\n    say_and_wait({encode(said)!r})\n")
    with device(Volume(tmp_path), zygote, code) as made, made.host() as host:
        assert host.ask(RANGES) == said
        assert made.sent["metrics"] == len(encode(said)) and len(host.fetch()) == SIZE
