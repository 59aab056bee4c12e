# SPDX-License-Identifier: Apache-2.0
"""Entry: the volume against its peers, ``make bench-volume``: tables, ``volume.json`` and a picture."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import harness
from bench.experiment import Experiment, Run
from bench.picture import draw_ratios
from bench.rows import Row
from bench.tunnel.isolation import run_isolated
from bench.tunnel.programs import CompilationFailed
from bench.volume import copies, device, faults, fuse_python, host, million
from bench.volume.route import RouteFailed
from bench.volume.tools import Tools
from millpond.linux.confinement.sandbox import accept_signals

_Measure = Callable[[Tools, Run], Sequence[Row]]
_MEASURED: dict[str, tuple[str, _Measure]] = {
    "device": ("The device's mount against the backing file system", device.measure),
    "device-small": ("Many small files on the device against the backing file system", device.measure_small),
    "fuse-python": ("The device's mount by fuse-python against libfuse in C", fuse_python.measure),
    **{name: (part.title, functools.partial(host.measure, part)) for name, part in host.PARTS.items()},
    "copy": ("millpond cp of many small files against rsync", copies.measure),
    "slow-flash": ("The host syncs to a slow flash", faults.measure_slow_flash),
    "stalled": ("The host's mount of a device that stands still", faults.measure_stalled),
    **{name: (part.title, functools.partial(million.measure, part)) for name, part in million.PARTS.items()},
}
BY_NAME = tuple(million.PARTS)
"""The experiments that take so long that they are done only if they are named."""
_SECONDS = dict.fromkeys(BY_NAME, 4 * 3600)
_FIGURES = {
    **{name: tuple(part.figures) for name, part in host.PARTS.items()},
    **{name: (f"million_files.{part.key}",) for name, part in million.PARTS.items()},
    "copy": copies.FIGURES,
    "slow-flash": ("slow_flash",),
    "stalled": ("stalled_stats",),
}
USUAL = [name for name in _MEASURED if name not in BY_NAME]


def main() -> int:
    """Exit codes: 0 done, 1 millpond's mount or the benchmark failed, 2 wrong arguments, 130 interrupted."""
    parser = _parser()
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as scratch:
        tools = Tools(Path(scratch).resolve(), arguments.c_example, arguments.files, arguments.repeats)
        experiments = [
            Experiment(
                name, title, functools.partial(measure, tools), _SECONDS.get(name), _FIGURES.get(name, ())
            )
            for name, (title, measure) in _MEASURED.items()
        ]
        chosen = harness.chosen_of(experiments, arguments.only or USUAL, parser)
        output = harness.folder_of(arguments)
        return run_isolated(lambda: bench(chosen, quick=arguments.quick, output=output))


def _parser() -> argparse.ArgumentParser:
    parser = harness.command_line("volume", "The volume's mounts against their peers.")
    parser.add_argument(
        "--c-example",
        type=Path,
        metavar="PROGRAM",
        help="libfuse's example 'passthrough', built, to compare with",
    )
    parser.add_argument(
        "--files",
        type=int,
        metavar="N",
        help=f"the files of {', '.join(BY_NAME)}, done only if they are named; 1,200,000 by itself",
    )
    parser.add_argument(
        "--repeats",
        type=harness.positive,
        metavar="N",
        help="of each of the host's experiments; 5 or 3 by itself",
    )
    return parser


def bench(chosen: Sequence[Experiment], *, quick: bool, output: Path) -> int:
    """Do them, print their tables, write what was found; in the namespaces of ``run_isolated``."""
    accept_signals()  # or those that are started would not end when they are told to
    failures = (RouteFailed, CompilationFailed)
    found, whole = harness.run_all(
        "volume", chosen, quick=quick, path=output / "volume.json", failures=failures
    )
    draw_ratios(found.rows, f"medians and ranges, {os.cpu_count()} cores", output / "volume.png")
    print(f"written: {output}/volume.png")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
