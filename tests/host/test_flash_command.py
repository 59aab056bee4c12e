# SPDX-License-Identifier: Apache-2.0
"""``millpond flash`` for people and scripts: its questions, output and refusals, and Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from millpond.base.errors import LocalError, RemoteError
from millpond.host.cli import flash
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import DeviceConfig
from millpond.images import boards
from millpond.images.flash import bluefield
from millpond.images.flash.block_device import FileMedium, TargetDescription
from millpond.images.format import locate, seed
from millpond.images.format.manifest import Manifest, SeedPlace, dumps

from ..waiting import eventually
from .commands import Command, Done

MIB = 1 << 20
SIZE = 8 * MIB
VOLUME = "/dev/disk/by-id/nvme-ACME_S4XN0042"
MILLPOND = (sys.executable, "-m", "millpond.host.main", "flash")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Bytes in place of a partition table: here nobody looks at it."""
    path = tmp_path / "image" / "millpond-test.img"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(SIZE)
        for offset in (0, 2 * MIB, 6 * MIB):
            file.seek(offset)
            file.write(os.urandom(100_000))
    manifest = Manifest(
        "millpond", "0.1.0", 7, "qemu-virt", "aarch64", locate.describe(path), SeedPlace(4 * MIB, MIB)
    )
    path.with_suffix(".json").write_text(dumps(manifest))
    return path


@pytest.fixture
def millpond(command: Command) -> Command:
    """'millpond flash'."""
    return functools.partial(command, "flash")


def refusal(done: Done) -> str:
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1, done
    return done.err.removeprefix("millpond: ").rstrip()


def on_a_terminal(answer: str, *arguments: str | Path) -> tuple[int, str]:
    """Run it with a person, who types ``answer`` when asked."""
    return typed_into((*MILLPOND, *map(str, arguments)), answer)


def typed_into(argv: tuple[str, ...], answer: str) -> tuple[int, str]:
    """Run a program on a terminal, and type ``answer`` when it asks."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(argv[0], argv, os.environ | {"TERM": "xterm", "COLUMNS": "100"})
    seen, answered = b"", False
    try:
        while part := os.read(terminal, 65536):
            seen += part
            if (b"[y/N]" in seen or b"serial number:" in seen) and not answered:
                os.write(terminal, answer.encode())
                answered = True
    except OSError:  # the terminal of a process that has ended
        pass
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen.decode()


def test_a_script_flashes_a_new_file_without_a_word(millpond: Command, image: Path, tmp_path: Path) -> None:
    done = millpond(image.parent, "--to", tmp_path / "disk", "--size", "512M", "--format", "json")
    assert done.code == 0 and done.err == "", done
    result = json.loads(done.out)
    assert result.pop("seconds") >= 0
    assert result == {
        "target": str(tmp_path / "disk"),
        "bytes_written": 3 * 102_400 + MIB,
        "verified": True,
        "device": None,
        "reread": True,
        "untested": None,
    }
    assert (tmp_path / "disk").stat().st_size == 512 * MIB
    assert begin(tmp_path / "disk") == image.read_bytes()


def begin(disk: Path) -> bytes:
    """Return so much of a disk as the image has; the rest is its first boot's."""
    with disk.open("rb") as file:
        return file.read(SIZE)


def test_what_is_too_small_for_the_first_boot_is_refused(
    millpond: Command, image: Path, tmp_path: Path
) -> None:
    """The image fitted and was "verified"; then systemd-repart refused at each boot, for ever."""
    needed = SIZE + boards.read("qemu-virt").room
    small = refusal(millpond(image, "--to", tmp_path / "disk", "--size", f"{needed - 4096}"))
    assert small == f"{tmp_path}/disk is too small: it has {needed - 4096} bytes, a device needs {needed}"
    assert not (tmp_path / "disk").exists()
    assert millpond(image, "--to", tmp_path / "disk").code == 0
    assert (tmp_path / "disk").stat().st_size == needed


def test_people_read_a_line(millpond: Command, image: Path, tmp_path: Path) -> None:
    done = millpond(image, "--to", tmp_path / "disk")
    line = rf"{tmp_path}/disk: 1\.4 MB written and verified in \d+\.\d s \([0-9.]+ .?B/s\)\.\n"
    assert re.fullmatch(line, done.out) and done.err == ""


