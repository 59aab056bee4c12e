# SPDX-License-Identifier: Apache-2.0
"""Edge (the kernel, package metadata): looks at what millpond uses of this machine."""

from __future__ import annotations

import ctypes
import platform
import re
import resource
from importlib import metadata

from millpond.base.errors import LocalError
from millpond.host.remote.doctor import trial
from millpond.host.remote.doctor.facts import SystemFacts
from millpond.linux import descriptors
from millpond.linux.limits import cgroups

_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([0-9.]+))?[^;]*(;.*)?")
_OF_DEVELOPERS = re.compile(r"""extra == ['"](coverage|dev|docs|release)['"]""")
_UNSYNCHRONISED = 5  # TIME_ERROR
_TIMEX_BYTES = 512  # struct timex takes less; zeroed, it asks and sets nothing


def look(*, has_namespaces: bool) -> SystemFacts:
    """Look at this machine; what needs namespaces is left out where there are none."""
    packages, needed = _packages()
    version, withheld = _groups()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SystemFacts(
        kernel=_kernel(platform.release()),
        python=platform.python_version(),
        processor=platform.machine(),
        trial=trial.run() if has_namespaces else None,
        packages=packages,
        needed=needed,
        cgroups=version,
        withheld=withheld,
        descriptors=most,
        few=descriptors.FEW,
        is_synchronised=_is_synchronised(),
    )


def _kernel(release: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _packages() -> tuple[dict[str, str | None], dict[str, str]]:
    """Return the versions of all distributions that millpond names, and what is needed of them."""
    try:
        named = metadata.requires("millpond") or []
    except metadata.PackageNotFoundError:  # a tree that runs without being installed
        return {}, {}
    found: dict[str, str | None] = {}
    needed: dict[str, str] = {}
    for line in named:
        if not (parts := _REQUIREMENT.match(line)) or parts[1] == "millpond":
            continue
        name, least, marker = parts[1].lower(), parts[2] or "", parts[3]
        if marker and _OF_DEVELOPERS.search(marker):
            continue
        if not marker:
            needed[name] = least
        if name not in found:
            found[name] = _version(name)
    return found, needed


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _groups() -> tuple[int, tuple[str, ...]]:
    try:
        return cgroups.withheld()
    except (LocalError, OSError):
        return 0, ()


def _is_synchronised() -> bool | None:
    """Return the kernel's word on its clock: adjtimex(2) without a change."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _UNSYNCHRONISED
