# SPDX-License-Identifier: Apache-2.0
"""Files and wheels of jobs: any bytes, sent and installed once, refused where a device's owner says so."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from ..job_files import packed, written
from ..waiting import eventually
from .support import Emulation

pytestmark = pytest.mark.timeout(240)

MODEL = """\
import hashlib
from pathlib import Path

import tiny
from torch import nn

HERE = Path(__file__).parents[1]


class Own:
    def __init__(self, digest):
        self._digest = digest

    def model(self):
        data = (HERE / "data/weights.bin").read_bytes()
        assert data == Path("data/weights.bin").read_bytes()
        if hashlib.sha256(data).hexdigest() != self._digest:
            raise ValueError("these are other bytes")
        for path in (HERE / "data/weights.bin", Path(tiny.__file__)):
            try:
                path.open("ab")
            except OSError:
                continue
            raise ValueError("it can be written")
        return nn.Sequential(nn.Flatten(), nn.Linear(tiny.PIXELS, 10))
"""
JOB = """\
name = "{name}"

[data]
private = "private/digits"
test = "test"

[task]
factory = "own.model:Own"
files = ["own", "data"]
wheels = ["wheels/*"]
arguments = {{ digest = "{digest}" }}

[federated]
rounds = 2
quorum = 0.5
"""
WHEEL = packed({"tiny/__init__.py": "from tiny.sizes import PIXELS", "tiny/sizes.py": "PIXELS = 64"})
FOR_OTHERS = packed({"tiny/__init__.py": "raise ImportError"})


def write_job(fleet: Emulation, name: str, data: bytes, wheels: dict[str, bytes]) -> Path:
    """A job whose task reads these bytes, and imports the module of a wheel."""
    files = {"own/__init__.py": "", "own/model.py": MODEL, "data/weights.bin": data, "data/.hidden": "no"}
    folder = written(files, fleet.base / "job-files" / name)
    written(wheels, folder / "wheels")
    if not (folder / "test").exists():
        (folder / "test").symlink_to(fleet.base / "test")
    (folder / "job.toml").write_text(JOB.format(name=name, digest=hashlib.sha256(data).hexdigest()))
    return folder / "job.toml"


def to_devices(fleet: Emulation) -> dict[str, int]:
    return {name: device.tunnel[0] for name, device in fleet.devices().items()}


def laid_out(fleet: Emulation) -> list[Path]:
    """The folders of jobs' files, on devices and on the host."""
    return [*fleet.directory.glob("devices/*/state/code/*"), *fleet.directory.glob("jobs/*/code")]


def test_files_and_wheels_come_once_and_go_where_they_may(fleet: Emulation) -> None:
    data = os.urandom(3 << 20)
    wheels = {"tiny-1-py3-none-any.whl": WHEEL, "tiny-1-cp27-cp27m-win32.whl": FOR_OTHERS}
    job = write_job(fleet, "files", data, wheels)
    refusal = r"policy\.largest_files: files of 31\d+ bytes; at most 2097152 are allowed"
    before, crossed = to_devices(fleet), list[dict[str, int]]()
    for _ in range(2):
        info, rounds = fleet.wait_for_end(fleet.submit(job))
        assert info.state == "done", f"{info.error}\n{fleet.logs()}"
        for result in rounds:
            assert set(result.workers) == {"csd0", "csd1"}
            assert re.search(refusal, result.missing["csd2"])
        now = to_devices(fleet)
        crossed.append({name: now[name] - before[name] for name in now})
        before = now
    first, second = crossed
    assert min(first["csd0"], first["csd1"]) > len(data) > 4 * max(second.values())
    assert first["csd2"] < len(data) // 4
    for device in ("csd0", "csd1"):
        state = fleet.fleet.device_directory(device) / "state"
        assert len(list((state / "overlays").iterdir())) == 1
        modules = [path.read_bytes() for path in (state / "files").iterdir() if path.stat().st_size < 5000]
        assert MODEL.encode() in modules and FOR_OTHERS not in modules
    eventually(lambda: not laid_out(fleet), "nothing of the jobs is laid out any more")


def test_a_job_whose_wheels_fit_nobody_says_so(fleet: Emulation) -> None:
    job = write_job(fleet, "unfit", b"", {"tiny-1-cp27-cp27m-win32.whl": FOR_OTHERS})
    result = fleet.millpond("train", job)
    assert result.code == 3
    text = r"millpond: wheels: there is none of tiny for Python 3\.\d+ on \w+\n"
    assert re.fullmatch(text, result.err), result
