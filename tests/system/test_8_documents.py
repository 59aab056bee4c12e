# SPDX-License-Identifier: Apache-2.0
"""Every command in the documents: each page in one shell, as a reader types it.

A page that switches on a fleet has its own; the others share one, whose private data they add to. README.md
has a test of its own, test_5_readme.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from documents.blocks import blocks
from documents.site import ROOT, followed

from .pages import follow
from .support import Emulation, create

README = ROOT / "README.md"
PAGES = [
    page for page in followed() if page != README and any(each.runs for each in blocks(page.read_text()))
]
SECONDS = 240.0

pytestmark = pytest.mark.timeout(SECONDS + 60)


def _emulates(page: Path) -> bool:
    return any("millpond emulate" in block.text for block in blocks(page.read_text()) if block.runs)


def _named(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=[str(page.relative_to(ROOT)) for page in pages])


def _follow(page: Path, folder: Path, variables: dict[str, str]) -> None:
    folder.mkdir()
    fault = follow(blocks(page.read_text()), folder, variables, SECONDS)
    assert not fault, f"{page.relative_to(ROOT)}: {fault}"


@pytest.fixture(scope="module")
def readers_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulation]:
    """Three devices with digits, as the pages have them."""
    emulation = create(tmp_path_factory.mktemp("readers"), ("csd0", "csd1", "csd2"))
    try:
        emulation.start()
        emulation.wait_ready()
        yield emulation
    finally:
        left = emulation.stop()
    assert not left, f"left behind: {left}"


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("```bash\ntrue\n```\n```bash\nls gone\n```\n```bash\necho behind\n```\n", "line 4\nls: cannot"),
        ("<!-- fails: 2 -->\n```bash\nexit 3\n```\n", "exit code 3, not 2"),
        (
            "<!-- file: a/b.txt -->\n```text\nx\n```\n```console\n$ cat a/b.txt\nx\n$ false\n```\n",
            "line 5\nx",
        ),
        ("<!-- background -->\n```bash\necho up; sleep 60\n```\n```bash\nexit 1\n```\n", "line-2.out: up"),
    ],
)
def test_a_page_that_does_not_work_is_told(page: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    fault = follow(blocks(page), tmp_path / "reader", {}, SECONDS)
    assert told in fault and "behind" not in fault, fault


@pytest.mark.full
@_named([page for page in PAGES if _emulates(page)])
def test_a_page_with_a_fleet_of_its_own(page: Path, tmp_path: Path) -> None:
    _follow(page, tmp_path / "reader", {})


@pytest.mark.full
@_named([page for page in PAGES if not _emulates(page)])
def test_a_page_about_a_fleet(page: Path, readers_fleet: Emulation, tmp_path: Path) -> None:
    _follow(page, tmp_path / "reader", {"MILLPOND_FLEET": str(readers_fleet.directory)})
