# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the pages of the site, and what they link to, in a folder of their own.

The site has ``docs/`` at its root. What a page links to elsewhere in the tree, such as a README, lies in
``source/`` there; links are changed accordingly.
"""

from __future__ import annotations

import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

from documents.blocks import in_prose

ROOT = Path(__file__).parents[2]
DOCS, SOURCE = "docs", "source"
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")
_LISTED = 100


def followed() -> list[Path]:
    """Return the pages whose blocks tests run or check."""
    return [ROOT / "README.md", *sorted((ROOT / DOCS).rglob("*.md"))]


class BrokenLinkError(Exception):
    """A page links to what is not in the tree."""


def lay_out(root: Path, site: Path) -> int:
    """Write the pages below ``root/docs``, and what they link to, into the folder ``site``, which is made
    anew. Returns the number of pages. Raises BrokenLinkError.
    """
    shutil.rmtree(site, ignore_errors=True)
    waiting = [PurePosixPath(path.relative_to(root)) for path in sorted((root / DOCS).rglob("*.*"))]
    done = set[PurePosixPath]()
    pages = 0
    while waiting:
        path = waiting.pop(0)
        if path in done:
            continue
        done.add(path)
        target = site / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text, linked = with_links(root, path, (root / path).read_text())
            target.write_text(text)
            waiting += linked
            pages += 1
        elif (root / path).is_dir():
            (site / place(path)).parent.mkdir(parents=True, exist_ok=True)
            (site / place(path)).write_text(_listing(root, path))
        else:
            shutil.copyfile(root / path, target)
    return pages


def not_in_navigation(root: Path) -> list[str]:
    """Return the pages in ``docs`` that no line of the navigation names."""
    named = set(re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (root / "mkdocs.yml").read_text(), re.MULTILINE))
    found = (path.relative_to(root / DOCS) for path in sorted((root / DOCS).rglob("*.md")))
    return [str(path) for path in found if str(path) not in named and path.name != "README.md"]


def place(path: PurePosixPath) -> PurePosixPath:
    """Return where a file or folder of the tree lies in the site."""
    if path.parts[:1] == (DOCS,):
        return PurePosixPath(*path.parts[1:])
    if not path.suffix and (ROOT / path).is_dir():
        return PurePosixPath(SOURCE, path, "files.md")
    return PurePosixPath(SOURCE, path)


def with_links(root: Path, path: PurePosixPath, text: str) -> tuple[str, list[PurePosixPath]]:
    """Return a page with its links in the site, and the paths in the tree that it links to. Raises
    BrokenLinkError.
    """
    linked: list[PurePosixPath] = []

    def change(match: re.Match[str]) -> str:
        target = match[2]
        if _ELSEWHERE.match(target):
            return match[0]
        name, hash_, anchor = target.partition("#")
        found = PurePosixPath(os.path.normpath(path.parent / name))
        if found.parts[:1] == ("..",) or not (root / found).exists():
            if path.parts[0] == DOCS:
                raise BrokenLinkError(f"{path}: it links to {target}, which is not there")
            return match[0]
        linked.append(found)
        there = os.path.relpath(place(found), place(path).parent)
        return f"{match[1]}{there}{hash_}{anchor}{match[3]}"

    return in_prose(text, lambda part: _LINK.sub(change, part)), linked


def _listing(root: Path, folder: PurePosixPath) -> str:
    """Return a page with the files of a folder, as a link to it shows on GitHub."""
    names = sorted(path.name for path in (root / folder).iterdir() if not path.name.startswith(("_", ".")))
    return "\n".join([f"# {folder}", "", *(f"- `{name}`" for name in names[:_LISTED]), ""])


class _Resources(HTMLParser):
    """Collects what a browser loads by itself for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        loads = given.get("src") if tag in ("script", "img", "iframe", "source", "video") else None
        if tag == "link" and (given.get("rel") or "") not in ("canonical", "next", "prev", "alternate"):
            loads = given.get("href")
        self.found += [loads] if loads else []


def loaded_from_elsewhere(html: Path) -> list[str]:
    """Return what pages have a browser load from other hosts, each with its page."""
    found = []
    for path in sorted(html.rglob("*.html")):
        parser = _Resources()
        parser.feed(path.read_text())
        found += [
            f"{path.relative_to(html)}: {each}" for each in parser.found if re.match(r"(\w+:)?//", each)
        ]
    return found
