# SPDX-License-Identifier: Apache-2.0
"""Edge: the root file system: packages, the recipe's own files, and millpond as the last layer.

The layer below millpond takes minutes to compress and is kept: after a change in our own code only that is
appended to it anew.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from millpond.images.build import debian, kernel, python, recipe
from millpond.images.build.context import Context
from millpond.images.build.run import run
from millpond.images.ondevice import volume_partition

_UNUSED = (
    "boot",
    "etc/init.d",
    "etc/rc?.d",
    "usr/games",
    "usr/include",
    "usr/lib/klibc*",
    "usr/lib/aarch64-linux-gnu/gconv",
    "usr/lib/aarch64-linux-gnu/perl*",
    "usr/lib/linux-image-*",
    "usr/lib/modules/*",
    "usr/lib/python3.11/ensurepip",
    "usr/lib/python3.11/idlelib",
    "usr/lib/python3.11/lib2to3",
    "usr/lib/python3.11/pydoc_data",
    "usr/lib/python3.11/test",
    "usr/lib/systemd/boot",
    "usr/lib/systemd/catalog",
    "usr/lib/udev/hwdb.d",
    "usr/share/bash-completion",
    "usr/share/bug",
    "usr/share/doc",
    "usr/share/i18n",
    "usr/share/info",
    "usr/share/initramfs-tools",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/misc/pci.ids",
    "usr/share/perl*",
    "usr/share/zsh",
    "var/*",
)
"""Of Debian's packages, what a device never reads. Licences stay in the list of packages beside the image."""
_EMPTY = ("dev", "flash", "mnt", "proc", "root", "run", "srv", "sys", "tmp", "var", "volume")
_FLASH_OPTIONS = {
    "boot": "noatime,x-systemd.device-timeout=5min",
    "own": "noatime,nofail,x-systemd.requires=millpond-volume.service,x-systemd.device-timeout=15min",
}
"""Options of /flash. The identity, which is there after all local file systems, names the disk of its own:
without nofail, /flash would be one of them.
"""
_UMASK = 0o022
"""The builder's own would leave files to root alone that workers read, or make another image."""
_COMPRESSION = ("-comp", "zstd", "-b", "1M", "-Xcompression-level")


def make_base(context: Context) -> tuple[Path, str]:
    """Unpack Debian's and Python's packages into the root; the unpacked whole, and the kernel's release."""
    os.umask(_UMASK)
    unpacked = context.work / "unpacked"
    packages = debian.locked()
    others = [package for package in packages if not kernel.is_kernel(package.name)]
    debian.unpack(debian.fetch(others, context.cache / "debian"), context.root)
    own = [package for package in packages if kernel.is_kernel(package.name, context.board.kernel)]
    debian.unpack(debian.fetch(own, context.cache / "debian"), unpacked)
    stub = context.root / "usr/lib/systemd/boot"
    shutil.copytree(stub, unpacked / "usr/lib/systemd/boot")
    _prune(context.root)
    release = kernel.take_modules(context, unpacked)
    _add_python(context)
    return unpacked, release


def _add_python(context: Context) -> None:
    place = context.root / python.PLACE.lstrip("/")
    python.install(place, context.cache / "pip")
    python.prune(place)
    python.compile_all(context.root / "usr/lib/python3.11", "/usr/lib/python3.11")
    python.compile_all(place, python.PLACE)


