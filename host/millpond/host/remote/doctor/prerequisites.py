# SPDX-License-Identifier: Apache-2.0
"""Pure: judges whether a machine can emulate a fleet."""

from __future__ import annotations

from collections.abc import Iterator

from millpond.host.remote.doctor.diagnosis import Diagnosis, ok, wrong
from millpond.host.remote.doctor.facts import DeviceNode, MachineFacts

_SETTINGS = {
    "kernel.unprivileged_userns_clone": "1",
    "kernel.apparmor_restrict_unprivileged_userns": "0",
}
"""The values of the kernel's settings with which a user may make namespaces."""


def checks(facts: MachineFacts) -> Iterator[Diagnosis]:
    """Yield the diagnosis of each need."""
    yield _node("fuse", "/dev/fuse", facts.fuse, facts)
    yield _node("tun", "/dev/net/tun", facts.tun, facts)
    yield _namespaces(facts)
    yield (
        ok("sshd", "installed")
        if facts.has_sshd
        else wrong("sshd", "there is no /usr/sbin/sshd", mend="sudo apt install openssh-server")
    )


def _node(name: str, path: str, node: DeviceNode, facts: MachineFacts) -> Diagnosis:
    if node.exists and not node.fault:
        return ok(name, f"{path} opens")
    if facts.in_container:
        mend = f"start the container with --device {path}"
    else:
        mend = f"sudo chmod 0666 {path}" if node.exists else f"sudo modprobe {name}"
    what = f"this user cannot open {path}" if node.exists else f"there is no {path}"
    return wrong(name, what, said=node.fault, mend=mend)


def _namespaces(facts: MachineFacts) -> Diagnosis:
    if not facts.namespaces:
        return ok("namespaces", "a process gets its own" if facts.is_root else "every user gets their own")
    if facts.in_container or facts.is_root:
        mend = "start the container with --privileged"
        return wrong("namespaces", "no process may make any", said=facts.namespaces, mend=mend)
    for setting, good in _SETTINGS.items():
        if facts.settings.get(setting, good) != good:
            what = f"{setting} lets only root make them"
            return wrong("namespaces", what, said=facts.namespaces, mend=f"sudo sysctl -w {setting}={good}")
    mend = "sudo sysctl -w user.max_user_namespaces=10000"
    return wrong("namespaces", "only root may make them", said=facts.namespaces, mend=mend)
