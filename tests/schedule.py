# SPDX-License-Identifier: Apache-2.0
"""A scheduler of pytest-xdist (``--dist loadgroup``): divides the tests among processes, the longest first.

The tests of a module stay in one process, so that its fixtures are set up once. The mark ``xdist_group``
splits a module that is long and has no such fixtures, or keeps several modules together.

xdist 3.8 sends groups as suffixes of the tests' ids, which pytest 9.2 no longer lets it do: it divides the
tests as if they had no marks, and says nothing. Here the processes write the groups to a file instead.
"""

from __future__ import annotations

import json
import tempfile
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

HEAVIEST_FIRST = (
    "guest/",
    "system/test_6_",
    "system/test_7_",
    "bench/test_bench_experiments",
    "system/",
    "image/",
    "fs/test_4_",
    "tunnel/test_robust_",
    "train/test_group",
    "train/test_worker",
    "packaging/test_install",
    "tunnel/",
    "fs/",
    "train/",
    "host/",
)
"""What takes longest begins first, or the run ends with one process at work; what is not named comes last."""


def rank(module: PurePath) -> int:
    """Return the place of a test module, relative to the folder of all tests, in ``HEAVIEST_FIRST``."""
    name = module.as_posix()
    places = (place for place, begin in enumerate(HEAVIEST_FIRST) if name.startswith(begin))
    return next(places, len(HEAVIEST_FIRST))


def plugin(config: pytest.Config) -> Starting | Started | None:
    """Return what this process of a test run needs: none if it runs all tests by itself."""
    if hasattr(config, "workerinput"):
        return Started(Path(config.workerinput["groups"]))
    return Starting() if config.getoption("dist", "no") == "loadgroup" else None


class Started:
    """In a process that runs tests: their order, and ``groups``, the file that tells the marked ones."""

    def __init__(self, groups: Path) -> None:
        self._groups = groups

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: rank(item.path.relative_to(Path(__file__).parent)))

    @pytest.hookimpl(tryfirst=True)  # before xdist says that the tests are known
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        marks = {item.nodeid: item.get_closest_marker("xdist_group") for item in session.items}
        groups = {nodeid: _name(*mark.args, **mark.kwargs) for nodeid, mark in marks.items() if mark}
        self._groups.write_text(json.dumps(groups))


def _name(name: str) -> str:
    """Return the mark's argument, which may have its name or not."""
    return name


class Starting:
    """In the process that starts them: it divides the tests."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="millpond-tests-")
        self._groups = Path(self._folder.name) / "groups"

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["groups"] = str(self._groups)

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ByModule:
        return ByModule(config, log, self._groups)

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


class ByModule(LoadScopeScheduling):
    """Hands out one module, or one marked group, at a time."""

    def __init__(self, config: pytest.Config, log: Any, groups: Path) -> None:
        super().__init__(config, log)
        self._file = groups

    @cached_property
    def _groups(self) -> dict[str, str]:
        """By the tests' ids; first asked for once all processes have written it, and the same."""
        marked: dict[str, str] = json.loads(self._file.read_text())
        return marked

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.get(nodeid, nodeid.split("::")[0])
