# SPDX-License-Identifier: Apache-2.0
"""Contents of files by digest, whole or not there; the manifest of a folder of test data."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError, LocalError
from millpond.base.schema import dump
from millpond.train.job import file_cache, folder
from millpond.train.job.file_cache import DamagedFile, FileCache
from millpond.train.job.files import MOST_FILES, JobFile, check_job_files, total_size
from millpond.train.job.folder import FolderManifest, manifest_of, read

from ..job_files import described, written


def content(number: int, size: int = 1000) -> bytes:
    return bytes([number]) * size


def file(number: int, size: int = 1000) -> JobFile:
    return described({"": content(number, size)})[""]


def add(cache: FileCache, *numbers: int) -> None:
    for number in numbers:
        with cache.held([file(number)]):
            cache.add(file(number), [content(number)])
        os.utime(cache.path(file(number)), (number, number))


def test_the_last_in_use_are_kept_when_the_clock_is_set_back(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files", 3000)
    add(cache, 1, 2)
    for number in (1, 2):  # in use before, by a clock that was ahead
        os.utime(cache.path(file(number)), ((1 << 33) + number,) * 2)
    with cache.held([file(3)]):
        cache.add(file(3), [content(3)])
    with cache.held([file(1)]):
        pass
    with cache.held([file(4)]):
        cache.add(file(4), [content(4)])
    assert present(cache, 1, 2, 3, 4) == [1, 3, 4]


def expect_no_room(cache: FileCache, file: JobFile, text: str) -> None:
    with pytest.raises(LocalError, match=text), cache.held([file]):
        raise AssertionError


def present(cache: FileCache, *numbers: int) -> list[int]:
    return [number for number in numbers if cache.has(file(number))]


def test_contents_are_kept_under_their_digest(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    assert not cache.has(file(1))
    cache.add(file(1), [content(1, 600), memoryview(content(1, 400))])
    assert cache.has(file(1)) and cache.path(file(1)).read_bytes() == content(1)
    assert cache.path(file(1)).stat().st_mode & 0o777 == 0o444
    assert [path.name for path in (tmp_path / "files").iterdir()] == [file(1).sha256]


def rot(path: Path, *, told: bool) -> None:
    """Change one bit of a file, with or without a trace in its times."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[500] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    if not told:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.expected_log("is damaged, and removed")
@pytest.mark.parametrize("found", ["by its time", "later", "by another process"])
def test_contents_that_lost_a_bit_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    cache = FileCache(tmp_path / "files")
    add(cache, 1, 2)
    cache.check({"a": file(1), "b": file(2)})
    rot(cache.path(file(1)), told=found == "by its time")
    if found == "later":
        assert cache.has(file(1))  # nothing shows the change, and it was read just now
        monkeypatch.setattr(file_cache, "READ_AGAIN_SECONDS", 0.0)
    if found == "by another process":
        cache = FileCache(tmp_path / "files")
    with pytest.raises(LocalError, match=r"^the stored contents of 'a' are damaged or gone: submit the job"):
        cache.check({"a": file(1), "b": file(2)})
    assert present(cache, 1, 2) == [2]
    assert [path.name for path in (tmp_path / "files").iterdir()] == [file(2).sha256]
    add(cache, 1)
    assert present(cache, 1, 2) == [1, 2]


def test_what_was_read_lately_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, read = FileCache(tmp_path / "files"), list[str]()
    add(cache, 1)
    os.utime(cache.path(file(1)), (2, 2))  # somebody may have written to it
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: read.append("once") or digest(*given))
    for _ in range(3):
        with cache.held([file(1)]):
            assert cache.has(file(1))
    assert read == ["once"]


