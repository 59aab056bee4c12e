# SPDX-License-Identifier: Apache-2.0
"""The manifest of a folder of test data: the same for the same contents, and no way out of the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError
from millpond.base.schema import dump
from millpond.train.job import folder
from millpond.train.job.files import JobFile
from millpond.train.job.folder import FolderManifest, manifest_of, read

from ..job_files import described, written

FILES: dict[str, str | bytes] = {"one/a.png": "a", "one/b c.png": b"\x00" * 100, "labels": ""}
FILE = JobFile("0" * 64, 0)


def test_the_same_contents_have_the_same_manifest(tmp_path: Path) -> None:
    first, second = (written(FILES, tmp_path / name) for name in ("first", "second"))
    for path in (first, second):
        (path / "empty").mkdir()
    os.utime(second / "labels", (1, 1))
    found = manifest_of(first, "here")
    assert found == FolderManifest(described(FILES), ("empty",))
    assert manifest_of(second, "here").data == found.data
    assert read(found.data, "here") == found
    (second / "labels").write_text("1")
    assert manifest_of(second, "here").data != found.data


def test_links_are_followed_and_not_without_end(tmp_path: Path) -> None:
    elsewhere = written({"far": "away"}, tmp_path / "elsewhere")
    path = written(FILES, tmp_path / "folder")
    (path / "one" / "round").symlink_to(path)
    (path / "linked").symlink_to(elsewhere)
    (path / "broken").symlink_to("nowhere")
    os.mkfifo(path / "pipe")
    assert manifest_of(path, "here") == FolderManifest(described({**FILES, "linked/far": "away"}))


def test_a_name_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "folder").mkdir()
    (path / os.fsdecode(b"caf\xe9")).touch()
    with pytest.raises(ConfigError, match=r"^here: 'caf\\xe9' is not UTF-8: rename it$"):
        manifest_of(path, "here")


def test_a_name_that_no_manifest_has_is_named(tmp_path: Path) -> None:
    path = written({"a\nb": ""}, tmp_path / "folder")
    with pytest.raises(ConfigError, match=r"^here: 'a\nb' is not a relative file name$"):
        manifest_of(path, "here")


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MOST_FOLDER_FILES", 2)
    with pytest.raises(ConfigError, match="here: more than 2 files"):
        manifest_of(written(FILES, tmp_path / "folder"), "here")
    with pytest.raises(ConfigError, match="here: more than 2 files"):
        read(FolderManifest(described(FILES)).data, "here")


@pytest.mark.parametrize(
    "manifest",
    [
        FolderManifest({"../x": FILE}),
        FolderManifest({"/x": FILE}),
        FolderManifest({"x": JobFile("../../etc/passwd", 1)}),
        FolderManifest({"x": JobFile("0" * 64, -1)}),
        FolderManifest({"x": FILE, "x/y": FILE}),
        FolderManifest({}, ("../x",)),
        FolderManifest({}, ("",)),
    ],
)
def test_a_manifest_that_leads_out_of_its_folder_is_refused(manifest: FolderManifest) -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        read(json.dumps(dump(manifest)).encode(), "here")


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[", b"[" * 100_000, b"1", b"[]", b'{"files": 1}', b'{"a": {}}']
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^here"):
        read(data, "here")
