# SPDX-License-Identifier: Apache-2.0
"""The pages of the site, and their links."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import site
from documents.site import BrokenLinkError


def _tree(root: Path, **pages: str) -> Path:
    (root / "docs" / "tutorial").mkdir(parents=True)
    (root / "README.md").write_text("# x\n[tutorial](docs/tutorial/demo.md)\n")
    (root / "examples").mkdir()
    (root / "examples" / "a.py").write_text("pass\n")
    for name, text in pages.items():
        (root / "docs" / f"{name}.md").write_text(text)
    return root


def test_links_lead_to_the_same_files_in_the_site(tmp_path: Path) -> None:
    root = _tree(
        tmp_path / "tree", index="[readme](../README.md#x) [code](../examples/a.py) [w](http://a.b)\n"
    )
    (root / "docs" / "tutorial" / "demo.md").write_text("[home](../index.md)\n")
    site.lay_out(root, tmp_path / "site")
    text = (tmp_path / "site" / "index.md").read_text()
    assert text == "[readme](source/README.md#x) [code](source/examples/a.py) [w](http://a.b)\n"
    assert "(../tutorial/demo.md)" in (tmp_path / "site" / "source" / "README.md").read_text()
    assert (tmp_path / "site" / "source" / "examples" / "a.py").exists()


@pytest.mark.parametrize("target", ["../GONE.md", "../../outside.md"])
def test_a_link_to_what_is_not_there_is_an_error(tmp_path: Path, target: str) -> None:
    root = _tree(tmp_path / "tree", index=f"[it]({target})\n")
    (tmp_path / "outside.md").write_text("")
    with pytest.raises(BrokenLinkError, match=r"docs/index\.md: it links to"):
        site.lay_out(root, tmp_path / "site")


def test_what_a_browser_would_load_from_elsewhere_is_told(tmp_path: Path) -> None:
    page = '<link rel="stylesheet" href="{}"><script src="own.js"></script><a href="https://x.y">y</a>'
    (tmp_path / "good.html").write_text(page.format("style.css"))
    (tmp_path / "bad.html").write_text(page.format("https://fonts.example/css"))
    assert site.loaded_from_elsewhere(tmp_path) == ["bad.html: https://fonts.example/css"]
