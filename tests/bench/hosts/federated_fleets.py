# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): two emulated fleets that share the demo's digits, and a federation of them by Flower."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
    """Two fleets that are on, and the apps that train on them, by seed."""

    fleets: tuple[Emulation, Emulation]
    flowers: Mapping[int, Flower]

    @property
    def flower(self) -> Flower:
        """The app of SEED."""
        return self.flowers[SEED]


def fleet_of(
    stack: ExitStack, base: Path, shares: Sequence[int], seeds: Sequence[int] = (SEED,)
) -> Emulation:
    """Switch a fleet on whose devices have these of the six shares of the digits, divided by each seed."""
    base.mkdir()
    names = [f"csd{number}" for number in range(len(shares))]
    emulation = create(base, names)
    for seed in seeds:
        division = data.divide(data.load(), 6, seed)
        for name, share in zip(names, shares, strict=True):
            flash = emulation.fleet.device_directory(name) / "flash"
            data.write(flash / "private" / f"digits-{seed}", division.private[share])
            data.write(flash / "public" / f"digits-{seed}", division.public[share])
        data.write(base / f"test-{seed}", division.test)
    stack.callback(emulation.stop)
    emulation.start()
    emulation.wait_ready(180.0)
    return emulation


def job_file(base: Path, rounds: int, seed: int = SEED) -> Path:
    """Write the demo's job of a seed and its data, which ends after so many rounds."""
    text = (EXAMPLES / "digits.toml").read_text()
    for old, new in (
        ("rounds = 20", f"rounds = {rounds}"),
        ("seed = 7", f"seed = {seed}"),
        ('digits"', f'digits-{seed}"'),
        ('"test"', f'"test-{seed}"'),
    ):
        assert old in text
        text = text.replace(old, new)
    lines = [line for line in text.splitlines() if not line.startswith("target")]
    path = base / f"federated-{seed}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def check() -> None:
    """Raise Unmeasured where no federation can run."""
    if complaint := why_not():
        raise Unmeasured(f"no fleet: {complaint}")
    if not (ENVIRONMENT / "bin" / "flwr").exists():
        raise Unmeasured("no Flower: make flower")


@contextmanager
def federation(run: Run, seeds: Sequence[int] = (SEED,)) -> Iterator[Federation]:
    """Switch two fleets of three devices on, and write the apps. Raises Unmeasured."""
    check()
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-hosts-")))
        first = fleet_of(stack, base / "a", (0, 1, 2), seeds)
        second = fleet_of(stack, base / "b", (3, 4, 5), seeds)
        run.say("two fleets of three devices are ready")
        flowers = dict[int, Flower]()
        for seed in seeds:
            app = base / f"app-{seed}"
            project.create(app, job_file(base / "a", 20, seed), EVERY)
            flowers[seed] = Flower(ENVIRONMENT, app)
        yield Federation((first, second), flowers)


def noted(flower: Flower) -> list[dict[str, Any]]:
    """Return what the ServerApp has noted of its rounds so far."""
    path = flower.folder / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def accuracy(lines: list[dict[str, Any]]) -> float:
    """Return the accuracy after the last round that was scored."""
    return float([line["scores"]["host-accuracy"] for line in lines if "scores" in line][-1])
