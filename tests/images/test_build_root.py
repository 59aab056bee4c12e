# SPDX-License-Identifier: Apache-2.0
"""The root and its serial: the builder's environment, umask and account change nothing of them."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images import boards
from millpond.images.build import __main__ as builder
from millpond.images.build import python, root
from millpond.images.build.context import Context

NEWEST = 1_700_000_000


def context(tmp_path: Path) -> Context:
    board = boards.read("qemu-virt")
    return Context(
        "qemu-virt", board, builder.SOURCE, tmp_path / "out", tmp_path / "cache", "1", 1, NEWEST, 3
    )


def git(*arguments: object) -> None:
    who = {f"GIT_{role}_{key}": "x" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    when = {f"GIT_{role}_DATE": f"{NEWEST} +0000" for role in ("AUTHOR", "COMMITTER")}
    subprocess.run(
        ["git", *map(str, arguments)], check=True, capture_output=True, env=os.environ | who | when
    )


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working tree with one commit."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    monkeypatch.setenv("HOME", str(tmp_path))
    git("init", "-q", tmp_path / "tree")
    git("-C", tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "x")
    return tmp_path / "tree"


def test_the_serial_is_the_time_of_the_newest_commit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builder._serial(tree) == NEWEST
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
    assert builder._serial(tree) == NEWEST


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a tree to another user")
def test_another_users_tree_has_a_serial(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git calls its ownership dubious: the serial was 0, and the image older than all others."""
    for path in (tree, *tree.rglob("*")):
        os.chown(path, 4242, 4242)
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert builder._serial(tree) == NEWEST


def test_a_tree_that_is_no_repository_has_no_serial_of_one_around_it(tree: Path) -> None:
    (tree / "unpacked").mkdir()
    with pytest.raises(
        LocalError, match=r"unpacked does not tell its newest commit .*name the image's --serial"
    ):
        builder._serial(tree / "unpacked")


@pytest.mark.skipif(
    shutil.which("mksquashfs") is None, reason="needs mksquashfs: sudo apt install squashfs-tools"
)
def test_a_packagers_clock_is_not_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mksquashfs takes one clock alone."""
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/x").write_text("x")
    made = [tmp_path / name for name in ("one", "two")]
    root.squash(context(tmp_path), made[0], tmp_path / "opt")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    root.squash(context(tmp_path), made[1], tmp_path / "opt")
    assert made[0].read_bytes() == made[1].read_bytes()


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_what_is_made_is_for_all_users_whatever_the_builders_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    """With 077 no worker could import millpond; with 002 the image was another one."""

    def wheel(*_argv: object, **_more: object) -> bytes:
        (tmp_path / "out/work/wheel").mkdir(parents=True)
        with zipfile.ZipFile(tmp_path / "out/work/wheel/millpond.whl", "w") as archive:
            archive.writestr("millpond/wire/__init__.py", "")
        return b""

    monkeypatch.setattr(root, "run", wheel)
    monkeypatch.setattr(python, "compile_all", lambda *_: None)
    before = os.umask(mask)
    try:
        last = root.make_millpond(context(tmp_path))
    finally:
        os.umask(before)
    modes = {path.relative_to(last): stat.S_IMODE(path.stat().st_mode) for path in last.rglob("*")}
    wanted = {path: 0o755 if (last / path).is_dir() or path.parent.name == "bin" else 0o644 for path in modes}
    assert modes == wanted and len(modes) == 8
