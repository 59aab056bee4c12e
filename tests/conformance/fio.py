# SPDX-License-Identifier: Apache-2.0
"""Edge: fio writes on one mount of a volume, and verifies on another what is there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from conformance.results import Verified
from conformance.suite import capture

_SECONDS = 120.0
_SIZES = {"4k": "4m", "5000": "4m", "64k": "32m", "1m": "64m"}
"""By size of block: how much is written. 5,000 bytes never fit into pages."""
_ORDERS = ("write", "randwrite")


def verify(program: str, places: Mapping[str, Path], scratch: Path, say: Callable[[str], None]) -> Verified:
    """Each mount writes, for itself and for the others, in order and not, with several sizes of blocks.

    A pair of mounts has one file, which is written again and again: what the one that verifies has seen of it
    before is old, and has blocks of another size.
    """
    failures, count = list[str](), 0
    for (writer, its), (reader, other) in itertools.product(places.items(), repeat=2):
        name, before = f"fio-{writer}-{reader}", len(failures)
        for number, options in enumerate(_jobs(), 1):
            if said := _run(program, its / name, other / name, [*options, f"--randseed={number}"], scratch):
                failures.append(f"{writer} writes, {reader} verifies, {' '.join(options)}: {said}")
            count += 1
        say(f"fio: {writer} writes, {reader} verifies: {len(failures) - before} of {number} fail")
    return Verified(count, failures)


def _jobs() -> Iterator[list[str]]:
    for order, (block, size) in itertools.product(_ORDERS, _SIZES.items()):
        yield [f"--rw={order}", f"--bs={block}", f"--size={size}"]


def _run(program: str, its: Path, other: Path, options: Sequence[str], scratch: Path) -> str:
    """What fio says when it fails; nothing, if all is well."""
    argv = [program, "--name=verify", "--ioengine=psync", "--verify=crc32c", "--verify_fatal=1", *options]
    argv += ["--verify_state_save=0", "--end_fsync=1"]
    for more in ([f"--filename={its}", "--do_verify=0"], [f"--filename={other}", "--verify_only"]):
        text, late = capture(["sh", "-c", '"$0" "$@"; echo "status $?"', *argv, *more], scratch, _SECONDS)
        if late or not text.endswith("status 0\n"):
            return _complaint(text) if not late else f"it was stopped after {_SECONDS:.0f} s"
    return ""


def _complaint(text: str) -> str:
    words = ("verify:", "error", "bad")
    return next((line for line in text.splitlines() if any(word in line for word in words)), "it failed")
