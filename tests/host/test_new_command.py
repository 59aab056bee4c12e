# SPDX-License-Identifier: Apache-2.0
"""``millpond new``: projects whose job files and data fit, and what is in the way of one."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from millpond.host.cli.projects.new import ABOUT, Template, create
from millpond.train.job import file, wheels

from .commands import Command

OTHERS = (Template.TEXT, Template.IMAGES, Template.FINETUNE)
DEVICES = ("csd0", "csd1", "csd2")
FLEET = 'name = "three"\n' + "".join(f'[[device]]\nname = "{name}"\n' for name in DEVICES)
EXAMPLE = Path(__file__).parents[2] / "agent" / "examples" / "data.py"


@pytest.mark.parametrize("template", [Template.TEXT, Template.TABULAR, Template.IMAGES])
def test_a_project_has_a_job_that_is_read_and_data_for_each_device(
    template: Template, tmp_path: Path, command: Command
) -> None:
    folder, fleet = tmp_path / "mine", tmp_path / "fleet"
    folder.mkdir()  # an empty folder is taken
    code, out, err = command("new", folder, "--template", template)
    assert (code, err) == (0, "") and "README.md says how it trains" in out
    assert (folder / "README.md").read_text().startswith("# mine\n")
    for name in ("csd", *DEVICES):  # the first one was removed, and its folder stays
        (fleet / "devices" / name / "flash").mkdir(parents=True)
    (fleet / "fleet.toml").write_text(FLEET)
    subprocess.run([sys.executable, "data.py", "--fleet", str(fleet)], cwd=folder, check=True)
    job, files = file.read(folder / "job.toml")
    assert set(files) == {"task.py"} and job.synchronous is None
    for name in DEVICES:
        assert list((fleet / "devices" / name / "flash" / job.data.private).iterdir())
    assert not (folder / "data").exists()
    assert not list((fleet / "devices" / "csd" / "flash").iterdir())


@pytest.mark.parametrize(
    "template",
    [Template.TABULAR, *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)],
)
def test_the_test_of_a_project_passes(template: Template, tmp_path: Path) -> None:
    if template is Template.FINETUNE:
        pytest.importorskip("transformers", reason="transformers is not installed")
    create(tmp_path / "mine", template)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_task.py"]
    done = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_data_for_fewer_than_three_emulated_devices_are_refused(tmp_path: Path) -> None:
    data = create(tmp_path / "mine", Template.TEXT) and tmp_path / "mine" / "data.py"
    command = [sys.executable, data, "--fleet", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"data.py: {tmp_path} holds no fleet: ") and done.stderr.count("\n") == 1
    (tmp_path / "fleet.toml").write_text('name = "boards"\n[[device]]\nname = "csd0"\nboard = "bluefield2"\n')
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"data.py: {tmp_path} has 0 emulated devices; it needs 3\n")


def test_the_example_data_go_to_the_devices_of_fleet_toml(tmp_path: Path) -> None:
    script = tmp_path / "examples" / "data.py"
    script.parent.mkdir()
    shutil.copy(EXAMPLE, script)
    removed = tmp_path / "devices" / "csd" / "flash"  # a device that was removed keeps its folder
    removed.mkdir(parents=True)
    (tmp_path / "fleet.toml").write_text(FLEET)
    subprocess.run([sys.executable, script, "--fleet", tmp_path], check=True)
    assert not list(removed.iterdir())
    for name, part in itertools.product(DEVICES, ("private", "public")):
        assert (tmp_path / "devices" / name / "flash" / part / "digits" / "images.npy").stat().st_size


def test_what_is_there_is_not_written_over(tmp_path: Path, command: Command) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "task.py").write_text("mine")
    for path in (taken, taken / "task.py"):
        code, _, err = command("new", path)
        assert code == 2
        assert err == f"millpond: {path} exists and is not an empty folder; choose another name\n"
    assert [path.read_text() for path in taken.iterdir()] == ["mine"]
    code, _, err = command("new")
    assert (code, err.count("\n")) == (2, 1) and "needs a name" in err


def test_templates_are_listed(command: Command) -> None:
    code, out, _ = command("new", "--list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(Template)
    code, out, _ = command("new", "--list", "--format", "json")
    assert json.loads(out) == {"templates": ABOUT}


def test_wheels_of_what_workers_have_are_not_asked_for(tmp_path: Path) -> None:
    """pip downloads all that transformers needs; a job with wheels of some of it is refused."""
    pytest.importorskip("transformers")
    create(tmp_path, Template.FINETUNE)
    needed, found = ["transformers"], set[str]()
    while needed:
        found.add(name := needed.pop())
        for wanted in map(Requirement, metadata.requires(name) or ()):
            if (own := canonicalize_name(wanted.name)) not in found and (
                not wanted.marker or wanted.marker.evaluate({"extra": ""})
            ):
                needed.append(own)
    removed = set(re.findall(r"wheels/([\w-]+)-\*", (tmp_path / "README.md").read_text()))
    assert removed == found & wheels._OWN
