# SPDX-License-Identifier: Apache-2.0
"""A missing prerequisite is reported in one line that names the remedy."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("cat", "id", "rm", "sh", "tail", "mktemp", "tr", "unshare", "true", "touch", "chmod")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder to use as PATH: a machine with the basic tools and no more."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    return tools


def prerequisites(machine: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", ROOT / "images/prerequisites.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(machine)})


def fake(machine: Path, name: str, script: str) -> None:
    (machine / name).unlink(missing_ok=True)
    (machine / name).write_text(f"#!/bin/sh\n{script}\n")
    (machine / name).chmod(0o755)


def test_an_old_python(machine: Path) -> None:
    fake(machine, "python3", 'case "$1" in -V) echo Python 3.9.2;; *) exit 1;; esac')
    done = prerequisites(machine, "python", "python3")
    assert done.returncode == 1
    assert done.stderr == (
        "millpond needs Python 3.11 or newer; python3 is Python 3.9.2: make PYTHON=/path/to/python3.11\n"
    )


@pytest.mark.parametrize("tool", ["groupadd", "systemd-sysusers"])
def test_the_group_is_made_where_systemd_looks_for_units(machine: Path, tool: str) -> None:
    fake(machine, "id", "echo 0")
    fake(machine, "grep", "exit 1")
    fake(machine, tool, f'echo {tool} "$@"')
    for folder, said in (("/tmp/units", ""), ("/etc/systemd/system", f"{tool} ")):
        done = prerequisites(machine, "group", "millpond", folder)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(said) and ("millpond" in done.stdout) == bool(said)
    fake(machine, "grep", "exit 0")
    assert prerequisites(machine, "group", "millpond", "/etc/systemd/system").stdout == ""
    fake(machine, "grep", "exit 1")
    fake(machine, "id", "echo 1000")
    assert prerequisites(machine, "group", "millpond", "/etc/systemd/system").stdout == ""


def test_no_python_for_a_user_who_may_not_install(machine: Path) -> None:
    fake(machine, "id", "echo 1000")
    done = prerequisites(machine, "python", "python3")
    assert (done.returncode, done.stderr) == (
        1,
        "millpond needs Python 3.11: sudo apt install python3 python3-venv\n",
    )


def test_no_venv_for_a_user_who_may_not_install(machine: Path) -> None:
    fake(machine, "id", "echo 1000")
    fake(machine, "python3", 'case "$2" in *ensurepip*) exit 1;; *print*) echo 3.11;; esac')
    done = prerequisites(machine, "python", "python3")
    assert (done.returncode, done.stderr) == (
        1,
        "millpond needs python3.11-venv: sudo apt install python3.11-venv\n",
    )


def test_venv_is_installed_where_that_is_safe(machine: Path, tmp_path: Path) -> None:
    if not Path("/etc/debian_version").exists():
        pytest.skip("not a Debian")
    fake(machine, "id", "echo 0")
    fake(machine, "python3", 'case "$2" in *ensurepip*) exit 1;; *print*) echo 3.11;; esac')
    fake(machine, "apt-get", f'echo "$@" >>{tmp_path}/asked')
    done = prerequisites(machine, "python", "python3")
    assert (done.returncode, done.stdout) == (0, "millpond: installing python3.11-venv (apt)\n")
    assert (tmp_path / "asked").read_text() == (
        "update\n-o DPkg::Lock::Timeout=600 install -y --no-install-recommends python3.11-venv\n"
    )


def test_a_failed_installation_shows_why(machine: Path) -> None:
    if not Path("/etc/debian_version").exists():
        pytest.skip("not a Debian")
    fake(machine, "id", "echo 0")
    fake(machine, "apt-get", "echo no route to mirror; exit 100")
    done = prerequisites(machine, "python", "python3")
    assert done.returncode == 1
    assert done.stderr == (
        "no route to mirror\nmillpond could not install python3 python3-venv: see the lines above\n"
    )


PRINTS_VERSION = 'case "$2" in *print*) echo {}; esac; test "$2" != venv || echo "$@" >>{}'


@pytest.mark.parametrize(
    ("there", "asked", "anew"),
    [
        ("3.11.7", "", False),
        ("3.11.7", "command line", True),
        ("3.12.1", "command line", False),
        ("", "", True),
    ],
)
def test_an_environment_of_another_python(
    machine: Path, tmp_path: Path, there: str, asked: str, anew: bool
) -> None:
    folder, made = tmp_path / "env", tmp_path / "made"
    (folder / "bin").mkdir(parents=True)
    fake(machine, "python3", PRINTS_VERSION.format("3.12.1", made))
    fake(folder / "bin", "python", f"echo {there}" if there else "exit 127")
    fake(folder / "bin", "pip", "exit 0")
    done = prerequisites(machine, "venv", "python3", str(folder), asked)
    assert (done.returncode, done.stderr) == (0, "")
    has = f"Python {there}" if there else "no Python that runs"
    said = f"millpond: {folder} has {has}: it is made anew with Python 3.12.1\n"
    assert done.stdout == (said if anew else "")
    assert made.exists() == anew
    if anew:
        assert made.read_text() == f"-m venv --clear {folder}\n"


def test_the_first_environment(machine: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    fake(machine, "python3", PRINTS_VERSION.format("3.12.1", made))
    done = prerequisites(machine, "venv", "python3", str(tmp_path / "env"), "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert made.read_text() == f"-m venv {tmp_path}/env\n"


OF_314 = 'case "$2" in *version_info\\ *) exit 0;; *print*version*) echo 3.14;; *print*) echo /nowhere;; esac'


def test_what_fuse_python_is_built_with_is_named(machine: Path) -> None:
    fake(machine, "id", "echo 1000")
    fake(machine, "python3", OF_314)
    done = prerequisites(machine, "fuse", "python3")
    needs = "gcc libc6-dev pkg-config libfuse-dev python3.14-dev"
    assert (done.returncode, done.stderr) == (
        1,
        f"millpond needs {needs} to build fuse-python for Python 3.14: sudo apt install {needs}\n",
    )


def test_where_fuse_python_has_a_wheel_nothing_is_built(machine: Path) -> None:
    fake(machine, "id", "echo 1000")
    fake(machine, "python3", "exit 1")  # it is older
    done = prerequisites(machine, "fuse", "python3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_tools_of_the_guest_are_named_together(machine: Path) -> None:
    fake(machine, "id", "echo 1000")
    fake(machine, "mksquashfs", "exit 0")
    done = prerequisites(machine, "guest")
    assert (done.returncode, done.stderr) == (
        1,
        "millpond needs qemu-system-x86 mmdebstrap cpio: sudo apt install qemu-system-x86 mmdebstrap cpio\n",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may open the devices")
def test_no_namespaces(machine: Path) -> None:
    fake(machine, "unshare", "exit 1")
    done = prerequisites(machine, "system")
    assert done.returncode == 1
    assert done.stderr.startswith("millpond ")
    assert done.stderr.count("\n") == 1


def test_how_it_is_called(machine: Path) -> None:
    done = prerequisites(machine)
    assert done.returncode == 1
    assert done.stderr.startswith("millpond prerequisites.sh: ")


def test_another_apt_is_waited_for(machine: Path, tmp_path: Path) -> None:
    """Before: an installation failed at once while unattended-upgrades was at work."""
    if not Path("/etc/debian_version").exists():
        pytest.skip("this is no Debian")
    fake(machine, "id", "echo 0")
    fake(
        machine,
        "sleep",
        f"echo $1 >>{tmp_path}/slept; [ $(wc -l <{tmp_path}/slept) -lt 3 ] || : >{tmp_path}/free",
    )
    locked = f"[ -e {tmp_path}/free ] || {{ echo E: Could not get lock /var/lib/apt/lists/lock; exit 100; }}"
    fake(machine, "apt-get", f'echo "$@" >>{tmp_path}/asked; case $1 in update) {locked};; esac')
    (machine / "wc").symlink_to(shutil.which("wc") or "/usr/bin/wc")
    done = prerequisites(machine, "qemu")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:4] == ["update"] * 4 and asked[4].startswith("-o DPkg::Lock::Timeout=600 install "), done
    assert (tmp_path / "slept").read_text().split() == ["5"] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_daemons_that_run_are_restarted_by_an_installation(machine: Path, tmp_path: Path) -> None:
    """The files below them were replaced, and nobody was told."""
    fake(machine, "systemctl", f'echo "$@" >>{tmp_path}/calls; case "$*" in *is-active*agent*) exit 3;; esac')
    script = "mount -t tmpfs t /run; mkdir -p /run/systemd/system; "
    script += f"PATH={machine}; exec sh {ROOT}/images/prerequisites.sh restart"
    said = []
    for folder in ("/etc/systemd/system", str(tmp_path)):
        argv = ["unshare", "--mount", "sh", "-c", f"{script} {folder}"]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said == ["millpond: millpond-host.service runs: it is restarted, with what is installed now\n", ""]
    assert (tmp_path / "calls").read_text().splitlines() == [
        "--quiet is-active millpond-host.service",
        "restart millpond-host.service",
        "--quiet is-active millpond-agent.service",
    ]
