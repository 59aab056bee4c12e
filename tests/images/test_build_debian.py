# SPDX-License-Identifier: Apache-2.0
"""Debian's packages: only what the lock names, byte for byte, from a mirror that may be bad."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest

from millpond.base.errors import LocalError
from millpond.images.build import debian, download, python
from millpond.images.build.debian import DebianPackage

if TYPE_CHECKING:
    from _typeshed import SupportsRead, SupportsWrite

CONTENT = b"a package" * 1000
asked = download._apt_proxies.__wrapped__
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
    yield from serving(handler)


def serving(handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> Iterator[dict[str, str]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield {"main": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(download, "_apt_proxies", dict)


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


class _Failing(_Quiet):
    """A server that fails each address twice: by a reset, and by a proxy's hiccup."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.asked.count(self.path) == 1:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.rfile, self.wfile = io.BytesIO(), io.BytesIO()
        elif self.asked.count(self.path) == 2:
            self.send_error(http.HTTPStatus.BAD_GATEWAY)
        else:
            super().do_GET()


def test_what_fails_once_is_tried_again(tmp_path: Path) -> None:
    """One reset connection cost the whole archive, and with the snapshots away the build."""
    (tmp_path / "one.deb").write_bytes(CONTENT)
    with contextlib.contextmanager(serving)(functools.partial(_Failing, directory=str(tmp_path))) as mirror:
        (path,) = debian.fetch([package()], tmp_path / "cache", [mirror])
    assert path.read_bytes() == CONTENT


def test_two_builds_with_one_cache_get_the_locked_file(tmp_path: Path) -> None:
    """Before: both builds wrote one file at once."""
    both = threading.Barrier(2, timeout=30)

    class Slow(_Quiet):
        def copyfile(self, source: SupportsRead[bytes], outputfile: SupportsWrite[bytes]) -> None:
            outputfile.write(CONTENT[:4000])
            both.wait()  # the other one has begun, too
            outputfile.write(CONTENT[4000:])

    (tmp_path / "one.deb").write_bytes(CONTENT)
    with (
        contextlib.contextmanager(serving)(functools.partial(Slow, directory=str(tmp_path))) as mirror,
        ThreadPoolExecutor(2) as pool,
    ):
        builds = [pool.submit(debian.fetch, [package()], tmp_path / "cache", [mirror]) for _ in range(2)]
        paths = [path for build in builds for path in build.result(timeout=60)]
    assert [path.read_bytes() for path in paths] == [CONTENT] * 2
    assert list((tmp_path / "cache").iterdir()) == paths[:1]


def test_what_a_killed_build_has_left_is_removed(mirror: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    old, new = tmp_path / "cache/old.part", tmp_path / "cache/new.part"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    debian.fetch([package()], tmp_path / "cache", [mirror])
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("kind", ["mirror+file:", "mirror+http:", "mirror:"])
def test_a_list_of_mirrors_is_read_as_apt_does(mirror: dict[str, str], tmp_path: Path, kind: str) -> None:
    listed = tmp_path / "main/list"
    listed.write_text(f"# near\n{NOBODY}\tpriority:1\n\n{mirror['main']}/\n")
    place = str(listed) if "file" in kind else f"{mirror['main'].removeprefix('http:')}/list"
    (path,) = debian.fetch([package()], tmp_path / "cache", [{"main": kind + place}])
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("key", ["http::Proxy", "http::Proxy::mirror.invalid"])
def test_apts_own_proxy_is_taken(
    mirror: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    settings = {"http::Proxy": NOBODY} | {key: mirror["main"]}
    monkeypatch.setattr(download, "_apt_proxies", lambda: settings)
    seen = []

    class Proxy(_Quiet):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.path = "/one.deb"
            super().do_GET()

    with contextlib.contextmanager(serving)(
        functools.partial(Proxy, directory=str(tmp_path / "main"))
    ) as proxy:
        settings[key] = proxy["main"]
        debian.fetch([package()], tmp_path / "cache", [{"main": "http://mirror.invalid/debian"}])
        settings["http::Proxy::127.0.0.1"] = "DIRECT"
        debian.fetch([package(name="two")], tmp_path / "cache", [mirror])
    assert seen == ["http://mirror.invalid/debian/one.deb"]


def test_apts_settings_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("apt-config"):
        pytest.skip("there is no apt")
    (tmp_path / "apt.conf").write_text('Acquire::http::Proxy "http://proxy:3142"; Acquire::Retries "3";')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    assert asked()["http::Proxy"] == "http://proxy:3142"
