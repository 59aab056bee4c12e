# SPDX-License-Identifier: Apache-2.0
"""Edge: the kernel, those of its modules that a board needs, and the initial file system."""

from __future__ import annotations

import lzma
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.build import recipe
from millpond.images.build.context import Context
from millpond.images.build.run import run

_LIBRARIES = "usr/lib/aarch64-linux-gnu"


def take_modules(context: Context, unpacked: Path) -> str:
    """Move the board's modules from the ``unpacked`` kernel package into the root; the kernel's release."""
    (all_modules,) = (unpacked / "usr/lib/modules").iterdir()
    release = all_modules.name
    run("depmod", "-b", unpacked / "usr", release)
    target = context.root / "usr/lib/modules" / release
    board = context.board
    for path in in_order(all_modules, (*board.watchdog, *board.early, *common(), *board.modules)):
        _decompress(all_modules / path, target / path.removesuffix(".xz"))
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copyfile(all_modules / name, target / name)
    run("depmod", "-b", context.root / "usr", release)
    return release


def is_kernel(package: str, flavour: str = "") -> bool:
    """Return whether a Debian package holds a kernel, optionally of a flavour such as "cloud-arm64"."""
    found = re.fullmatch(r"linux-image-[0-9][^-]*-(.+)", package)
    return found is not None and flavour in ("", found[1])


def common() -> list[str]:
    """Return the modules that every board has."""
    return list(recipe.read("packages.toml")["modules"])


def early(context: Context) -> list[str]:
    """Return the modules with which the root is found and verified."""
    return [*context.board.early, *recipe.read("packages.toml")["early"]]


def in_order(modules: Path, names: Iterable[str]) -> list[str]:
    """Return the files of the modules and of their dependencies, dependencies first. Modules that are built
    into the kernel have no file. Raises LocalError for a module that the kernel does not have.
    """
    needs = _needs(modules)
    files = {_name(path): path for path in needs}
    built_in = {_name(line) for line in (modules / "modules.builtin").read_text().splitlines()}
    order: list[str] = []
    for name in map(_plain, names):
        if name in built_in:
            continue
        if name not in files:
            raise LocalError(f"the kernel {modules.name} has no module {name}")
        path = files[name]
        order += [one for one in (*reversed(needs[path]), path) if one not in order]
    return order


def _needs(modules: Path) -> dict[str, list[str]]:
    """Return each module's file with the files that it depends on."""
    lines = (modules / "modules.dep").read_text().splitlines()
    return {path: rest.split() for path, _, rest in (line.partition(":") for line in lines)}


def _name(path: str) -> str:
    return _plain(Path(path).name.partition(".ko")[0])


def _plain(name: str) -> str:
    return name.replace("-", "_")


def _decompress(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    data = source.read_bytes()
    target.write_bytes(lzma.decompress(data) if source.suffix == ".xz" else data)


def make_initrd(context: Context, release: str) -> Path:
    """Build the compressed initramfs: busybox, dmsetup, the modules that find the root, and its /init."""
    tree = context.work / "initrd"
    _fill(tree, context, release)
    paths = sorted(tree.rglob("*"))
    for path in (tree, *paths):
        os.utime(path, (context.epoch, context.epoch))
    made = context.work / "initrd.img"
    made.write_bytes(run("gzip", "-9", "-n", given=_archive(tree, paths)))
    return made


def _fill(tree: Path, context: Context, release: str) -> None:
    for name in ("bin", "dev", "lib", "modules", "proc", "root", "sys"):
        (tree / name).mkdir(parents=True)
    shutil.copy2(context.root / "usr/bin/busybox", tree / "bin/busybox")
    dmsetup = context.root / "usr/sbin/dmsetup"
    shutil.copy2(dmsetup, tree / "bin/dmsetup")
    for name, path in libraries(context.root / _LIBRARIES, dmsetup).items():
        shutil.copy2(path, tree / "lib" / name)
    shutil.copyfile(recipe.RECIPE / "initrd-init", tree / "init")
    (tree / "init").chmod(0o755)
    modules = context.root / "usr/lib/modules" / release
    _copy_modules(modules, context.board.watchdog, tree / "watchdog")
    _copy_modules(modules, early(context), tree / "modules")


def _copy_modules(modules: Path, names: Iterable[str], folder: Path) -> None:
    """Copy modules to a folder where their names have the order in which they can be loaded."""
    folder.mkdir(exist_ok=True)
    for number, file in enumerate(in_order(modules, names)):
        shutil.copyfile(modules / file, folder / f"{number:02}-{Path(file).name}")


def needed(dynamic: str) -> list[str]:
    """Return the libraries that readelf lists in a file's dynamic section."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]$", dynamic, re.MULTILINE)


def _needed_by(path: Path) -> list[str]:
    return needed(run("aarch64-linux-gnu-readelf", "--dynamic", "--wide", path).decode())


def libraries(
    folder: Path, program: Path, needs: Callable[[Path], list[str]] = _needed_by
) -> dict[str, Path]:
    """Return the files in ``folder`` of a program's libraries, and of those that these need, by the names
    that the loader looks for. Raises LocalError for one that is not there.
    """
    found: dict[str, Path] = {}
    asking = [program]
    while asking:
        for name in needs(asking.pop()):
            if name in found:
                continue
            found[name] = folder / name
            if not found[name].exists():
                raise LocalError(f"{program.name} needs {name}, which is not in {folder}")
            asking.append(found[name])
    return found


def _archive(tree: Path, paths: Sequence[Path]) -> bytes:
    names = "\n".join(str(path.relative_to(tree)) for path in paths)
    options = ["--quiet", "--reproducible", "-o", "-H", "newc", "-R", "0:0"]
    return run("cpio", *options, given=names.encode(), folder=tree)
