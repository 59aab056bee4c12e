# SPDX-License-Identifier: Apache-2.0
"""The wheel, and `make install` into folders of the test: nothing outside them is touched."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..effort import is_full

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "fs", "host", "images", "linux", "train", "tunnel", "wire")
QUIET = ("--quiet", "--disable-pip-version-check")
UNITS = ("millpond-host.service", "millpond-agent.service")
WORST = {"millpond-host.service": 4.1, "millpond-agent.service": 5.6}  # of 10; an ordinary service has 9.6

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def call(*command: object, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def checkout(target: Path) -> Path:
    """What git would give a user, and what is new; without git, all that has no dot before its name."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        ignored = shutil.ignore_patterns(".*", "__pycache__", "_*.so", "dist", "build", "*.egg-info")
        shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)
        return target
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).exists():  # it may have been removed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("source") / "millpond")


@dataclass(frozen=True, slots=True)
class Pip:
    """How pip is called. A full run does as a user does: whatever is missing comes from the registry, and so
    does the build backend, into an environment of its own for each wheel. A quick run gets the backend once.
    """

    options: tuple[str, ...]
    environment: dict[str, str]


@pytest.fixture(scope="session")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Pip:
    if is_full():
        return Pip((), {})
    backend = tmp_path_factory.mktemp("backend")
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    call(sys.executable, "-m", "pip", "install", *QUIET, "--target", backend, *required)
    return Pip(("--no-deps", "--no-build-isolation"), {"PYTHONPATH": str(backend)})


def build(pip: Pip, source: Path, target: Path, **environment: str) -> tuple[str, list[str]]:
    """The wheel's name and what is in it."""
    command = (sys.executable, "-m", "pip", "wheel", *QUIET, "--no-deps", *pip.options)
    call(*command, "-w", target, source, **pip.environment, **environment)
    (built,) = target.iterdir()
    with zipfile.ZipFile(built) as archive:
        return built.name, archive.namelist()


