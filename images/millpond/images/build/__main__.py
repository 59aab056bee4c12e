# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.build --board NAME`` makes an agent image; ``--lock`` the locks."""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from millpond.base.errors import LocalError, MillpondError
from millpond.base.version import VERSION
from millpond.images import boards
from millpond.images.build import boot, debian, disk, kernel, python, root, verity
from millpond.images.build.context import Context
from millpond.images.build.recipe import RECIPE
from millpond.images.build.run import find
from millpond.images.build.secure_boot import signing_key
from millpond.images.build.steps import BuildSteps
from millpond.images.format.locate import describe
from millpond.images.format.manifest import ImageFile, Manifest, PackageRecord, SeedPlace, dumps
from millpond.linux.files import sha256_of

SOURCE = Path(__file__).parents[4]
_MAKERS = ("boot", "debian", "disk", "kernel", "python", "root")
"""What makes the base; of ``disk``, the name of a partition is in the first program."""


def build(context: Context) -> Path:
    """Make the image, when no other build uses its cache; its manifest. Raises LocalError."""
    context.cache.mkdir(parents=True, exist_ok=True)
    steps = BuildSteps(context.cache / f"seconds-{context.name}.json")
    with (context.cache / "lock").open("ab") as lock:
        steps.run("the cache", lambda: fcntl.flock(lock, fcntl.LOCK_EX))
        return _build(context, steps)


def _build(context: Context, steps: BuildSteps) -> Path:
    step = steps.run
    shutil.rmtree(context.work, ignore_errors=True)
    context.work.mkdir(parents=True)
    base = context.cache / f"base-{context.name}-{_key(context)}"
    if not (base / "done").exists():
        step("packages, kernel and root", lambda: make_base(context, base))
    squashed = context.work / "root.squashfs"
    shutil.copyfile(base / "root.squashfs", squashed)
    last = step("millpond", lambda: root.make_millpond(context))
    step("root", lambda: root.squash(context, squashed, last / "opt"))
    tree = step("hash tree", lambda: verity.append_tree(squashed))
    esp = step("boot", lambda: boot.make_esp(context, boot.make_program(context, base, tree)))
    made = context.output / f"millpond-{context.name}.img"
    used = step("disk", lambda: disk.make_disk(made, esp, squashed))
    for source in (esp, squashed):
        new = context.output / f"{source.name}.new"
        shutil.copyfile(source, new)
        new.replace(context.output / source.name)  # a bundle that is being made has the former one by a link
    return step("manifest", lambda: write_manifest(context, made, used))


def make_base(context: Context, base: Path) -> None:
    """Build everything that does not depend on millpond's own code; ``base`` keeps it for the next build."""
    unpacked, release = root.make_base(context)
    root.add_recipe(context)
    initrd = kernel.make_initrd(context, release)
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True)
    boot.keep_parts(base, context.root, unpacked, unpacked / f"boot/vmlinuz-{release}", initrd)
    _report(context.root)
    root.squash(context, base / "root.squashfs", *sorted(context.root.iterdir()))
    (base / "done").touch()


def write_manifest(context: Context, made: Path, used: Sequence[tuple[int, int]]) -> Path:
    """Write the manifest beside the image: the ranges that are ``used``, digests and packages."""
    seed = next(part for part in disk.layout() if part.name == "seed")
    manifest = Manifest(
        name="millpond",
        version=context.version,
        serial=context.serial,
        board=context.name,
        architecture=context.board.architecture,
        image=describe(made, used),
        seed=SeedPlace(seed.offset, seed.bytes),
        files=tuple(_file(context.output / name) for name in ("esp.vfat", "root.squashfs")),
        packages=_packages(),
    )
    path = made.with_suffix(".json")
    path.write_text(dumps(manifest))
    return path


def _packages() -> tuple[PackageRecord, ...]:
    packages = [PackageRecord(one.name, one.version, "debian") for one in debian.locked()]
    packages += [PackageRecord(name, version, "python") for name, version in python.locked()]
    return tuple(packages)


def _file(path: Path) -> ImageFile:
    return ImageFile(path.name, path.stat().st_size, sha256_of(path))


