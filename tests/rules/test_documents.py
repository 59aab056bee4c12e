# SPDX-License-Identifier: Apache-2.0
"""Documents are short and their links lead somewhere; in made-up ones each rule finds its faults."""

from __future__ import annotations

from pathlib import Path

from . import documents
from .test_rules import ROOT, expect_none

COMPONENTS = ("agent", "fs", "host", "images", "tests", "tunnel")
LIMITS = {"README.md": 8000, "SECURITY.md": 8000, **{f"{name}/README.md": 6000 for name in COMPONENTS}}
"""The most bytes of the documents that a newcomer reads first."""


def test_what_is_read_first_is_short() -> None:
    expect_none(documents.large_documents(ROOT, LIMITS))


def test_cells_of_tables_are_short() -> None:
    expect_none(documents.long_cells(ROOT))


def test_links_lead_somewhere() -> None:
    expect_none(documents.broken_links(ROOT))


def test_workflows_run_targets_of_make() -> None:
    expect_none(documents.not_made(ROOT))


def test_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# Mill\n[here](docs/page.md#a-pond) `[no](link)` [gone](docs/gone.md) [web](https://a.example)\n"
        f"| {'a' * 301} | {'b' * 300} |\n"
        f"```text\n| {'c' * 301} | [no](link) |\n```\n"
    )
    (tmp_path / "docs" / "page.md").write_text("## A pond\n[up](../README.md#mill) [top](#a-lake)\n")
    assert documents.large_documents(tmp_path, {"README.md": 100}) == ["README.md has 1034 bytes of 100"]
    assert documents.long_cells(tmp_path) == [f"README.md: a cell of 301 characters: {'a' * 40}"]
    assert documents.broken_links(tmp_path) == [
        "README.md links to docs/gone.md, which is not there",
        "docs/page.md links to #a-lake, which is not there",
    ]
    (tmp_path / "Makefile").write_text("check:  ## rules\nhidden:\n")
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    steps = ("- run: make check", "- run: sudo make check PYTHON=python3", "- run: |", "- run: make hidden")
    (tmp_path / ".github" / "workflows" / "a.yml").write_text("".join(f"      {step}\n" for step in steps))
    named = [line.split("'")[1] for line in documents.not_made(tmp_path)]
    assert named == ["|", "make hidden"]