def _prune(root: Path) -> None:
    for pattern in _UNUSED:
        for path in sorted(root.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in _EMPTY:
        (root / name).mkdir(exist_ok=True)
    for path in sorted((root / "usr").rglob("*.so*")):
        if not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF":
            python.strip(path)


def add_recipe(context: Context) -> None:
    """Add the recipe's own files to the root, with the board's values filled in."""
    board, values = context.board, _values(context)
    source = recipe.RECIPE / "root"
    for path in sorted(source.rglob("*")):
        if path.is_file():
            fill_in(path, context.root / path.relative_to(source), values)
    unit = "millpond-agent.service"
    fill_in(context.source / "agent" / unit, context.root / "etc/systemd/system" / unit, values)
    _add_links(context.root)
    modules = "\n".join((*kernel.common(), *board.modules))
    (context.root / "etc/modules-load.d/millpond.conf").write_text(f"{modules}\n")
    if board.flash.disk == "own":
        _give_volume_its_disk(context.root)


def _give_volume_its_disk(root: Path) -> None:
    """Make the volume's partition by a program of ours, on the disk that the device's identity names."""
    made = root / str(volume_partition.DEFINITIONS).lstrip("/")
    made.mkdir(parents=True)
    (root / "usr/lib/repart.d/60-flash.conf").rename(made / "flash.conf")


def _values(context: Context) -> dict[str, str]:
    return {
        "@BOARD@": context.name,
        "@FLASH@": _FLASH_OPTIONS[context.board.flash.disk],
        "@PREFIX@": "/opt/millpond",
        "@CONFDIR@": "/etc/millpond",
    }


def _add_links(root: Path) -> None:
    wanted = recipe.read("root.toml")
    for path in (root / "usr/lib/udev/rules.d").iterdir():
        if path.name not in wanted["udev"]:
            path.unlink()
    units = "etc/systemd/system"
    links = {f"{units}/{name}": "/dev/null" for name in wanted["mask"]}
    for name in wanted["enable"]:
        links[f"{units}/multi-user.target.wants/{name}"] = f"../{_template(name)}"
    for name, target in {**links, **wanted["links"]}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)


def _template(unit: str) -> str:
    name, at, rest = unit.partition("@")
    return f"{name}@.{rest.partition('.')[2]}" if at else unit


def fill_in(source: Path, target: Path, values: dict[str, str]) -> None:
    """Copy a file of the recipe with values in place of their names; it stays executable."""
    text = source.read_text()
    for name, value in values.items():
        text = text.replace(name, value)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.write_text(text)
    executable = source.stat().st_mode & 0o111
    target.chmod(0o755 if executable else 0o644)


def squash(context: Context, made: Path, *trees: Path) -> None:
    """Compress ``trees`` into the root of ``made``, or append them if that is there already."""
    times = ["-mkfs-time", str(context.epoch), "-all-time", str(context.epoch)]
    options = ["-keep-as-directory", "-all-root", "-no-xattrs", "-quiet", "-no-progress"]
    options += [*_COMPRESSION, str(context.level), *times]
    run("mksquashfs", *trees, made, *options, hint="is the disk full?")


def make_millpond(context: Context) -> Path:
    """Build millpond for the board's processor; return the tree that becomes the root's /opt."""
    os.umask(_UMASK)
    source, place = context.work / "source", context.work / "last/opt/millpond"
    _copy_source(context.source, source)
    wheels = context.work / "wheel"
    environment = {**context.clock, "CC": "aarch64-linux-gnu-gcc", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", f"--wheel-dir={wheels}"]
    run(python.interpreter(), "-m", "pip", "wheel", *options, source, environment=environment)
    (wheel,) = wheels.iterdir()
    shutil.unpack_archive(wheel, place, "zip")
    python.compile_all(place, "/opt/millpond")
    _add_programs(context, place)
    return context.work / "last"


def _copy_source(source: Path, target: Path) -> None:
    for name in ("agent", "fs", "host", "images", "tunnel"):
        ignored = shutil.ignore_patterns("__pycache__", "_*.so", ".*")
        shutil.copytree(source / name, target / name, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md"):
        shutil.copyfile(source / name, target / name)


def _add_programs(context: Context, place: Path) -> None:
    (place / "bin").mkdir()
    agent = place / "bin/millpond-agent"
    agent.write_text(
        "#!/usr/bin/python3\nimport sys\nfrom millpond.agent.daemon import main\nsys.exit(main())\n"
    )
    agent.chmod(0o755)
    release = f'version = "{context.version}"\nserial = {context.serial}\nboard = "{context.name}"\n'
    (place / "release.toml").write_text(release)
