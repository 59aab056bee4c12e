# SPDX-License-Identifier: Apache-2.0
"""Entry: ``-m guest.customize ROOT`` adds to unpacked packages the files that a guest needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from . import services

HERE = Path(__file__).parent
UNUSED = (
    "usr/share/doc",
    "usr/share/i18n",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/misc/pci.ids",
    "usr/share/zoneinfo",
    "usr/lib/python3.11/idlelib",
    "usr/lib/python3.11/lib2to3",
    "usr/lib/python3.11/pydoc_data",
    "usr/lib/python3.11/test",
    "lib/udev",
)
MODULES = ("virtio_pci", "virtio_blk", "squashfs", "overlay")
"""What the initial file system needs; ext4 is in the kernel. The root has all of the kernel's package."""
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost guest\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/nvme/hostnqn": "nqn.2014-08.org.nvmexpress:uuid:6d696c6c-706f-4e64-8000-000000000001\n",
    "etc/nvme/hostid": "6d696c6c-706f-4e64-8000-000000000001\n",
    **services.FILES,
}


def main(root: Path) -> None:
    """Fill in files, byte-code and the initial file system below ``root``."""
    for name in UNUSED:
        shutil.rmtree(root / name, ignore_errors=True)
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, target in services.LINKS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    _run(root, "python3", "-m", "compileall", "-q", "/usr/lib/python3.11")
    release = next((root / "lib/modules").iterdir()).name
    _run(root, "depmod", release)
    (root / f"boot/vmlinuz-{release}").rename(root / "boot/vmlinuz")
    make_initrd(root, release)


def _run(root: Path, *argv: str) -> None:
    subprocess.run(["chroot", str(root), *argv], check=True)


def make_initrd(root: Path, release: str) -> None:
    """Busybox, the few modules by the order in which they load, and initrd-init as /init; not compressed."""
    tree = root / "boot/tree"
    for name in ("bin", "dev", "modules", "proc", "root", "sys"):
        (tree / name).mkdir(parents=True)
    shutil.copy2(root / "bin/busybox", tree / "bin/busybox")
    shutil.copyfile(HERE / "initrd-init", tree / "init")
    (tree / "init").chmod(0o755)
    modules = root / "lib/modules" / release
    for number, path in enumerate(_in_order(modules)):
        shutil.copyfile(modules / path, tree / "modules" / f"{number:02}.ko")
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with (root / "boot/initrd").open("wb") as made:
        command = ["cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0"]
        subprocess.run(command, cwd=tree, input=names.encode(), stdout=made, check=True)
    shutil.rmtree(tree)


def _in_order(modules: Path) -> list[str]:
    """The files of MODULES and of what they depend on, dependencies first."""
    depends: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, needs = line.partition(":")
        depends[path] = needs.split()
    order: list[str] = []
    for name in MODULES:
        path = next(path for path in depends if path.endswith(f"/{name}.ko"))
        order += [needed for needed in (*reversed(depends[path]), path) if needed not in order]
    return order


if __name__ == "__main__":
    main(Path(sys.argv[1]))
