# SPDX-License-Identifier: Apache-2.0
"""The command line in this process, which is quicker than another one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from millpond.host.cli import app


class Done(NamedTuple):
    """How a command has ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """'millpond' without a terminal."""

    def call(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["millpond", *map(str, arguments)])
        capsys.readouterr()
        with Path(os.devnull).open() as nothing, pytest.raises(SystemExit) as exit_:
            monkeypatch.setattr(sys, "stdin", nothing)
            app.main()
        return Done(int(exit_.value.code or 0), *capsys.readouterr())

    return call
