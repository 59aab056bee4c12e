# SPDX-License-Identifier: Apache-2.0
"""Volumes by the command line: mounted, checked, copied to and from."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..forking import ForkServer
from ..waiting import eventually
from .support import MILLPOND, Emulation, Result
from .test_1_commands import complaint

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Mounted:
    """A device's volume, mounted on the host where only commands of this see it."""

    server: ForkServer
    fleet: Emulation
    folder: Path

    def millpond(self, command: str, *arguments: str | Path) -> str:
        """What a command of the fleet's prints."""
        return self.output(self.any("millpond", command, "--fleet", self.fleet.directory, *arguments))

    def sh(self, line: str) -> str:
        """What a shell prints that works in the folder."""
        return self.output(self.any("sh", "-c", f"cd {self.folder}; {line}"))

    def any(self, *argv: str | Path) -> Result:
        """How a command ends."""
        return self.server.run(*argv)

    def output(self, result: Result) -> str:
        assert result.code == 0, result
        return result.out


@pytest.fixture
def mounted(apart: ForkServer, fleet: Emulation, tmp_path: Path) -> Iterator[Mounted]:
    """Where a test may mount a volume; none is mounted in the end."""
    yield Mounted(apart, fleet, tmp_path)
    apart.run("umount", "-l", tmp_path)


def test_a_volume_is_mounted_twice_and_written_from_the_host(
    fleet: Emulation, mounted: Mounted, tmp_path: Path
) -> None:
    said = json.loads(mounted.millpond("mount", "csd0", tmp_path, "--format", "json"))
    place = {"device": "csd0", "mountpoint": str(tmp_path)}
    assert said == {**place, "public": f"{tmp_path}/public", "renewed": False}
    listed = json.loads(mounted.millpond("mount", "--format", "json"))
    assert {**place, "dead": False} in listed["mounts"]
    again = mounted.any("millpond", "mount", "--fleet", fleet.directory, "csd1", tmp_path)
    assert complaint(again, 2) == f"millpond: csd0 is already mounted at {tmp_path}"
    elsewhere = mounted.any("millpond", "umount", "--fleet", fleet.directory, tmp_path / "none")
    if os.geteuid() == 0:
        assert f"mounted: csd0 at {tmp_path}" in complaint(elsewhere, 2)
    assert mounted.sh("ls") == "public\n"
    assert "Anyone may read this" in mounted.sh("cat public/README.txt")
    assert "No such file or directory" in mounted.sh("ls private 2>&1 || true")
    mounted.sh("echo 'from the host' > public/host.txt")
    assert mounted.millpond("run", "csd0", "cat", "/volume/public/host.txt") == "from the host\n"
    named = ("--fleet", fleet.directory, "csd0") if os.geteuid() == 0 else (tmp_path,)
    result = mounted.any("millpond", "umount", *named, "--format", "json")
    assert json.loads(mounted.output(result)) == {"mountpoint": str(tmp_path)}
    assert mounted.sh("ls") == ""
    whose = ("--uid", 1234, "--gid", 5) if os.geteuid() == 0 else ()
    assert mounted.millpond("mount", "csd0", tmp_path, *whose).endswith(f"is at {tmp_path}/public\n")
    shown = (1234, 5) if whose else (os.geteuid(), os.getegid())
    assert mounted.sh("stat -c %u:%g public/host.txt") == f"{shown[0]}:{shown[1]}\n"
    if os.geteuid() == 0:  # not through fuse-python
        mounted.sh(f"""{sys.executable} -c 'import os; os.setxattr("public/host.txt", "user.a", b"1")'""")
        flash = fleet.fleet.device_directory("csd0") / "flash" / "public" / "host.txt"
        assert os.getxattr(flash, "user.a") == b"1"
    assert mounted.sh("cat public/host.txt; rm public/host.txt") == "from the host\n"
    assert mounted.any("millpond", "umount", tmp_path).code == 0
    assert str(tmp_path) not in mounted.sh("cat /proc/self/mountinfo")
    assert not (fleet.fleet.device_directory("csd0") / "flash" / "public" / "host.txt").exists()
    eventually(
        lambda: (
            not [p for p in Path("/proc").glob("[0-9]*/cmdline") if f"csd0\0{tmp_path}".encode() in _read(p)]
        ),
        "the end of the mounts' processes",
        every=0.1,
    )


