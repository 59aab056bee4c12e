# SPDX-License-Identifier: Apache-2.0
"""Debian's packages: only what the lock names, byte for byte, from a mirror that may be bad."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.build import debian, python
from millpond.images.build.debian import DebianPackage

CONTENT = b"a package" * 1000
NOBODY = "http://127.0.0.1:9"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A mirror on the loopback interface, which serves what lies in ``tmp_path/main``."""
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "one.deb").write_bytes(CONTENT)
    handler = functools.partial(_Quiet, directory=str(tmp_path / "main"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield {"main": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def package(**other: object) -> DebianPackage:
    fields: dict[str, object] = {
        "name": "one",
        "version": "1.0-1",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size": len(CONTENT),
        "archive": "main",
        "path": "one.deb",
    }
    return DebianPackage(**{**fields, **other})  # type: ignore[arg-type]


def test_the_lock_names_every_package_once_with_its_digest() -> None:
    packages = debian.locked()
    assert len(packages) > 50
    assert len({one.name for one in packages}) == len(packages)
    assert {one.archive for one in packages} <= {"main", "security"}
    assert all(one.size > 0 and one.path.startswith("pool/") and ".." not in one.path for one in packages)
    assert any(one.name.startswith("linux-image-") for one in packages)
    assert debian.epoch() > 1_700_000_000


def test_the_python_lock_has_a_digest_for_every_package() -> None:
    text = python.LOCK.read_text()
    assert {"torch", "numpy", "msgpack", "safetensors"} <= {name for name, _ in python.locked()}
    requirements = [part for part in text.split("\n") if part and not part.startswith((" ", "#"))]
    assert len(requirements) == len(python.locked()) == text.count("==")
    assert text.count("--hash=sha256:") >= len(requirements)


@pytest.mark.parametrize(
    "line", ["", "bash 5.2", f"bash 5.2 {'g' * 64} 12 main p", f"bash 5.2 {'0' * 64} many main p"]
)
def test_a_damaged_line_of_the_lock_is_named(line: str) -> None:
    with pytest.raises(LocalError, match=r"debian\.lock, line 7: .*make image-lock"):
        debian.parsed(line, "debian.lock, line 7")


def test_a_package_is_fetched_once(mirror: dict[str, str], tmp_path: Path) -> None:
    (path,) = debian.fetch([package()], tmp_path / "cache", [mirror])
    assert path.read_bytes() == CONTENT
    (tmp_path / "main" / "one.deb").unlink()
    assert debian.fetch([package()], tmp_path / "cache", [mirror]) == [path]


def test_a_package_that_was_damaged_in_the_cache_is_fetched_again(
    mirror: dict[str, str], tmp_path: Path
) -> None:
    (path,) = debian.fetch([package()], tmp_path / "cache", [mirror])
    path.write_bytes(CONTENT[:-1] + b"x")
    debian.fetch([package()], tmp_path / "cache", [mirror])
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("served", [CONTENT[:-1] + b"x", CONTENT[:-1], CONTENT + b"x", CONTENT * 100, b""])
def test_another_file_than_the_locked_is_refused(
    mirror: dict[str, str], tmp_path: Path, served: bytes
) -> None:
    (tmp_path / "main" / "one.deb").write_bytes(served)
    with pytest.raises(LocalError, match=r"get one 1\.0-1 \(.*: not the file that is locked\): .*image-lock"):
        debian.fetch([package()], tmp_path / "cache", [mirror])
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_digest_of_another_size_is_refused(mirror: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="not the file that is locked"):
        debian.fetch([package(size=len(CONTENT) + 1)], tmp_path / "cache", [mirror])


def test_a_package_that_the_mirror_has_not_is_told(mirror: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"get one 1\.0-1 \(.*: File not found\): 'make image-lock"):
        debian.fetch([package(path="other.deb")], tmp_path / "cache", [mirror])


def test_a_mirror_that_does_not_answer_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot get one"):
        debian.fetch([package()], tmp_path / "cache", [{"main": NOBODY}])


def test_what_the_mirror_has_deleted_is_in_the_snapshots(mirror: dict[str, str], tmp_path: Path) -> None:
    """A mirror has the newest versions alone: weeks after a lock was made no image could be built of it."""
    old = {"main": mirror["main"] + "/20261122T044428Z"}
    (tmp_path / "main/20261122T044428Z").mkdir()
    (tmp_path / "main/one.deb").rename(tmp_path / "main/20261122T044428Z/one.deb")
    (path,) = debian.fetch([package()], tmp_path / "cache", [mirror, old])
    assert path.read_bytes() == CONTENT


def test_all_packages_that_are_gone_are_named_at_once(mirror: dict[str, str], tmp_path: Path) -> None:
    packages = [package(path="gone.deb"), package(), package(name="two", path="two.deb")]
    with pytest.raises(
        LocalError, match=r"cannot get one 1\.0-1, two 1\.0-1 \(.*'make image-lock'"
    ) as caught:
        debian.fetch(packages, tmp_path / "cache", [mirror, {"main": NOBODY}])
    assert "127.0.0.1:9: " in str(caught.value) and "\n" not in str(caught.value)


def test_an_archive_that_does_not_answer_is_asked_once(mirror: dict[str, str], tmp_path: Path) -> None:
    dead = {"main": NOBODY}
    left, reasons = debian._get(package(path="gone.deb"), tmp_path / "x.deb", [dead, mirror])
    assert left == [mirror] and len(reasons) == 2
    assert debian._get(package(), tmp_path / "x.deb", [dead, mirror]) == ([mirror], [])


def test_snapshots_are_of_the_time_of_the_lock() -> None:
    found = debian.snapshots(1_795_330_268)
    assert found["main"] == "https://snapshot.debian.org/archive/debian/20261122T065108Z"
    assert found["security"].endswith("/debian-security/20261122T065108Z")
