# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): measures what wheels cost a job that is not the first to have them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from bench.experiment import Run
from bench.fleets import running
from bench.rows import Row, summary
from job_files import packed, written
from system.support import Emulation

DEVICES = ("csd0", "csd1", "csd2")
TITLE = "A second job with the same wheels, against one without"
_MODULES, _FUNCTIONS = 16, 24
_WHAT = (
    "extra seconds from the job's start until all workers are prepared, of a model that imports a package of "
    f"{_MODULES} modules and {_MODULES * _FUNCTIONS} functions from a wheel, over the same model without it; "
    "each device has had a job with the wheel before"
)
_EMULATION = f"a host and {len(DEVICES)} emulated devices on one machine's processors"
_FUNCTION = '''
def function{number}(values, *, scale=1.0, shift=0):
    """Return scaled values."""
    found = [scale * value + shift for value in values if value is not None]
    if not found:
        raise ValueError("there are no values")
    return {{"sum": sum(found), "least": min(found), "most": max(found)}}
'''
_MODEL = """\
from torch import nn
{imports}

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
_JOB = """\
name = "wheels"

[data]
private = "private/digits"
test = "{test}"

[model]
factory = "net:build"
files = ["net.py"]
wheels = {wheels}

[federated]
rounds = 1
quorum = 1.0
"""


def measure(run: Run) -> list[Row]:
    """Row ``wheels_s``, and the first job's."""
    with running(DEVICES, searched=False) as fleet:
        without, with_wheel = (_job(fleet, wheels) for wheels in (False, True))
        _prepared(fleet, without)  # the zygotes load torch
        first = _prepared(fleet, with_wheel) - _prepared(fleet, without)
        extra = []
        for _ in range(run.repeats):
            extra.append(_prepared(fleet, with_wheel) - _prepared(fleet, without))
            run.say(f"wheels: first job {first:.2f} s, now {extra[-1]:.2f} s")
    return [
        summary("wheels_s", _WHAT, extra, "s", emulation=_EMULATION),
        summary("wheels_first_s", "the same of the first job", [first], "s", emulation=_EMULATION),
    ]


def _job(fleet: Emulation, wheels: bool) -> Path:
    text = "".join(_FUNCTION.format(number=number) for number in range(_FUNCTIONS))
    modules = [f"module{number}" for number in range(_MODULES)]
    package = {f"large/{module}.py": text for module in modules}
    imports = "".join(f"import large.{module}\n" for module in modules) if wheels else ""
    folder = written({"net.py": _MODEL.format(imports=imports)}, fleet.base / f"job-{wheels}")
    name = "large-1-py3-none-any.whl"
    if wheels:
        (folder / name).write_bytes(packed({"large/__init__.py": "", **package}))
    listed = f'["{name}"]' if wheels else "[]"
    (folder / "job.toml").write_text(_JOB.format(test=fleet.base / "test", wheels=listed))
    return folder / "job.toml"


def _prepared(fleet: Emulation, job: Path) -> float:
    """Seconds from a job's start until its last worker is prepared. Raises RuntimeError."""
    number = fleet.submit(job)
    info, rounds = fleet.wait_for_end(number)
    if info.state != "done" or any(set(each.workers) != set(DEVICES) for each in rounds):
        raise RuntimeError(f"the job is {info.state}: {info.error}")
    lines = (fleet.fleet.job_directory(number) / "job.log").read_text().splitlines()
    times = [line[:23] for line in lines if " is prepared with " in line]
    return datetime.strptime(times[-1], "%Y-%m-%d %H:%M:%S,%f").timestamp() - info.created
