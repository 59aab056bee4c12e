# SPDX-License-Identifier: Apache-2.0
"""The house rules hold in product code; on small trees that are made up, each rule finds its violations."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import rules

ROOT = Path(__file__).parents[2]
EXCEPTIONS: dict[str, str] = {}
"""Public class names that several modules may define, at most ten, and why."""
DOCSTRINGS_WITHOUT_A_SUBJECT = 10


def tree(root: Path, **texts: str) -> Path:
    """Write modules of the package ``millpond.base`` in the source root ``tunnel``."""
    package = root / "tunnel/millpond/base"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", **texts}.items():
        (package / f"{name}.py").write_text(text)
    return root


def expect_none(violations: list[str]) -> None:
    """Fail with all of them; pytest would cut them short."""
    if violations:
        pytest.fail("\n".join(sorted(violations)), pytrace=False)


def test_pure_modules_import_no_edge() -> None:
    expect_none(rules.impure_imports(ROOT))


def test_a_public_class_name_is_defined_once() -> None:
    expect_none(rules.double_names(ROOT, EXCEPTIONS))
    assert len(EXCEPTIONS) <= 10 and all(EXCEPTIONS.values())


def test_docstrings_can_be_read_alone() -> None:
    found = rules.docstrings_without_a_subject(ROOT)
    expect_none(found if len(found) > DOCSTRINGS_WITHOUT_A_SUBJECT else [])


def test_public_methods_are_documented_or_implement_one_that_is() -> None:
    expect_none(rules.undocumented_methods(ROOT))


def test_folders_are_not_crowded() -> None:
    expect_none(rules.crowded_folders(ROOT))


def test_modules_and_functions_are_short() -> None:
    expect_none(rules.long_code(ROOT))


def test_every_module_has_a_kind() -> None:
    expect_none(rules.without_a_kind(ROOT))


def test_product_code_is_found() -> None:
    """Where nothing is found nothing is violated."""
    found = rules.modules(ROOT)
    assert {module.place.parts[0] for module in found} == {"agent", "fs", "host", "images", "tunnel"}
    assert {module.kind for module in found} >= {"Pure", "Edge", "Entry"}


@pytest.mark.parametrize(
    "line",
    [
        "from millpond.base import clock",
        "from millpond.base.clock import now",
        "import millpond.base.clock as time",
        "from . import clock",
        "from .clock import now",
        "from ..base.clock import now",
        "def late():\n    from .clock import now",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from .clock import now",
    ],
)
def test_an_import_of_an_edge_is_found(tmp_path: Path, line: str) -> None:
    root = tree(tmp_path, clock='"""Edge: time."""\nnow = 1\n', plan=f'"""Pure: a plan."""\n{line}\n')
    expected = "tunnel/millpond/base/plan.py: is pure and imports millpond.base.clock, which is Edge"
    assert rules.impure_imports(root) == [expected]


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("Pure", "if TYPE_CHECKING:\n    from .clock import now"),
        ("Pure", "if typing.TYPE_CHECKING:\n    from .clock import now"),
        ("Pure", "from .sums import add"),
        ("Pure", "from os import clock"),
        ("Edge", "from .clock import now"),
    ],
)
def test_other_imports_are_allowed(tmp_path: Path, kind: str, line: str) -> None:
    texts = {"clock": '"""Edge: time."""\n', "sums": '"""Pure (exact): sums."""\n'}
    assert rules.impure_imports(tree(tmp_path, **texts, plan=f'"""{kind}: a plan."""\n{line}\n')) == []


def test_double_names_are_found_unless_excepted(tmp_path: Path) -> None:
    texts = {
        "one": "class Plan: ...\nclass _Own: ...\nclass Single: ...\n",
        "two": "class Plan: ...\nclass _Own: ...\n",
    }
    root = tree(tmp_path, **texts)
    places = "tunnel/millpond/base/one.py, tunnel/millpond/base/two.py"
    assert rules.double_names(root, {}) == [f"Plan: is defined in {places}"]
    assert rules.double_names(root, {"Plan": "two plans"}) == []
    assert rules.double_names(root, {"Plan": "two plans", "Single": ""}) == [
        "Single: no longer needs its exception"
    ]


def test_docstrings_without_a_subject_are_found(tmp_path: Path) -> None:
    text = '''
class Plan:
    """Who computes what."""
    def made(self):
        """It is there."""
    async def asked(self):
        """Whatever is asked for."""
def item():
    """Items."""
'''
    place = "tunnel/millpond/base/plan.py"
    assert rules.docstrings_without_a_subject(tree(tmp_path, plan=text)) == [
        f"{place}:2: Plan: Who computes what.",
        f"{place}:4: made: It is there.",
    ]


def test_undocumented_methods_are_found(tmp_path: Path) -> None:
    text = '''
class Rule(Protocol):
    def applies(self):
        """Return whether it applies."""
class Never:
    def applies(self): ...
    def other(self): ...
    def _own(self): ...
'''
    found = rules.undocumented_methods(tree(tmp_path, plan=text))
    assert found == ["tunnel/millpond/base/plan.py:7: Never.other"]


def test_crowded_folders_are_found(tmp_path: Path) -> None:
    names = {f"m{number}": "" for number in range(16)}
    assert rules.crowded_folders(tree(tmp_path / "full", **names)) == []
    assert rules.crowded_folders(tree(tmp_path / "crowded", **names, one_more="")) == [
        "tunnel/millpond/base: 17 modules"
    ]


def test_long_modules_and_functions_are_found(tmp_path: Path) -> None:
    longest = "async def f():\n" + "    pass\n" * 59 + "\n" * 440
    too_long = "class C:\n def f():\n" + "  pass\n" * 60
    root = tree(tmp_path, longest=longest, module=longest + "\n", method=too_long)
    assert rules.long_code(root) == [
        "tunnel/millpond/base/method.py:2: f: 61 lines",
        "tunnel/millpond/base/module.py: 501 lines",
    ]


def test_modules_without_a_kind_are_found(tmp_path: Path) -> None:
    texts = {
        "pure": '"""Pure: sums."""',
        "edge": '"""Edge (Linux): a file."""',
        "entry": '"""Entry: a daemon."""',
    }
    others = {"none": "", "other": '"""Purely sums."""'}
    assert rules.without_a_kind(tree(tmp_path, **texts, **others)) == [
        "tunnel/millpond/base/none.py: is it Pure, Edge or Entry?",
        "tunnel/millpond/base/other.py: is it Pure, Edge or Entry?",
    ]
