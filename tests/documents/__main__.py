# SPDX-License-Identifier: Apache-2.0
"""Entry: ``make docs`` and the part of ``make check`` that looks at documents.

``write`` writes the reference and the figures into the pages, ``check`` says which would change, and ``site``
lays the pages out for the program that makes HTML of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.papers.results import published
from bench.rows import Row
from documents import site
from documents.exhibits import with_exhibits
from documents.figures import Files, NoFigureError, filled
from documents.reference import PAGES
from documents.site import ROOT

REFERENCE, BENCH, PAPERS = (ROOT / "docs" / name for name in ("reference", "bench", "papers"))
BUILD = ROOT / ".site"


def main() -> int:
    """Do what the argument says. Exit codes: 0 done, 1 a page is wrong or old, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m documents", description=__doc__)
    parser.add_argument("action", choices=("write", "check", "lay-out", "look"))
    action = parser.parse_args().action
    try:
        return {"write": write, "check": check, "lay-out": lay_out, "look": look}[action]()
    except (NoFigureError, site.BrokenLinkError) as error:
        print(f"documents: {error}", file=sys.stderr)
        return 1


def texts() -> Iterator[tuple[Path, str]]:
    """Yield all pages whose text follows from code or benchmark files, as it has to be. Raises NoFigureError
    with the page.
    """
    for name, made in PAGES.items():
        yield REFERENCE / name, made()
    files, results = bench_files(BENCH), published(PAPERS)
    for path in pages():
        try:
            yield path, with_exhibits(filled(path.read_text(), files), results)
        except NoFigureError as error:
            raise NoFigureError(f"{path.relative_to(ROOT)}: {error}") from None


def pages() -> list[Path]:
    """Return the pages that a person writes: all Markdown of the tree but the reference."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    paths = (ROOT / name for name in found if name)
    return [path for path in paths if path.exists() and path.parent != REFERENCE]


def bench_files(folder: Path) -> Files:
    """Return the rows of the benchmark files."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: [Row(**row) for row in rows] for name, rows in found.items()}


def stale() -> list[tuple[Path, str]]:
    """Return the pages that would change, and those of the reference that nothing makes, with their text."""
    changed = [(path, text) for path, text in texts() if not path.exists() or path.read_text() != text]
    return changed + [(path, "") for path in REFERENCE.glob("*.md") if path.name not in PAGES]


def write() -> int:
    """Write the pages that change."""
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for path, text in stale():
        print(f"{path.relative_to(ROOT)}: {'written' if text else 'removed'}")
        if text:
            path.write_text(text)
        else:
            path.unlink()
    return 0


def check() -> int:
    """Name the pages that would change, and those that the site's navigation lacks."""
    old = [str(path.relative_to(ROOT)) for path, _ in stale()]
    for name in old:
        print(
            f"{name}: it is not what the code or a benchmark says: 'make reference' writes it",
            file=sys.stderr,
        )
    lost = site.not_in_navigation(ROOT)
    if lost:
        print(f"documents: mkdocs.yml: nav has no line for {', '.join(lost)}", file=sys.stderr)
    return 1 if old or lost else 0


def lay_out() -> int:
    """Lay out the pages for the site."""
    print(f"{site.lay_out(ROOT, BUILD / 'pages')} pages")
    return 0


def look() -> int:
    """Look at the site that was made: a reader's browser asks no other host for anything."""
    found = site.loaded_from_elsewhere(BUILD / "html")
    for line in found:
        print(f"documents: {line}: it is loaded from another host", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
