# SPDX-License-Identifier: Apache-2.0
"""Edge: QEMU as a child process: its command line, its console, and its end with its parent process."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from millpond.linux.syscalls import killed_with_parent

from .build import has_wheels, is_built
from .repository import ROOT, make_image
from .torch_image import make_torch_image

IMAGE = ROOT / ".guest"
QEMU = "qemu-system-x86_64"
KVM = Path("/dev/kvm")
_PROBE_SECONDS = 15.0
KERNEL_COMMAND = "console=ttyS0 quiet panic=-1 no_timer_check mitigations=off nokaslr intel_iommu=on iommu=pt"


ACCELERATORS = {
    "kvm": ("-machine", "q35,accel=kvm,kernel-irqchip=split", "-cpu", "host"),  # split, for the IOMMU
    "tcg": ("-machine", "q35,accel=tcg", "-cpu", "max"),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a guest gets beyond its disks and its command port."""

    arguments: tuple[str, ...] = ()
    """More arguments for QEMU."""
    descriptors: tuple[int, ...] = ()
    """Descriptors that QEMU inherits, under the same numbers."""
    memory: int = 512
    """MiB."""
    processors: int = 1
    network: bool = True
    """QEMU's own network: the guest is 10.0.2.15, this machine's 127.0.0.1 is 10.0.2.2."""
    init: str = ""
    """Its process 1; agent.py itself if this is empty."""
    disks: Mapping[str, Path] = field(default_factory=dict)
    """Images of ext4 that outlast the guest, by serial number: on ``layer`` is what is written to the root,
    and ``flash`` is mounted at /flash.
    """
    torch: bool = False
    """The virtual environment's torch is at :data:`torch_image.PLACE`."""


def why_no_guest() -> str:
    """Why no guest can be started here; empty if one can."""
    for tool in (QEMU, "mksquashfs"):
        if not shutil.which(tool):
            return f"{tool} is not installed: images/prerequisites.sh guest"
    if not is_built(IMAGE):
        return "the guest is not built, or not from this recipe: make guest"
    return ""


def why_no_wheels() -> str:
    """Why nothing can be installed in a guest; empty if it can."""
    if reason := why_no_guest():
        return reason
    if not shutil.which("mke2fs"):
        return "mke2fs is not installed: sudo apt install e2fsprogs"
    return "" if has_wheels(IMAGE) else "the guest's packages are not there, or others are needed: make guest"


@functools.cache
def accelerator() -> str:
    """The key of what runs the guest's processor: KVM only where it has booted this kernel once.

    Below another hypervisor /dev/kvm may be there and QEMU abort, or the kernel hang. Without a root file
    system a kernel that has come so far panics, which ends QEMU.
    """
    if not os.access(KVM, os.R_OK | os.W_OK):
        return "tcg"
    argv = [*_kernel("kvm"), "-m", "256", "-append", KERNEL_COMMAND]
    try:
        done = subprocess.run(
            argv,
            preexec_fn=killed_with_parent(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "tcg"
    return "kvm" if b"Kernel panic - not syncing: VFS" in done.stdout else "tcg"


class Machine:
    """A running QEMU; ``port`` is the command port's other end. Its files are in ``folder``."""

    def __init__(self, hardware: Hardware, folder: Path) -> None:
        self._console = folder / "console.log"
        make_image(folder / "millpond.squashfs", folder)
        if hardware.torch:
            make_torch_image(folder / "torch.squashfs")
        self.port, theirs = socket.socketpair()
        with theirs, self._console.open("ab") as console:
            self.process = subprocess.Popen(
                [
                    *_basics(hardware),
                    *_disks(hardware, folder),
                    *_ports(theirs.fileno()),
                    *_network(hardware),
                    *_size(hardware),
                ],
                pass_fds=(theirs.fileno(), *hardware.descriptors),
                preexec_fn=killed_with_parent(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def console(self) -> str:
        """What the kernel, and QEMU itself, have said."""
        return self._console.read_text(errors="replace")

    def close(self) -> None:
        """End QEMU; the guest has nothing that it could lose."""
        self.process.kill()
        self.process.wait()
        self.port.close()


def _basics(hardware: Hardware) -> list[str]:
    init = [f"init={hardware.init}"] if hardware.init else []
    return [
        *_kernel(accelerator()),
        "-initrd",
        str(IMAGE / "initrd"),
        "-append",
        " ".join([KERNEL_COMMAND, *init]),
    ]


def _kernel(accelerator: str) -> list[str]:
    """The board and the kernel; ``accelerator`` is one of :data:`ACCELERATORS`."""
    argv = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    argv += [*ACCELERATORS[accelerator], "-device", "intel-iommu,intremap=on"]
    return [*argv, "-serial", "stdio", "-kernel", str(IMAGE / "vmlinuz")]


def _disks(hardware: Hardware, folder: Path) -> list[str]:
    """By their serial numbers initrd-init tells them apart."""
    shared = {"root": IMAGE / "root.squashfs", "millpond": folder / "millpond.squashfs"}
    if hardware.torch:
        shared["torch"] = folder / "torch.squashfs"
    argv: list[str] = []
    for name, image in (*shared.items(), *hardware.disks.items()):
        access = "readonly=on,file.locking=off" if name in shared else "cache=unsafe"
        argv += ["-drive", f"if=none,id={name},format=raw,{access},file={image}"]
        argv += ["-device", f"virtio-blk-pci,drive={name},serial={name}"]
    return argv


def _ports(descriptor: int) -> list[str]:
    return [
        *("-device", "virtio-serial-pci"),
        *("-chardev", f"socket,id=agent,fd={descriptor}"),
        *("-device", "virtserialport,chardev=agent,name=millpond.agent"),
    ]


def _network(hardware: Hardware) -> list[str]:
    if not hardware.network:
        return []
    return ["-netdev", "user,id=slirp", "-device", "virtio-net-pci,netdev=slirp,romfile="]


def _size(hardware: Hardware) -> list[str]:
    return ["-m", str(hardware.memory), "-smp", str(hardware.processors), *hardware.arguments]
