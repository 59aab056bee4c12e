# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): two emulated fleets that share the demo's digits, and a federation of them by Flower."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiment import Run, Unmeasured
from millpond.host.cli.federation import project
from millpond.host.cli.federation.processes import Flower
from millpond.host.emulation.demo import data
from system.support import EXAMPLES, Emulation, create, why_not

ENVIRONMENT = Path(".flower")
EMULATION = "devices are process trees of one machine, both hosts share its processors and loopback"
SEED, EVERY = 7, 4


@dataclass(frozen=True, slots=True)
class Federation:
    """Two fleets that are on, and the app that trains on them."""

    fleets: tuple[Emulation, Emulation]
    flower: Flower


def fleet_of(stack: ExitStack, base: Path, shares: Sequence[int]) -> Emulation:
    """Switch a fleet on whose devices have these of the six shares of the digits."""
    base.mkdir()
    names = [f"csd{number}" for number in range(len(shares))]
    emulation = create(base, names)
    division = data.divide(data.load(), 6, SEED)
    for name, share in zip(names, shares, strict=True):
        flash = emulation.fleet.device_directory(name) / "flash"
        data.write(flash / "private" / "digits", division.private[share])
        data.write(flash / "public" / "digits", division.public[share])
    data.write(base / "test", division.test)
    stack.callback(emulation.stop)
    emulation.start()
    emulation.wait_ready(180.0)
    return emulation


def job_file(base: Path, rounds: int) -> Path:
    """Write the demo's job, which ends after so many rounds."""
    lines = (EXAMPLES / "digits.toml").read_text().replace("rounds = 20", f"rounds = {rounds}").splitlines()
    path = base / "federated.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith("target")) + "\n")
    return path


def check() -> None:
    """Raise Unmeasured where no federation can run."""
    if complaint := why_not():
        raise Unmeasured(f"no fleet: {complaint}")
    if not (ENVIRONMENT / "bin" / "flwr").exists():
        raise Unmeasured("no Flower: make flower")


@contextmanager
def federation(run: Run, every: int = EVERY) -> Iterator[Federation]:
    """Switch two fleets of three devices on, and write the app. Raises Unmeasured."""
    check()
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-hosts-")))
        first = fleet_of(stack, base / "a", (0, 1, 2))
        second = fleet_of(stack, base / "b", (3, 4, 5))
        run.say("two fleets of three devices are ready")
        project.create(base / "app", job_file(base / "a", 20), every)
        yield Federation((first, second), Flower(ENVIRONMENT, base / "app"))


def noted(flower: Flower) -> list[dict[str, Any]]:
    """Return what the ServerApp has noted of its rounds so far."""
    path = flower.folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def accuracy(lines: list[dict[str, Any]]) -> float:
    """Return the accuracy after the last round that was scored."""
    return float([line["scores"]["host-accuracy"] for line in lines if "scores" in line][-1])