def test_contents_that_are_cut_off_are_not_there(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    add(cache, 1)
    cache.path(file(1)).chmod(0o600)
    cache.path(file(1)).write_bytes(b"cut off")
    assert not cache.has(file(1))


@pytest.mark.parametrize("said", [content(2), content(1, 999), content(1, 1001), b""])
def test_other_contents_than_the_announced_are_not_kept(tmp_path: Path, said: bytes) -> None:
    cache = FileCache(tmp_path / "files")
    with pytest.raises(DamagedFile, match="another SHA-256"):
        cache.add(file(1), [said])
    assert list((tmp_path / "files").iterdir()) == []


def test_a_full_disk_takes_all_parts_and_leaves_nothing(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    (tmp_path / "files").rmdir()
    parts = iter([content(1, 500), content(1, 500)])
    with pytest.raises(LocalError, match="a file cannot be stored: No such file or directory"):
        cache.add(file(1), parts)
    assert list(parts) == []


def test_what_a_dead_process_left_unfinished_goes(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    add(cache, 1)
    (tmp_path / ".new-1").write_bytes(b"half")
    FileCache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file(1).sha256]


def test_the_least_recently_used_that_nobody_holds_go_first(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 3000)
    add(cache, 1, 2, 3)
    with cache.held([file(1)]):  # which is so the most recently used
        add(cache, 4)
        assert present(cache, 1, 2, 3, 4) == [1, 3, 4]
        with cache.held([file(4), file(5)]):
            assert present(cache, 1, 3, 4, 5) == [1, 4]
            expect_no_room(cache, file(6), "room for 1000 more bytes of files; 2000 are needed")
        assert present(cache, 1, 4) == [1, 4]
        with cache.held([file(6)]):  # the room for 5 is given back
            pass
    expect_no_room(cache, file(7, 3001), "room for 3000 more bytes of files; 3001 are needed")


def test_more_than_the_disk_has_is_refused_before_it_comes(tmp_path: Path) -> None:
    for most in (None, 1 << 62):
        cache, text = FileCache(tmp_path, most), r"room for \d+ more bytes of files; 1152921504606846976 are"
        expect_no_room(cache, JobFile("0" * 64, 1 << 60), text)


def test_all_but_the_kept_go(tmp_path: Path) -> None:
    cache = FileCache(tmp_path)
    add(cache, 1, 2, 3)
    cache.keep([file(2).sha256])
    assert present(cache, 1, 2, 3) == [2]


def test_files_are_laid_out_under_their_names(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "files")
    add(cache, 1, 2)
    files = {"a.py": file(1), "deep/er/b.bin": file(2), "deep/er/c.bin": file(1)}
    cache.link(files, tmp_path / "code")
    found = {name: (tmp_path / "code" / name).read_bytes() for name in files}
    assert found == {"a.py": content(1), "deep/er/b.bin": content(2), "deep/er/c.bin": content(1)}
    assert (tmp_path / "code/deep/er").stat().st_mode & 0o777 == 0o755
    with pytest.raises(LocalError, match="files cannot be laid out: No such file"):
        cache.link({"gone": file(9)}, tmp_path / "other")


FILE = JobFile("0" * 64, 1)


@pytest.mark.parametrize(
    "name", ["/etc/x", "../x", "a/../x", "", ".", "a//b", "./a", "a\0", "a\nb", "a" * 256]
)
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a relative file name"):
        check_job_files({name: FILE}, "job")


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"a": JobFile("../../etc/passwd", 1)}, "a: '../../etc/passwd' and 1 bytes are no file"),
        ({"a": JobFile("0" * 64 + "\n", 1)}, "are no file"),
        ({"a": JobFile("0" * 64, -1)}, "-1 bytes are no file"),
        ({"a": FILE, "b": JobFile("0" * 64, 2)}, "b: its contents are of two sizes"),
        ({"a": FILE, "a/b": FILE}, "'a' is a file and a folder"),
        ({str(number): FILE for number in range(MOST_FILES + 1)}, "4097 files are too many"),
        ({f"{number:0250}": FILE for number in range(MOST_FILES)}, "4096 files are too many"),
    ],
)
def test_files_that_are_none_are_refused(files: dict[str, JobFile], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^job: .*{error}|^job: {error}"):
        check_job_files(files, "job")


def test_contents_count_once() -> None:
    files = {"a": file(1), "b": file(1), "c": file(2)}
    check_job_files(files, "job")
    assert total_size(files) == 2000
    assert file(1).sha256 == hashlib.sha256(content(1)).hexdigest()


FILES: dict[str, str | bytes] = {"one/a.png": "a", "one/b c.png": b"\x00" * 100, "labels": ""}
EMPTY = JobFile("0" * 64, 0)


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
        FolderManifest({"../x": EMPTY}),
        FolderManifest({"/x": EMPTY}),
        FolderManifest({"x": JobFile("../../etc/passwd", 1)}),
        FolderManifest({"x": JobFile("0" * 64, -1)}),
        FolderManifest({"x": EMPTY, "x/y": EMPTY}),
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