@pytest.fixture(scope="module")
def built(pip: Pip, source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    return build(pip, source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(built: tuple[str, list[str]]) -> list[str]:
    return built[1]


@pytest.mark.registry
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_wheel_has_the_c_engine_and_is_for_this_platform(built: tuple[str, list[str]]) -> None:
    name, files = built
    assert "millpond/tunnel/datapath/_datapath.so" in files
    assert "-py3-none-linux_" in name


@pytest.mark.registry
def test_without_a_compiler_the_wheel_is_pure(pip: Pip, source: Path, tmp_path: Path) -> None:
    name, files = build(pip, source, tmp_path, CC="no-such-compiler")
    assert "millpond/tunnel/datapath/_datapath.so" not in files
    assert "millpond/tunnel/datapath/datapath.c" in files
    assert name.endswith("-py3-none-any.whl")


@pytest.mark.registry
def test_the_wheel_holds_one_namespace_and_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {re.sub(r"-.*\.", "-VERSION.", top) for top in tops} == {"millpond", "millpond-VERSION.dist-info"}
    direct = {name for name in wheel if re.fullmatch(r"millpond/[^/]+\.[a-z]+", name)}
    assert direct == {"millpond/__init__.py"}


@pytest.mark.registry
@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_in_the_wheel_typed(wheel: list[str], package: str) -> None:
    assert f"millpond/{package}/__init__.py" in wheel
    assert f"millpond/{package}/py.typed" in wheel


@pytest.mark.registry
def test_every_module_is_in_the_wheel(wheel: list[str]) -> None:
    """But for the builder of images, which works on a working tree, and its recipe."""
    folders = ("agent", "fs", "host", "images", "tunnel")
    modules = {
        str(path.relative_to(ROOT / folder))
        for folder in folders
        for path in (ROOT / folder / "millpond").rglob("*.py")
    }
    builder = {name for name in modules if name.startswith("millpond/images/build/")}
    assert builder and modules - builder <= set(wheel)
    left_out = ("millpond/images/build/", "millpond/images/recipe/")
    assert not [name for name in wheel if name.startswith(left_out)]
    assert "millpond/images/boards/qemu-virt.toml" in wheel


@pytest.mark.full
@pytest.mark.registry
@pytest.mark.timeout(900)
def test_the_demo_of_an_installed_wheel(pip: Pip, source: Path, tmp_path: Path) -> None:
    build(pip, source, tmp_path / "wheel")
    (wheel,) = (tmp_path / "wheel").iterdir()
    call(sys.executable, "-m", "venv", tmp_path / "venv")
    programs = tmp_path / "venv/bin"
    call(programs / "pip", "install", *QUIET, "-c", ROOT / "constraints.txt", f"{wheel}[demo]", cwd=tmp_path)
    said = call(programs / "millpond", "demo", "--in", tmp_path / "demo", cwd=tmp_path)
    report = json.loads((tmp_path / "demo/report.json").read_text())
    assert report["accuracy"] >= 0.95 and report["private_bytes_leaked"] == 0, said


@pytest.mark.registry
def test_the_licence_is_in_the_wheel(wheel: list[str]) -> None:
    assert [name for name in wheel if re.fullmatch(r"millpond-[^/]*\.dist-info/licenses/LICENSE", name)]


@pytest.mark.registry
def test_the_licence_is_in_the_source_distribution(source: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
    call(*pip, "-c", ROOT / "constraints.txt", "--target", tmp_path / "tools", "hatchling")
    where = {"PYTHONPATH": str(tmp_path / "tools")}
    call(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=source, **where)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        found = archive.extractfile(f"{built.name.removesuffix('.tar.gz')}/LICENSE")
        assert found and found.read() == (ROOT / "LICENSE").read_bytes()


def test_only_the_host_has_an_init_above_its_package() -> None:
    folders = ("agent", "fs", "host", "images", "tunnel")
    assert not [folder for folder in folders if (ROOT / folder / "__init__.py").exists()]
    inits = [folder for folder in folders if (ROOT / folder / "millpond" / "__init__.py").exists()]
    assert inits == ["host"]


def unit_text(name: str) -> str:
    return (ROOT / name.split(".")[0].removeprefix("millpond-") / name).read_text()


def usable_unit(name: str, folder: Path) -> Path:
    """The unit with a program that exists here, as the verifier wants one."""
    text = unit_text(name).replace("@CONFDIR@", "/etc/millpond")
    path = folder / name
    path.write_text(re.sub(r"@PREFIX@/bin/\S+", shutil.which("true") or "/bin/true", text))
    return path


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_units_are_valid(name: str, tmp_path: Path) -> None:
    unit = usable_unit(name, tmp_path)
    argv = ["systemd-analyze", "verify", "--man=no", unit]  # the packages have its pages
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_units_are_hardened(name: str, tmp_path: Path) -> None:
    report = call("systemd-analyze", "security", "--offline=true", "--no-pager", usable_unit(name, tmp_path))
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", report)
    assert found
    print(f"{name}: exposure {found[1]} of 10")
    assert float(found[1]) <= WORST[name]


@pytest.mark.parametrize("name", UNITS)
def test_units_have_what_the_daemons_rely_on(name: str) -> None:
    lines = unit_text(name).splitlines()
    for line in ("Type=notify", "WatchdogSec=30", "NotifyAccess=main", "DevicePolicy=closed"):
        assert line in lines


def test_users_of_a_group_may_use_the_installed_daemon() -> None:
    lines = unit_text("millpond-host.service").splitlines()
    assert "Group=millpond" in lines
    assert any(line.startswith("ExecStart=") and line.endswith(" --group millpond") for line in lines)
    assert "prerequisites.sh group millpond " in (ROOT / "images/install.sh").read_text()


def test_nothing_hides_the_mounts_of_the_agent_from_others() -> None:
    """Any of these gives a service mounts of its own: nobody else would see the volume."""
    own_mounts = re.compile(
        r"^(Private|ReadWrite|ReadOnly|Inaccessible|Bind|Root|TemporaryFile|Protect(?!Clock|Hostname))\w*=",
        re.M,
    )
    assert not own_mounts.search(unit_text("millpond-agent.service"))
    assert own_mounts.search(unit_text("millpond-host.service"))


def test_the_agent_may_give_up_what_it_does_not_need() -> None:
    """Landlock is not in @system-service of systemd 252; where it is refused, the volume's server ends."""
    calls = (f"landlock_{name}" for name in ("create_ruleset", "add_rule", "restrict_self"))
    assert f"SystemCallFilter={' '.join(calls)}" in unit_text("millpond-agent.service").splitlines()


def test_the_agent_may_see_who_maps_the_files_of_others() -> None:
    bounds = [line for line in unit_text("millpond-agent.service").splitlines() if "CapabilityBound" in line]
    assert "CAP_LEASE" in " ".join(bounds).split()


def wait_for_flash(folder: Path, *states: str) -> list[str]:
    """Run what the agent's unit runs before the agent, while /flash has one state after another; its acts."""
    found = re.search(r"^ExecStartPre=/bin/sh -c '(.*?)'$", unit_text("millpond-agent.service"), re.M | re.S)
    assert found
    (folder / "states").write_text("\n".join(states) + "\n")
    programs = {
        "systemctl": f'case $1 in show) read -r now <{folder}/states; [ "$now" = none ] || echo loaded ;;'
        f' *) echo "systemctl $@" >>{folder}/done ;; esac',
        "mountpoint": f"read -r now <{folder}/states; sed -i 1d {folder}/states;"
        " [ $now != away ] && echo $now",
        "umount": f'echo "umount $@" >>{folder}/done',
        "sleep": "",
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "done").touch()
    script = found[1].replace("$$", "$").replace("\\\n", "").replace("/sys/dev/block", str(folder))
    call("/bin/sh", "-c", script, PATH=f"{folder}:{os.environ['PATH']}")
    return (folder / "done").read_text().splitlines()


def test_an_agent_waits_for_its_flash(tmp_path: Path) -> None:
    """A drive that came late, or was plugged in again, left the agent down for good."""
    (tmp_path / "8:1").touch()
    start = "systemctl start --no-block flash.mount"
    assert wait_for_flash(tmp_path, "none", "none") == []  # no file system of its own
    assert wait_for_flash(tmp_path, "8:1", "8:1") == []
    assert wait_for_flash(tmp_path, "0:30", "0:30") == []  # a tmpfs
    assert wait_for_flash(tmp_path, "away", "away", "8:1") == [start]
    (tmp_path / "done").unlink()
    assert wait_for_flash(tmp_path, "8:2", "away", "8:1") == ["umount -l /flash", start]
    lines = unit_text("millpond-agent.service").splitlines()
    assert {"Wants=flash.mount", "After=flash.mount", "Restart=always"} <= set(lines)
    assert not [line for line in lines if line.startswith(("Requires", "BindsTo"))]


def make(source: Path, target: str, **variables: object) -> str:
    return call("make", "-C", source, target, *(f"{name}={value}" for name, value in variables.items()))


@pytest.mark.registry
@pytest.mark.timeout(600)
def test_install_and_uninstall(
    pip: Pip, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, binaries = tmp_path / "opt/millpond", tmp_path / "bin"
    units, config = tmp_path / "units", tmp_path / "etc"
    where: dict[str, object] = {"PREFIX": prefix, "BINDIR": binaries, "UNITDIR": units, "CONFDIR": config}
    where["SHAREDIR"] = tmp_path / "share"
    how: dict[str, object] = {"EXTRAS": "", "PYTHON": sys.executable}
    if pip.options:
        how["PIP_INSTALL"] = " ".join(("-m pip install --no-compile", *QUIET, *pip.options))
    for name, value in pip.environment.items():
        monkeypatch.setenv(name, value)

    before = os.umask(0o077)  # as on hardened machines
    try:
        said = make(source, "install", **how, **where)
    finally:
        os.umask(before)
    assert "systemctl enable --now millpond-host" in said
    for path in (prefix, *prefix.rglob("*"), *units.iterdir(), binaries, units, config):
        assert path.is_symlink() or path.stat().st_mode & 0o055 == (
            0o055 if path.is_dir() else 0o044 | (path.stat().st_mode >> 3 & 0o011)
        ), path
    installed = call(
        prefix / "bin/python", "-I", "-c", "import millpond.wire; print(millpond.wire.__file__)", cwd=tmp_path
    )
    assert Path(installed.strip()).is_relative_to(prefix)
    assert (binaries / "millpond").resolve() == (prefix / "bin/millpond").resolve()
    assert sorted(path.name for path in units.iterdir()) == sorted(UNITS)
    for name in UNITS:
        text = (units / name).read_text()
        assert f"ExecStart={prefix}/bin/millpond" in text
        assert not re.search(r"@[A-Z]+@", text)
    with (source / "tunnel/millpond/wire/__init__.py").open("a") as module:
        module.write("NEW = True\n")
    make(source, "install", **how, **where)  # an update is the same command
    call(prefix / "bin/python", "-I", "-c", "from millpond.wire import NEW", cwd=tmp_path)

    said = make(source, "uninstall", **where)
    assert "/var/lib/millpond" in said and "kept" not in said
    left = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert left == []
    assert not prefix.exists() and not config.exists()
    make(source, "uninstall", **where)  # there is nothing left to remove, and no harm in it


@pytest.mark.parametrize(
    ("asked", "there", "anew"),
    [
        ([], "3.9.1", False),
        ([f"PYTHON={sys.executable}"], "3.9.1", True),
        ([f"PYTHON={sys.executable}"], "{}.{}.{}".format(*sys.version_info[:3]), False),
        ([f"PYTHON={sys.executable}"], "", True),
    ],
)
def test_an_environment_of_another_python_is_noticed(
    tmp_path: Path, asked: list[str], there: str, anew: bool
) -> None:
    """Here nothing is made: ``make`` only says what it would do."""
    source = checkout(tmp_path / "millpond")
    python, stamp = source / ".venv/bin/python", source / ".venv/.millpond-installed"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {there}\n")
    python.chmod(0o755)
    stamp.touch()
    said = call("make", "-C", source, "-n", "--no-print-directory", stamp.relative_to(source), *asked)
    assert ("prerequisites.sh venv" in said) == anew, said


def refused(source: Path, target: str, **variables: object) -> str:
    arguments = [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(["make", "-C", source, target, *arguments], capture_output=True, text=True)
    assert done.returncode != 0
    return done.stderr.splitlines()[0]


def test_what_is_not_ours_is_left_alone(source: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    for target in ("install", "uninstall"):
        others = {name: tmp_path / name for name in ("BINDIR", "UNITDIR", "CONFDIR", "SHAREDIR")}
        line = refused(source, target, PREFIX=tmp_path, **others)
        assert line.startswith(f"millpond: {tmp_path} ")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("name", "path"), [("PREFIX", "rel"), ("PREFIX", "/a/my pond"), ("CONFDIR", "/a%i"), ("UNITDIR", "")]
)
def test_a_place_from_which_no_unit_can_start_is_refused(
    source: Path, tmp_path: Path, name: str, path: str
) -> None:
    """Before: such a place was "installed", but its unit did not start, and its command led nowhere."""
    names = ("PREFIX", "BINDIR", "UNITDIR", "CONFDIR", "SHAREDIR")
    where: dict[str, object] = {key: tmp_path / key for key in names}
    line = refused(source, "install", **where | {name: path}, PYTHON=sys.executable)
    assert line.startswith(f"millpond: {name}={path}: "), line
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_in_pythonpath_is_not_taken_for_installed() -> None:
    """pip saw it there, and left it out; the service, which has no PYTHONPATH, did not find it."""
    assert '"$PREFIX/bin/python" -I $PIP_INSTALL' in (ROOT / "images/install.sh").read_text()
    lines = re.findall(r"\.venv/bin/python.*\$\(PIP_INSTALL\)", (ROOT / "Makefile").read_text())
    assert lines and all("python -I" in line for line in lines)


def test_a_configuration_is_kept(source: Path, tmp_path: Path) -> None:
    config = tmp_path / "etc"
    config.mkdir()
    (config / "agent.toml").write_text("name = 'mine'\n")
    empty = {name: tmp_path / name for name in ("PREFIX", "BINDIR", "UNITDIR")}
    assert f"kept {config}" in make(source, "uninstall", CONFDIR=config, **empty)
    assert (config / "agent.toml").read_text() == "name = 'mine'\n"


def test_help_names_every_target() -> None:
    """But for what others do first."""
    rules = (ROOT / "Makefile").read_text()
    declared = {name for line in re.findall(r"^\.PHONY:(.*)$", rules, re.M) for name in line.split()}
    assert declared - {"other-python"} == set(re.findall(r"^([a-z][a-z-]*):", rules, re.M))
    said = call("make", "-C", ROOT, "--no-print-directory")
    shown = dict(re.findall(r"^make (\S+) +(\S.*)$", said, re.M))
    assert len(shown) == len(said.splitlines())
    assert shown.keys() == declared - {"system", "other-python"}
    assert "\x1b" not in said