def _key(context: Context, recipe: Path = RECIPE) -> str:
    """Return a digest of everything that the base is made of."""
    digest = hashlib.sha256(f"{context.name} {context.board} {context.epoch} {context.level}".encode())
    makers = [Path(__file__).with_name(f"{name}.py") for name in _MAKERS]
    sources = [*recipe.rglob("*"), *makers, context.source / "agent/millpond-agent.service"]
    for path in sorted(path for path in sources if path.is_file()):
        name = path.relative_to(recipe) if path.is_relative_to(recipe) else path.name
        digest.update(f"\n{name} {path.stat().st_mode & 0o111:o} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _report(tree: Path) -> None:
    """Print how many bytes each part of the tree takes before compression."""
    sizes: dict[str, int] = {}
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink():
            parts = path.relative_to(tree).parts
            depth = 5 if parts[:4] == ("usr", "lib", "millpond", "packages") else 3
            name = "/".join(parts[: min(depth, len(parts) - 1)])
            sizes[name] = sizes.get(name, 0) + path.stat().st_size
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:15]:
        print(f"millpond image: {size / 1e6:8.1f} MB  {name}", flush=True)


def _serial(source: Path) -> int:
    """Return the time of the working tree's newest commit. Raises LocalError where git does not tell it: of
    images without one no device could tell which is later.
    """
    source = source.resolve()
    # A repository around the source is another's.
    outer = {**os.environ, "GIT_CEILING_DIRECTORIES": str(source.parent)}
    own = {name: value for name, value in outer.items() if name not in ("GIT_DIR", "GIT_WORK_TREE")}
    # Only a time is read of it, whoever owns it: in containers and for root that is another user.
    argv = [find("git"), "-c", f"safe.directory={source}", "-C", str(source), "log", "-1", "--format=%ct"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=own)
    if done.returncode or not done.stdout.strip():
        why = (done.stderr.strip().splitlines() or ["it has no commit"])[0]
        raise LocalError(f"{source} does not tell its newest commit ({why}): name the image's --serial")
    return int(done.stdout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m millpond.images.build", description="Make an agent image."
    )
    parser.add_argument("--board", default="qemu-virt", help=f"one of {', '.join(boards.names())}")
    parser.add_argument("--output", type=Path, default=Path(".image"), metavar="DIR")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="what a next build can use; OUTPUT/cache if left out"
    )
    parser.add_argument("--source", type=Path, default=SOURCE, metavar="DIR", help="millpond's working tree")
    parser.add_argument(
        "--serial", type=int, help="of two images the greater is later; the newest commit's time"
    )
    parser.add_argument(
        "--secure-boot-key", type=Path, metavar="PEM", help="sign the EFI program for Secure Boot by this key"
    )
    parser.add_argument("--secure-boot-certificate", type=Path, metavar="PEM", help="the key's certificate")
    parser.add_argument("--fast", action="store_true", help="compress less: for those who change the recipe")
    parser.add_argument(
        "--lock", action="store_true", help="find the packages' present versions, and lock them"
    )
    return parser


def _context(arguments: argparse.Namespace) -> Context:
    """Build the context from the command line. Raises LocalError."""
    output = arguments.output.absolute()
    return Context(
        name=arguments.board,
        board=boards.read(arguments.board),
        source=arguments.source.absolute(),
        output=output / arguments.board,
        cache=_cache(arguments),
        version=VERSION,
        serial=_serial(arguments.source) if arguments.serial is None else arguments.serial,
        epoch=debian.epoch(),
        level=3 if arguments.fast else 19,
        signer=signing_key(arguments.secure_boot_key, arguments.secure_boot_certificate),
    )


def _cache(arguments: argparse.Namespace) -> Path:
    cache: Path = arguments.cache or arguments.output / "cache"
    return cache.absolute()


def _lock(arguments: argparse.Namespace) -> str:
    """Lock all packages; return a line that says which."""
    return f"locked {debian.lock(_cache(arguments))} Debian and {python.lock()} Python packages"


def _make(context: Context) -> str:
    """Make the image; return a line that says where it is."""
    manifest = build(context)
    shutil.rmtree(context.work)
    size = (manifest.parent / "root.squashfs").stat().st_size
    return f"{manifest.with_suffix('.img')}: its root has {size / 2**20:.1f} MiB"


def main() -> int:
    """Run the builder. Exit codes: 0 made, 1 a step failed, 2 wrong arguments."""
    arguments = _parser().parse_args()
    failure = 2
    try:
        context = None if arguments.lock else _context(arguments)
        failure = 1
        told = _make(context) if context else _lock(arguments)
        print(f"millpond image: {told}", flush=True)
    except (MillpondError, OSError) as error:
        print(f"millpond: {error}", file=sys.stderr)
        return failure
    return 0


if __name__ == "__main__":
    sys.exit(main())
