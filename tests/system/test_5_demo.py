"""The demo: it shows what it says, and leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.numpy import load_file

from .support import MILLPOND, descendants, eventually, interfaces, mounts_below, running

pytestmark = pytest.mark.timeout(240)


class Demo:
    """A demo in a session of its own, and all processes that were ever seen below it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        argv = [*MILLPOND, "demo", "--in", str(directory)]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._seen: set[psutil.Process] = set()

    def watch(self, seconds: float) -> None:
        """Let it run, and note its processes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            self._seen.update(descendants(self.process.pid))
            time.sleep(0.05)

    def finish(self, seconds: float) -> tuple[int, str, str]:
        """Exit code and output; its processes may not outlive it by more than ``seconds``."""
        out, err = self.process.communicate(timeout=seconds)
        code = self.process.returncode
        return (128 - code if code < 0 else code), out.decode(), err.decode()

    def left(self) -> list[psutil.Process]:
        """What still lives of it, also what was never seen while it ran."""
        return running({*self._seen, *_of(self.directory)})

    def kill(self) -> None:
        """Whatever a test has come to."""
        for process in self.left():
            process.kill()
        self.process.kill()
        self.process.communicate()


def _of(directory: Path) -> set[psutil.Process]:
    """Processes that have the directory in their command line or environment, or keep a file in it open."""
    found = set()
    for process in psutil.process_iter():
        try:
            about = [*process.cmdline(), *process.environ().values(), *_open_files(process.pid)]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(directory) in item for item in about):
            found.add(process)
    return found


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(str(link.readlink()))
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where a demo may be; in the end nothing of it may be left on the machine."""
    before = interfaces()
    yield tmp_path / "demo"
    assert not mounts_below(tmp_path)
    assert interfaces() <= before


@pytest.mark.parametrize("seconds", [0.7, 3.0, 7.0, 12.0])
def test_ctrl_c_leaves_nothing(place: Path, seconds: float) -> None:
    demo = Demo(place)
    try:
        demo.watch(seconds)
        if demo.process.poll() is not None:
            pytest.skip("the demo was over before")
        begun = place.exists()  # before that, Python itself is still loading the command
        os.killpg(demo.process.pid, signal.SIGINT)
        code, _, errors = demo.finish(15)
        assert code == 130, errors
        assert not (begun and "Traceback" in errors), errors
        assert not demo.left()
    finally:
        demo.kill()


def test_a_killed_demo_is_gone_and_the_next_one_works(place: Path) -> None:
    first = Demo(place)
    try:
        eventually(lambda: (place / "fleet" / "fleet.db").exists(), "the first daemon")
        first.watch(3)
        first.process.kill()
        eventually(lambda: not first.left(), "the end of what the demo started", 3)
    finally:
        first.kill()
    second = Demo(place)
    try:
        code, out, errors = second.finish(150)
        assert code == 0, errors
        assert not second.left()
    finally:
        second.kill()
    _check_report(place, out)


def _check_report(place: Path, out: str) -> None:
    report: dict[str, Any] = json.loads((place / "report.json").read_text())
    assert report["accuracy"] >= 0.95
    assert report["rounds"] == len(report["history"]) > 0
    assert report["seconds"] > report["training_seconds"] > 0
    assert report["devices"] == ["csd0", "csd1", "csd2"]
    assert report["private_bytes_kept"] > 0
    assert all(report["tunnel_bytes"][kind] > 0 for kind in ("parameters", "metrics", "control", "volume"))
    crossed = sum(interface["from"] for interface in report["tunnel_interfaces"].values())
    assert crossed >= sum(report["tunnel_bytes"].values())
    assert report["private_bytes_leaked"] == 0
    assert report["privacy"]["canaries_seen"] == {"text": 0, "image": 0, "image-float32": 0}
    assert report["privacy"]["control_found"] >= 1
    assert "csd0" in report["ssh"]["command"]["stdout"]
    assert report["ssh"]["private"]["exit_code"] != 0
    assert [volume["device"] for volume in report["volumes"]] == report["devices"]
    for volume in report["volumes"]:
        assert volume["private_exists"] is False
        assert "public/digits/images.npy" in volume["files"]
    assert len(load_file(report["model"])) > 0
    assert (place / "accuracy.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"{report['accuracy']:.4f}" in out
    assert "\x1b" not in out


def test_a_place_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    demo = Demo(tmp_path)
    try:
        code, _, errors = demo.finish(30)
    finally:
        demo.kill()
    assert code == 2
    assert errors.startswith("millpond: ")
    assert len(errors.splitlines()) == 1
    assert (tmp_path / "precious").read_text() == "mine"