def test_a_mount_is_found_whatever_its_place_is_called(
    fleet: Emulation, mounted: Mounted, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("mounting of other file systems needs root")
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to("place")
    (tmp_path / "to").symlink_to(tmp_path)
    strange = "p=$(printf 'other-\\377'); mkdir $p; mount -t tmpfs none $p; "
    mounted.sh(strange)  # somebody else's, whose name is not UTF-8
    count = "grep -c fuse.millpond /proc/self/mountinfo || true"
    call = f"MILLPOND_FLEET={fleet.directory} {' '.join(MILLPOND)}"
    for mount, umount in (
        ("cd place; {} mount csd0 ../place", "{} umount place"),
        ("{} mount csd0 link", "{} umount link"),
        ("{} mount csd0 to/place", "{} umount to/to/place"),
        ("{} mount csd0 'donn\u00e9es de\ttest'", "{} umount 'donn\u00e9es de\ttest'"),
    ):
        assert "is at" in mounted.sh(mount.format(call))
        assert mounted.sh(count) == "1\n"
        mounted.sh(umount.format(call))
        assert mounted.sh(count) == "0\n"
    mounted.sh("umount other-*")


def test_another_user_is_let_in_and_a_dead_mount_is_replaced(
    fleet: Emulation, mounted: Mounted, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("only root mounts for others")
    place = tmp_path / "others"
    mounted.millpond("mount", "--uid", 65534, "--gid", 65534, "csd0", place)
    nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    mounted.sh(f"for d in {' '.join(map(str, tmp_path.parents))} .; do chmod o+x $d; done")
    assert "README.txt" in mounted.sh(f"{nobody} ls others/public")
    (own,) = [p for p in Path("/proc").glob("[0-9]*/cmdline") if f"csd0\0{place}".encode() in _read(p)]
    os.kill(int(own.parent.name), signal.SIGKILL)
    eventually(lambda: "not connected" in mounted.sh("ls others 2>&1 || true"), "the mount's death")
    assert f"csd0 at {place}: its process has ended; 'millpond mount csd0" in mounted.millpond("mount")
    said = mounted.millpond("mount", "csd0", place)
    assert said.endswith("others/public again: the process of the mount there had ended\n")
    assert "README.txt" in mounted.sh("ls others/public")
    assert mounted.any("millpond", "umount", place).code == 0
    assert mounted.sh("grep -c fuse.millpond /proc/self/mountinfo || true") == "0\n"


def test_a_mount_may_be_read_only_and_let_others_in(
    fleet: Emulation, mounted: Mounted, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("only root mounts for others")
    mounted.sh(f"for d in {' '.join(map(str, tmp_path.parents))} .; do chmod o+x $d; done")
    nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
    mounted.millpond("mount", "-o", "ro", "csd0", tmp_path / "own")
    assert "Read-only file system" in mounted.sh("touch own/public/new 2>&1 || true")
    assert "Permission denied" in mounted.sh(f"{nobody} ls own/public 2>&1 || true")
    mounted.millpond("mount", "--allow-other", "csd0", tmp_path / "others")
    assert "README.txt" in mounted.sh(f"{nobody} ls others/public")
    for place in ("own", "others"):
        assert mounted.any("millpond", "umount", tmp_path / place).code == 0


def test_a_line_of_fstab_mounts_a_volume(fleet: Emulation, mounted: Mounted, tmp_path: Path) -> None:
    """Before: mount(8) knew no file system of the type millpond."""
    if os.geteuid():
        pytest.skip("mount(8) needs root")
    place, helper = tmp_path / "place", f"{sys.executable} -m millpond.host.cli.volumes.mount_helper"
    place.mkdir()
    options = f"ro,uid=1234,wait=5,fleet={fleet.directory},nofail,x-systemd.automount"
    (tmp_path / "fstab").write_text(f"csd0 {place} millpond {options} 0 0\n")
    (tmp_path / "mount.millpond").write_text(f'#!/bin/sh\nexec {helper} "$@"\n')
    (tmp_path / "mount.millpond").chmod(0o755)
    # For a moment, and in this namespace alone, /sbin has the helper, as after an installation.
    found = mounted.sh(
        "mkdir sbin && mv mount.millpond sbin && mount --bind sbin $(readlink -f /sbin) && "
        f"mount -T {tmp_path}/fstab {place}; code=$?; umount -l $(readlink -f /sbin); "
        f"[ $code = 0 ] && stat -c %u {place}/public/README.txt"
    )
    assert found == "1234\n"
    assert f"{place} fuse.millpond ro," in mounted.sh("grep fuse.millpond /proc/self/mounts")
    mounted.sh(f"umount {place}")
    for wrong, code, told in (
        ("what=1", 1, "unknown mount option 'what=1'; known: ro, rw"),
        ("uid=me", 1, "uid=me: this is no number of a user"),
        ("timeout=0", 1, "timeout=0: this is no number of seconds"),
        (f"fleet={tmp_path}/none", 1, "holds no fleet"),
    ):
        result = mounted.any("sh", "-c", f"{helper} csd0 {place} -o {wrong}")
        assert (result.code, result.err.count("\n")) == (code, 1) and told in result.err, result


def test_a_volume_is_mounted_when_its_directory_is_first_listed(
    fleet: Emulation, mounted: Mounted, tmp_path: Path
) -> None:
    """Before: the mounter had a session of its own, and waited for the very mount that it was to make."""
    if os.geteuid():
        pytest.skip("mount(8) needs root")
    automount = (sys.executable, Path(__file__).with_name("automount.py"), tmp_path)
    helper = (sys.executable, "-m", "millpond.host.cli.volumes.mount_helper", "csd0:/", tmp_path)
    assert mounted.output(mounted.any(*automount, *helper, "-o", f"fleet={fleet.directory}")) == "public\n"
    mounted.sh(f"umount -l {tmp_path}")


def test_a_mount_ends_though_another_namespace_has_a_copy_of_it(
    fleet: Emulation, mounted: Mounted, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("fuse-python mounts where only one uid exists")
    mounted.millpond("mount", "csd0", tmp_path)
    copy = int(mounted.sh("unshare -m --propagation private sleep 60 >/dev/null 2>&1 & echo $!"))
    try:
        eventually(lambda: b"sleep" in _read(Path(f"/proc/{copy}/cmdline")).split(b"\0")[0], "a namespace")
        copied = Path(f"/proc/{copy}/mountinfo")
        assert str(tmp_path) in copied.read_text()
        mounted.millpond("umount", tmp_path)
        assert str(tmp_path) in copied.read_text()

        def lists() -> bool:
            found = json.loads(mounted.millpond("volume", "csd0", "--format", "json"))["mounts"]
            return any(mount["mountpoint"] == str(tmp_path) for mount in found)

        eventually(lambda: not lists(), "the end of the mount's process", every=0.1)
    finally:
        os.kill(copy, signal.SIGKILL)


def test_a_volume_is_shown_and_checked(mounted: Mounted, tmp_path: Path) -> None:
    mounted.millpond("mount", "csd1", tmp_path, "--format", "json")
    mounted.sh("cat public/README.txt")
    found = json.loads(mounted.millpond("volume", "csd1", "--format", "json"))
    shown = mounted.millpond("volume", "csd1") + mounted.millpond("volume", "csd1", "--check")
    part = "public/.x.0123456789ab.part"
    mounted.sh(f"echo part > {part}; touch -d '3 days ago' {part}")
    checked = mounted.any("millpond", "volume", "--fleet", mounted.fleet.directory, "csd1", "--check")
    mounted.sh(f"rm {part}")
    assert mounted.any("millpond", "umount", tmp_path).code == 0
    assert found["device"] == "csd1" and found["private_bytes"] > 0
    status = found["status"]
    assert status["quota"] is None and status["used"] > 0 and status["files"] > 1 and status["device"]
    assert status["sandbox"].startswith("Landlock: ")
    assert any(client["connected"] for client in status["clients"])
    words = ["no quota", "device's mount  present", "files, clean"]
    if os.geteuid() == 0:  # the mount of an ordinary user serves its statistics while it is busy only
        (mount,) = (each for each in found["mounts"] if each["mountpoint"] == str(tmp_path))
        assert mount["dirty"] == 0
        assert mount["latencies"]["walk"]["requests"] > 0
        words += ["not on the device yet", "median"]
    for text in words:
        assert text in shown, text
    assert f"{part} is an unfinished copy, last written 3 days ago" in checked.out
    assert (checked.code, checked.err) == (1, "") and "findings: 1" in checked.out


def test_files_are_copied_to_a_device_and_back(fleet: Emulation, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "f").write_bytes(data)
    os.setxattr(tmp_path / "data" / "deep" / "f", "user.a", b"of a user")
    result = fleet.millpond("cp", "-r", tmp_path / "data", "csd1:public/copied", "--format", "json")
    assert result.code == 0, result
    assert json.loads(result.out) == {
        "files": 1,
        "bytes": 5_000_000,
        "resumed": 0,
        "unchanged": 0,
        "stripped": 0,
        "deleted": 0,
    }
    again = fleet.millpond("cp", "-r", tmp_path / "data" / "deep", "csd1:public/copied")
    assert again.out == "0 files, 0 B; 1 were there already\n", again
    flash = fleet.fleet.device_directory("csd1") / "flash"
    assert (flash / "public" / "copied" / "deep" / "f").read_bytes() == data
    back = fleet.millpond("cp", "csd1:public/copied/deep/f", tmp_path / "back")
    assert back.code == 0 and back.out.rstrip().endswith("1 file, 5.0 MB"), back
    assert (tmp_path / "back").read_bytes() == data
    assert os.getxattr(tmp_path / "back", "user.a") == b"of a user"
    (tmp_path / "latest").symlink_to("back")
    assert fleet.millpond("cp", tmp_path / "latest", "csd1:public/").code == 0
    assert (flash / "public" / "latest").read_bytes() == data
    for arguments, told in (
        (("csd1:private/x", tmp_path), "only the device's owner reaches its private part"),
        ((tmp_path / "back", "csd1:private/"), "millpond run --admin csd1 -- tar x -C /volume/private"),
        ((tmp_path / "back", "csd9:public/"), "there is no device 'csd9' in the fleet"),
        ((tmp_path / "back", tmp_path / "there"), "one of them must be on a device: csd0:public/..."),
        ((tmp_path / "data", "csd1:public/"), f"{tmp_path}/data: Is a directory; with -r it is copied"),
        (("csd1:public/copied", tmp_path), "csd1:public/copied: Is a directory; with -r it is copied"),
        ((tmp_path / "back",), "a source and a target are needed"),
        ((tmp_path / "back", "csd[0-9]:public/"), "there is no device 'csd3'"),
        (("-r", "csd1:public/copied", "csd1:public/copied/deep"), "into itself"),
        (("--delete", tmp_path / "back", "csd1:public/"), "--delete is for the directories that -r copies"),
        ((tmp_path / "none", "csd1:public/"), f"{tmp_path}/none: No such file or directory"),
        (("-r", tmp_path / "data" / "deep" / "f", "csd1:public/copied/deep/f/x"), "Not a directory"),
        ((tmp_path / "back", "csd1:public/none/"), "csd1:public/none/: there is no such directory"),
        (
            (tmp_path / "back", tmp_path / "again" / "back", "csd1:public/"),
            "two of the sources would be 'back'",
        ),
    ):
        result = fleet.millpond("cp", *arguments)
        assert result.code == 2 and told in result.err and result.err.count("\n") == 1, result


def test_files_are_copied_to_several_devices_and_between_them(fleet: Emulation, tmp_path: Path) -> None:
    for name in ("a", "deep/b", "skipped.tmp"):
        (tmp_path / "many" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "many" / name).write_text(name)
    options = ("-r", "--exclude", "*.tmp")
    said = fleet.millpond("cp", *options, tmp_path / "many", "csd[0-2]:public/")
    assert (said.code, said.out) == (0, "csd[0-2]: 2 files, 7 B\n"), said
    flash = {name: fleet.fleet.device_directory(name) / "flash/public" for name in ("csd0", "csd1", "csd2")}
    for folder in flash.values():
        assert (folder / "many/deep/b").read_text() == "deep/b" and not (folder / "many/skipped.tmp").exists()
    (flash["csd1"] / "many/more").write_text("of csd1")
    said = fleet.millpond("cp", "-r", "csd1:public/many", "@all:public/", "--format", "json")
    found = {each.pop("device"): each for each in json.loads(said.out)}
    assert {name: (each["files"], each["unchanged"]) for name, each in found.items()} == {
        "csd0": (1, 2),
        "csd1": (0, 3),
        "csd2": (1, 2),
    }
    assert (flash["csd2"] / "many/more").read_text() == "of csd1"
    said = fleet.millpond("cp", "-r", "--delete", tmp_path / "many", "csd0,csd2:public/")
    assert said.out == "csd[0,2]: 1 file, 11 B; 2 were there already; 1 deleted\n"
    # One device fails, and the others have the file nevertheless.
    (flash["csd1"] / "many/skipped.tmp").mkdir()
    said = fleet.millpond("cp", tmp_path / "many/skipped.tmp", "csd[0-2]:public/many/")
    assert said.code == 1 and "csd[0,2]: 0 files, 0 B; 1 were there already" in said.out
    assert (
        said.err.count("\n") == 1 and "csd1:public/many/: csd1:public/many/skipped.tmp: Is a dir" in said.err
    )


def test_an_interrupted_copy_leaves_nothing_and_says_how_to_go_on(fleet: Emulation, tmp_path: Path) -> None:
    """Before: Ctrl-C said nothing of it and left the file that was being written."""
    many, there = tmp_path / "interrupted", fleet.fleet.device_directory("csd1") / "flash/public/interrupted"
    many.mkdir()
    for number in range(600):
        (many / f"{number}").write_bytes(bytes([number % 251]) * 70_000)
    with fleet.begin("cp", "-r", many, "csd1:public/") as command:
        eventually(lambda: there.is_dir() and len(list(there.iterdir())) > 3, "the first files", every=0.01)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
    assert command.returncode == 130 and err.count("\n") == 1, err
    assert "copied, nothing unfinished stays; the same command copies the others" in err
    count = len(list(there.iterdir()))
    assert 0 < count < 600 and not [path for path in there.iterdir() if path.name.endswith(".part")]
    assert out.startswith(f"{count} files, ")
    again = fleet.millpond("cp", "-r", many, "csd1:public/")
    assert again.out == f"{600 - count} files, {(600 - count) * 0.07:.1f} MB; {count} were there already\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
