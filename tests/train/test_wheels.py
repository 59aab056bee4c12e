# SPDX-License-Identifier: Apache-2.0
"""Wheels of jobs: those that fit, unpacked once and whole, and nothing beside their folder."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import stat
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError, LocalError
from millpond.train.job.files import JobFile
from millpond.train.job.overlays import Overlays
from millpond.train.job.wheels import check_end, fitting

from ..job_files import described, packed

NAME = "tiny-1.0-py3-none-any.whl"
FILES: dict[str, str | bytes] = {
    "tiny/__init__.py": "size = 3\n",
    "tiny/deep/table.bin": b"\0\xff" * 1000,
    "single.py": "",
    "tiny-1.0.data/purelib/pure.py": "",
    "tiny-1.0.data/platlib/lib/native.so": b"\x7fELF",
    "tiny-1.0.data/scripts/tiny": "#!python",
    "tiny-1.0.data/headers/tiny.h": "",
    "tiny-1.0.data/data/etc/passwd": "",
    "tiny.pth": "import os; os._exit(1)",
    "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
}


class Installer:
    """An overlay folder, and contents of wheels beside it."""

    def __init__(self, base: Path, most: int | None = None) -> None:
        self.base, self.folder = base, base / "overlays"
        self.overlays = Overlays(self.folder, most)

    def install(self, wheels: dict[str, bytes], largest: int | None = None) -> Path:
        known = described(wheels)
        for name, data in wheels.items():
            if not (self.base / known[name].sha256).exists():
                (self.base / known[name].sha256).write_bytes(data)
        with self.overlays.held(known) as overlay:
            self.overlays.install(overlay, known, lambda file: self.base / file.sha256, largest)
        return overlay

    def refusal(self, data: bytes) -> str:
        with pytest.raises(ConfigError) as caught:
            self.install({NAME: data})
        assert list(self.folder.iterdir()) == []
        return str(caught.value)


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    return Installer(tmp_path)


def names_in(folder: Path) -> set[str]:
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {path.as_posix() for path in found if path.parent.name != "__pycache__"}


def test_the_best_of_each_distribution_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    machine = f"linux_{os.uname().machine}"
    own, pure = f"w/a_b-1-{python}-{python}-{machine}.whl", "w/a_b-1-py3-none-any.whl"
    elsewhere = "w/a_b-1-cp27-cp27m-win32.whl"
    assert fitting([elsewhere, pure, own]) == (own,)
    assert fitting([elsewhere, pure]) == (pure,)
    assert fitting([pure, NAME]) == (NAME, pure)
    assert fitting([]) == ()


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["a-1-cp27-cp27m-win32.whl", NAME], r"wheels: there is none of a for Python 3\.\d+ on \w+$"),
        (["lib/no wheel.whl"], "wheels: lib/no wheel.whl: this is no name of a wheel"),
        (["torch-9.0-py3-none-any.whl"], "wheels: torch-9.0-.*: workers have their own torch; leave it out"),
        (["NumPy-9.0-py3-none-any.whl"], "workers have their own numpy"),
        (["millpond-9.0-py3-none-any.whl"], "workers have their own millpond"),
    ],
)
def test_wheels_that_a_device_does_not_take(names: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        fitting(names)


def test_a_wheel_is_unpacked_without_what_it_would_put_elsewhere(installer: Installer) -> None:
    before = os.umask(0o077)
    try:
        overlay = installer.install({NAME: packed(FILES)})
    finally:
        os.umask(before)
    installed = {"tiny/__init__.py", "tiny/deep/table.bin", "single.py", "pure.py", "lib/native.so"}
    assert names_in(overlay) == installed | {"tiny-1.0.dist-info/METADATA"}
    assert (overlay / "tiny/deep/table.bin").read_bytes() == FILES["tiny/deep/table.bin"]
    assert stat.S_IMODE((overlay / "tiny/deep").stat().st_mode) == 0o755
    assert stat.S_IMODE((overlay / "tiny/__init__.py").stat().st_mode) == 0o444
    compiled = Path(importlib.util.cache_from_source(str(overlay / "tiny/__init__.py")))
    assert stat.S_IMODE(compiled.stat().st_mode) & 0o444 == 0o444
    assert [d.name for d in importlib.metadata.distributions(path=[str(overlay)])] == ["tiny"]


def test_a_set_is_installed_once(installer: Installer) -> None:
    wheels = {NAME: packed({"tiny.py": ""}), "more-1-py3-none-any.whl": packed({"more.py": ""})}
    overlay = installer.install(wheels)
    assert names_in(overlay) == {"tiny.py", "more.py"}
    number = overlay.stat().st_ino
    for path in installer.base.glob("*[0-9a-f]"):
        path.unlink(missing_ok=True) if path.is_file() else None  # their contents are needed no more
    with installer.overlays.held(described(wheels)) as same:
        installer.overlays.install(same, described(wheels), lambda _file: Path("/nowhere"))
    assert same == overlay and same.stat().st_ino == number
    assert installer.install({NAME: packed({"tiny.py": "2"})}) != overlay


def test_two_jobs_at_once_install_it_once(installer: Installer) -> None:
    found: list[Path] = []
    wheels = {NAME: packed({f"tiny/m{number}.py": "" for number in range(300)})}
    (installer.base / described(wheels)[NAME].sha256).write_bytes(wheels[NAME])
    threads = [threading.Thread(target=lambda: found.append(installer.install(wheels))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4 and len(set(found)) == 1 and len(names_in(found[0])) == 300


LINK = stat.S_IFLNK << 16


@pytest.mark.parametrize(
    ("files", "attributes", "error"),
    [
        ({"../out.py": ""}, {}, "'../out.py' is not a relative file name"),
        ({"/etc/out": ""}, {}, "'/etc/out' is not a relative file name"),
        ({"a/../../out": ""}, {}, "is not a relative file name"),
        ({"a/./b.py": ""}, {}, "is not a relative file name"),
        ({"tiny-1.data/purelib/../../out": ""}, {}, "is not a relative file name"),
        ({"link": "/etc/passwd"}, {"external_attr": LINK}, "'link' is not a regular file"),
        ({"pipe": ""}, {"external_attr": stat.S_IFIFO << 16}, "'pipe' is not a regular file"),
        ({"a.py": "x"}, {"compress_type": zipfile.ZIP_LZMA}, "'a.py' is packed as in no wheel"),
        ({"torch/__init__.py": ""}, {}, "it would replace 'torch'"),
        ({"numpy.py": ""}, {}, "it would replace 'numpy'"),
        ({"json.cpython-311.so": ""}, {}, "it would replace 'json'"),
        ({"tiny-1.data/purelib/millpond/x.py": ""}, {}, "it would replace 'millpond'"),
        ({"x.py": "", "tiny-1.data/purelib/x.py": ""}, {}, "'x.py' is in it twice"),
        ({"x": "", "x/y.py": ""}, {}, "damaged: "),
    ],
)
def test_a_wheel_stays_in_its_folder(
    installer: Installer, files: dict[str, str | bytes], attributes: dict[str, int], error: str
) -> None:
    assert error in installer.refusal(packed(files, **attributes))
    assert not (installer.base / "out.py").exists() and not (installer.base.parent / "out").exists()


def damaged(data: bytes) -> bytes:
    """Other bytes in the middle of the first file."""
    return data[:50] + bytes(byte ^ 0xFF for byte in data[50:60]) + data[60:]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\5\6",
        b"x" * 100,
        packed(FILES)[:-1],
        packed(FILES) + b"comment",
        damaged(packed({"a.bin": os.urandom(1000)})),
        packed(FILES)[:-22] + b"PK\5\6" + b"\xff" * 16 + b"\0\0",
    ],
)
def test_what_is_no_wheel_is_named(installer: Installer, data: bytes) -> None:
    assert installer.refusal(data).startswith(f"wheels: {NAME}: ")


def test_an_archive_with_a_huge_directory_is_not_read() -> None:
    end = packed({})
    check_end(end, "wheel")
    for huge in (end[:12] + b"\1\0\0\1" + end[16:], b"PK\6\7" + bytes(16) + end):
        with pytest.raises(ConfigError, match="wheel: this is no wheel"):
            check_end(huge, "wheel")


def test_a_wheel_that_is_large_when_unpacked_is_refused_before_it_is(installer: Installer) -> None:
    bomb = packed({"a.py": "#" * 10_000_000})
    with pytest.raises(ConfigError, match=r"10000000 bytes unpacked; policy\.largest_files allows 1000"):
        installer.install({NAME: bomb}, 1000)
    assert len(bomb) < 20_000 and list(installer.folder.iterdir()) == []


def of_size(number: int, size: int = 1000) -> dict[str, bytes]:
    return {NAME: packed({f"m{number}.bin": bytes(size)})}


def test_the_least_recently_used_that_no_job_holds_goes_first(tmp_path: Path) -> None:
    installer = Installer(tmp_path, 3000)
    first, second, third = (installer.install(of_size(number)) for number in range(3))
    os.utime(second, (1, 1))
    with installer.overlays.held(described(of_size(0))):
        assert installer.install(of_size(3)).exists() and not second.exists()
        installer.install(of_size(4, 2000))
        assert first.exists() and not third.exists()
        with pytest.raises(LocalError, match="no room for 2001 bytes of unpacked wheels"):
            installer.install(of_size(5, 2001))
        assert first.exists()
    installer.install(of_size(5, 2001))
    assert not first.exists()


def test_the_last_in_use_are_kept_when_the_clock_is_set_back(tmp_path: Path) -> None:
    installer = Installer(tmp_path, 2000)
    first = installer.install(of_size(0))
    os.utime(first, (1 << 33, 1 << 33))
    second = installer.install(of_size(1))
    installer.install(of_size(2))
    assert second.exists() and not first.exists()


def test_what_a_dead_process_left_unfinished_goes(tmp_path: Path) -> None:
    overlay = Installer(tmp_path).install(of_size(1))
    (tmp_path / "overlays/.new-half/deep").mkdir(parents=True)
    Installer(tmp_path)
    assert list((tmp_path / "overlays").iterdir()) == [overlay]


def test_contents_that_have_gone_are_told(installer: Installer) -> None:
    known: dict[str, JobFile] = described(of_size(1))
    told = pytest.raises(LocalError, match="wheels cannot be unpacked: No such file or directory")
    with installer.overlays.held(known) as overlay, told:
        installer.overlays.install(overlay, known, lambda _file: Path("/nowhere"))
    assert list(installer.folder.iterdir()) == []