def test_a_file_that_is_there_is_asked_about_once(millpond: Command, image: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk"
    target.write_text("precious")
    unasked = refusal(millpond(image, "--to", target))
    assert unasked == f"{target}: a file: to write to it without being asked, say --yes"
    assert target.read_text() == "precious"
    code, text = on_a_terminal("\n", image, "--to", target)
    assert code == 2 and "All of it will be lost. Write millpond 0.1.0 for qemu-virt to" in text
    assert "nothing was written" in text and target.read_text() == "precious"
    code, text = on_a_terminal("y\n", image, "--to", target)
    assert code == 0 and text.count("[y/N]") == 1, text
    for seen in ("writing", "verifying", "MB/s", "written and verified"):
        assert seen in text
    assert begin(target) == image.read_bytes()
    target.write_text("not precious")
    assert millpond(image, "--to", target, "--yes").code == 0
    assert begin(target) == image.read_bytes()


MANIFEST_SIZE = 16 * MIB


def one_of_many(target: Path, proof: str = "0042") -> TargetDescription:
    names = ("serial S4XN0042", "slot 0000:41:00.0") if proof else ()
    return TargetDescription(
        MANIFEST_SIZE, "ACME CSD 8T", ("public (ext4)",), names=names, proof=proof, alike=36
    )


@contextlib.contextmanager
def opened_as(path: Path, about: TargetDescription) -> Iterator[FileMedium]:
    """Open a file as if it were this disk."""
    descriptor = os.open(path, os.O_RDWR)
    with contextlib.closing(FileMedium(path, descriptor, about, secret=False)) as medium:
        yield medium


def test_one_of_36_equal_disks_is_asked_about_by_its_serial_number(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question showed model, size and contents, which are the same for all of them."""
    target = tmp_path / "disk"
    target.write_bytes(bytes(MANIFEST_SIZE))
    about = [one_of_many(target)]
    monkeypatch.setattr(flash, "opened", lambda *_, **__: opened_as(target, about[0]))
    console, asked = Console(file=io.StringIO()), list[tuple[str, str]]()

    def refuse(question: str, typed: str) -> None:
        asked.append((question, typed))
        raise LocalError("nothing was written")

    with pytest.raises(LocalError, match="nothing was written"):
        flash.write(image, "/dev/sdq", console, refuse)
    [(question, typed)] = asked
    assert typed == "0042"
    assert "ACME CSD 8T, serial S4XN0042, slot 0000:41:00.0; on it: public (ext4); one of 36" in question
    with pytest.raises(LocalError, match="one of 36 disks that look alike: name it by /dev/disk/by-id/"):
        flash.write(image, "/dev/sdq", console, flash._do_not_ask)
    assert target.read_bytes() == bytes(MANIFEST_SIZE)
    flash.write(image, "/dev/disk/by-id/nvme-ACME_S4XN0042", console, flash._do_not_ask)
    assert target.read_bytes().startswith(image.read_bytes())
    about[0] = one_of_many(target, proof="")
    with pytest.raises(LocalError, match="tells no serial number: name it by /dev/disk/by-path/"):
        flash.write(image, "/dev/sdq", console, refuse)


def test_only_the_end_of_the_serial_number_agrees() -> None:
    ask = "from millpond.host.cli import flash; flash._ask('/dev/sdq: all of it', '0042'); print('yes')"
    for answer, code in (("0042", 0), ("y", 1), ("0041", 1)):
        ended, text = typed_into((sys.executable, "-c", ask), f"{answer}\n")
        assert ended == code and "Type the last 4 characters of its serial number" in text
        assert ("nothing was written" in text) == bool(code)


def test_a_device_gets_its_identity(millpond: Command, image: Path, tmp_path: Path) -> None:
    fleet = provisioning.create(tmp_path / "fleet", "pond", ["csd0"])
    fleet = provisioning.add(fleet, DeviceConfig("csd1", board="qemu-virt"))
    fleet = provisioning.add(fleet, DeviceConfig("csd2", board="generic-uefi"))
    for name, why in (("csd0", "csd0 is emulated"), ("csd2", "csd2 is a generic-uefi")):
        other = ("--device", name, "--fleet", fleet.directory)
        assert why in refusal(millpond(image, "--to", tmp_path / "other", *other))
    named = ("--device", "csd1", "--volume-disk", VOLUME, "--erase-volume", "--fleet", fleet.directory)
    done = millpond(image, "--to", tmp_path / "disk", *named)
    assert done.code == 0 and done.out.endswith("It is csd1 now.\n"), done
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o600
    with (tmp_path / "disk").open("rb") as file:
        file.seek(4 * MIB)
        members = {member.name: member for member in seed.read(file)}
    etc = fleet.device_directory("csd1") / "etc"
    assert members.pop("volume.toml").data.decode() == f'disk = "{VOLUME}"\nerase = true\n'
    assert {"agent.toml", "ssh_host_key", "authorized_keys"} < set(members)
    for path in etc.iterdir():
        member = members.pop(path.name)
        assert member.data == path.read_bytes() and member.mode == path.stat().st_mode & 0o777
    assert not members
    unknown = ("--device", "csd9", "--fleet", fleet.directory)
    assert "no device 'csd9' in this fleet" in refusal(millpond(image, "--to", tmp_path / "other", *unknown))
    assert not (tmp_path / "other").exists()
    again = millpond(image, "--to", tmp_path / "disk", "--yes")  # without one the old identity is gone
    assert again.code == 0 and begin(tmp_path / "disk") == image.read_bytes()


@pytest.mark.parametrize(
    ("board", "given", "why"),
    [
        ("qemu-virt", (), "has a disk of its own: name it by --volume-disk"),
        ("qemu-virt", ("--volume-disk", "/dev/nvme0n1"), "is no whole disk's name in /dev/disk/by-id"),
        ("qemu-virt", ("--volume-disk", "/dev/disk/by-id/nvme-X-part1"), "is no whole disk's name"),
        ("qemu-virt", ("--volume-disk", '/dev/disk/by-id/a"b'), "is no whole disk's name"),
        ("qemu-virt", ("--erase-volume",), "name it by --volume-disk"),
        ("generic-uefi", ("--volume-disk", "/dev/disk/by-id/nvme-X"), "lies on its boot disk"),
        ("generic-uefi", ("--erase-volume",), "lies on its boot disk"),
    ],
)
def test_the_disk_of_the_volume_is_named_where_it_is_another(
    board: str, given: tuple[str, ...], why: str
) -> None:
    """The kernel names disks in the order that it finds them: the volume was on the first."""
    disk = given[1] if given[:1] == ("--volume-disk",) else None
    with pytest.raises(LocalError, match=re.escape(why)):
        flash._volume_file(board, disk, "--erase-volume" in given)


def test_a_volumes_disk_is_of_a_device(millpond: Command, image: Path, tmp_path: Path) -> None:
    done = millpond(image, "--to", tmp_path / "disk", "--volume-disk", VOLUME)
    assert "name it by --device" in refusal(done)


@pytest.mark.parametrize("size", ["0", "8", "-1G", "8GB", "8g", "1.5G", "4097", "", "9" * 30, "8M "])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(LocalError, match="a multiple of 4096 bytes is needed"):
        flash.parse_size(size)


def test_sizes() -> None:
    given = ("4096", "4K", "8G", "2T")
    assert [flash.parse_size(size) for size in given] == [4096, 4096, 8 << 30, 2 << 40]


def test_mistakes_are_one_line(millpond: Command, image: Path, tmp_path: Path) -> None:
    assert refusal(millpond(image, "--to", image)).endswith("is the image itself")
    assert refusal(millpond(image, "--to", image.with_suffix(".json"))).endswith("is the image itself")
    assert "too small" in refusal(millpond(image, "--to", tmp_path / "x", "--size", "4M"))
    assert "No such file" in refusal(millpond(tmp_path / "none.img", "--to", tmp_path / "x"))
    assert "no such disk" in refusal(millpond(image, "--to", "/dev/sdzz", "--yes"))
    assert "neither a disk nor a file" in refusal(millpond(image, "--to", "/dev/null", "--yes"))
    assert "no /dev/rshim9/boot" in refusal(millpond(image, "--to", "rshim9", "--yes"))
    assert not (tmp_path / "x").exists()


STOPPING = """
import os, signal

from millpond.host.main import main

really, written = os.pwrite, 0


def pwrite(*arguments):
    global written
    count = really(*arguments)
    written += count
    if written > 10 << 20:
        os.pwrite = really
        os.kill(os.getpid(), signal.SIGSTOP)
    return count


os.pwrite = pwrite
main()
"""
"""The command line, in a process that stops itself after 10 MiB."""


def test_ctrl_c_says_how_it_leaves_the_target(millpond: Command, image: Path, tmp_path: Path) -> None:
    with image.open("r+b") as file:  # long enough to be interrupted
        file.truncate(1 << 29)
        file.seek(8 * MIB)
        for part in [os.urandom(8 * MIB)] * 8:
            file.write(part)
    manifest = Manifest(
        "millpond", "0.1.0", 7, "qemu-virt", "aarch64", locate.describe(image), SeedPlace(4 * MIB, MIB)
    )
    image.with_suffix(".json").write_text(dumps(manifest))
    target = tmp_path / "disk"
    argv = [sys.executable, "-c", STOPPING, "flash", str(image), "--to", str(target)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        about = psutil.Process(process.pid)
        eventually(lambda: about.status() == psutil.STATUS_STOPPED, "it is in the middle", 120)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == (
        f"millpond: interrupted: {target} is left without a partition table; the same command begins anew"
    )
    assert target.read_bytes()[:MIB] == bytes(MIB)
    assert millpond(image, "--to", target, "--yes").code == 0
    assert target.read_bytes()[:MIB] == image.read_bytes()[:MIB]


def test_a_card_is_told_of_as_untested(millpond: Command, tmp_path: Path) -> None:
    """There is no card: a file is in place of the one that its rshim has."""
    stream, boot, out = tmp_path / "x.bfb", tmp_path / "boot", io.StringIO()
    asked: list[str] = []
    stream.write_bytes(b"no stream")
    boot.touch()
    with pytest.raises(LocalError, match="image 0"):
        flash.push(stream, boot, Console(file=out), lambda question, _typed: asked.append(question))
    assert bluefield.UNTESTED in asked[0] and "The card is reset" in asked[0] and str(boot) in asked[0]
    done = flash.Flashed(str(boot), 10, 1.0, False, None, untested=bluefield.UNTESTED)
    text = "\n".join(flash._summary_lines(done))
    assert "can not be verified" in text and text.endswith(f"{bluefield.UNTESTED}.")
    with pytest.raises((LocalError, RemoteError), match=r"mlx-mkbfb|default\.bfb|kernel"):
        flash.push(tmp_path, boot, Console(file=out), lambda question, _typed: asked.append(question))
    assert "UNTESTED" in millpond("--help").out
