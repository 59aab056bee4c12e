# SPDX-License-Identifier: Apache-2.0
"""Manifests of images: their content, their refusals, and the description of sparse files."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.base.errors import ConfigError, LocalError
from millpond.images.format import locate, manifest
from millpond.images.format.manifest import BLOCK, MAX_RANGE, SeedPlace

from .flash_support import MIB, make_image, raw, write


def plain(folder: Path) -> dict[str, Any]:
    make_image(folder)
    found: dict[str, Any] = json.loads((folder / "millpond-test.json").read_text())
    return found


def loads(content: object) -> manifest.Manifest:
    return manifest.loads(json.dumps(content), "m.json")


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    content = plain(tmp_path)
    content["files"] = [{"file": "kernel", "bytes": 7, "sha256": "0" * 64}]
    content["packages"] = [{"name": "systemd", "version": "252.1", "source": "debian"}]
    found = loads(content)
    assert manifest.loads(manifest.dumps(found), "again") == found
    assert found.packages[0].name == "systemd"
    assert json.loads(manifest.dumps(found)) == content


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "other"}, "name: this is no image"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"image.bytes": 8 * MIB + 512}, "image: bytes"),
        ({"image.bytes": 4096}, "image: bytes"),
        ({"image.bytes": 1 << 60}, "image: bytes"),
        ({"image.bytes": True}, "image: bytes: expected a whole number"),
        ({"image.file": "../x.img"}, "can not be a file's name"),
        ({"image.file": ".."}, "can not be a file's name"),
        ({"image.sha256": "x"}, "sha256"),
        ({"image.ranges": []}, "the first must be at 0"),
        ({"image.ranges.0.offset": 4096}, "the first must be at 0"),
        ({"image.ranges.1.offset": 100}, r"ranges\[1\]: offset and bytes"),
        ({"image.ranges.1.offset": 0}, r"ranges\[1\]: overlaps"),
        ({"image.ranges.1.offset": -4096}, r"ranges\[1\]: overlaps"),
        ({"image.ranges.1.bytes": 0}, r"ranges\[1\]: offset and bytes"),
        ({"image.ranges.1.bytes": MAX_RANGE + BLOCK}, r"ranges\[1\]: offset and bytes"),
        ({"image.ranges.1.sha256": "A" * 64}, r"ranges\[1\]: sha256"),
        ({"image.ranges.-1.bytes": 2 * MIB}, "or the image's end"),
        ({"image.ranges.0.extra": 1}, "unknown key 'extra'"),
        ({"seed.offset": 0}, "seed: not inside the image, behind its first MiB"),
        ({"seed.offset": 7 * MIB + BLOCK}, "seed: not inside the image"),
        ({"seed.offset": 3 * MIB}, "seed: the image has bytes of its own there"),
        ({"seed.bytes": 0}, "seed: offset and bytes"),
        ({"files": [{"file": "a/b", "bytes": 1, "sha256": "0" * 64}]}, r"files\[0\]: file"),
        ({"files": [{"file": "a", "bytes": -1, "sha256": "0" * 64}]}, r"files\[0\]: bytes"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    content: Any = plain(tmp_path)
    ((path, value),) = change.items()
    *way, last = path.split(".")
    inner: Any = content
    for key in way:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[last] = value
    with pytest.raises(ConfigError, match=complaint) as error:
        loads(content)
    assert "\n" not in str(error.value) and str(error.value).startswith("m.json: ")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null", '{"name": NaN}', "\ud800"])
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        manifest.loads(text, "m.json")


def test_nothing_is_written_that_would_not_be_read(tmp_path: Path) -> None:
    _, good = make_image(tmp_path)
    with pytest.raises(ConfigError):
        manifest.dumps(replace(good, seed=SeedPlace(0, 4096)))


def test_all_but_holes_is_used_even_zeros(tmp_path: Path) -> None:
    path, size = tmp_path / "x.img", 24 * MIB
    parts = raw(size) | {9 * MIB: bytes(8192), 10 * MIB + 100: b"x" * (6 * MIB)}
    write(path, parts, size)
    found = locate.describe(path)
    data = path.read_bytes()
    assert (found.bytes, found.sha256) == (size, hashlib.sha256(data).hexdigest())
    whole = bytearray(size)
    for used in found.ranges:
        part = data[used.offset : used.end]
        assert used.sha256 == hashlib.sha256(part).hexdigest()
        assert used.bytes <= MAX_RANGE and used.offset // MAX_RANGE == (used.end - 1) // MAX_RANGE
        whole[used.offset : used.end] = part
    assert bytes(whole) == data
    assert sum(used.bytes for used in found.ranges) < 10 * MIB
    assert any(used.offset <= 9 * MIB and used.end >= 9 * MIB + 8192 for used in found.ranges)


def test_a_file_that_is_no_image_is_not_described(tmp_path: Path) -> None:
    write(tmp_path / "odd", {0: b"x"}, 8 * MIB + 1)
    with pytest.raises(ConfigError, match="no multiple of 4096"):
        locate.describe(tmp_path / "odd")
    write(tmp_path / "empty", {}, 8 * MIB)
    with pytest.raises(ConfigError, match="the first must be at 0"):
        locate.describe(tmp_path / "empty")


def test_an_image_is_found_by_each_of_its_names(tmp_path: Path) -> None:
    image, made = make_image(tmp_path)
    for given in (image, image.with_suffix(".json"), tmp_path):
        assert locate.find(given) == (image, made)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    image, _ = make_image(tmp_path / "one")
    with pytest.raises(FileNotFoundError):
        locate.find(tmp_path / "none.img")
    with pytest.raises(LocalError, match="holds 0 manifests"):
        locate.find(tmp_path)
    with pytest.raises(LocalError, match="neither an image"):
        locate.find(tmp_path / "x.iso")
    os.truncate(image, 7 * MIB)
    with pytest.raises(LocalError, match="not as long as"):
        locate.find(image)
    image.rename(image.with_name("other.img"))
    with pytest.raises(LocalError, match="no such file"):
        locate.find(image.with_suffix(".json"))
    with pytest.raises(LocalError, match=r"other\.json: no such file"):
        locate.find(image.with_name("other.img"))
    image.with_suffix(".json").rename(image.with_name("other.json"))
    with pytest.raises(LocalError, match=r"is the manifest of millpond-test\.img"):
        locate.find(image.with_name("other.img"))
    image.with_name("other.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not JSON"):
        locate.find(image.with_name("other.json"))
