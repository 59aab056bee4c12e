# SPDX-License-Identifier: Apache-2.0
"""Pure: the guest under systemd: a unit for the port, and the units that it can do without."""

from __future__ import annotations

INIT = "/lib/systemd/systemd"
PORT = """\
[Unit]
Description=runs programs for the test that holds the guest's port

[Service]
ExecStartPre=/sbin/modprobe -a virtio_console
ExecStart=/usr/bin/python3 -S /millpond/tests/guest/agent.py
StandardOutput=journal+console
OOMScoreAdjust=-900
"""
FILES = {
    "etc/machine-id": "6d696c6c706f4e648000000000000002\n",
    "etc/systemd/system/guest-port.service": PORT,
    "etc/systemd/journald.conf.d/guest.conf": "[Journal]\nStorage=persistent\n",
    "etc/systemd/system.conf.d/guest.conf": "[Manager]\nShowStatus=no\n",
}
WANTED = ("guest-port.service",)
MASKED = (
    "console-getty.service",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "e2scrub_reap.service",
    "getty.target",
    "ldconfig.service",
    "modprobe@configfs.service",
    "modprobe@drm.service",
    "modprobe@efi_pstore.service",
    "proc-sys-fs-binfmt_misc.automount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-ask-password-console.path",
    "systemd-ask-password-wall.path",
    "systemd-binfmt.service",
    "systemd-boot-system-token.service",
    "systemd-hwdb-update.service",
    "systemd-logind.service",
    "systemd-network-generator.service",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-repart.service",
    "systemd-sysusers.service",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-udevd.service",
    "timers.target",
    "remote-fs.target",
)
LINKS = {
    "etc/systemd/system/default.target": "/lib/systemd/system/multi-user.target",
    **{f"etc/systemd/system/multi-user.target.wants/{name}": f"../{name}" for name in WANTED},
    **{f"etc/systemd/system/{name}": "/dev/null" for name in MASKED},
}
