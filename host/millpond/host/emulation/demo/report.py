# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the demo's report: JSON, a plot of the accuracy, and text for the terminal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from millpond.base.schema import dump
from millpond.base.text import counted
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.monitor import job_plot
from millpond.host.monitor.job_view import JobCourse
from millpond.host.records.jobs import Round
from millpond.host.terminal.printing import size
from millpond.wire.control_messages import Ledger

CANARY_BYTES = {"text": 31, "image": 64, "image-float32": 256}


@dataclass(frozen=True, slots=True)
class Facts:
    """The observations of a demo, from which its report is made."""

    job: JobInfo
    rounds: Sequence[Round]
    ledgers: Mapping[str, Ledger]
    devices: Sequence[DeviceInfo]
    ssh: dict[str, Any]
    volumes: list[dict[str, Any]]
    seconds: float


def build(facts: Facts, directory: Path, tracer: str) -> dict[str, Any]:
    """Return the report; also write ``report.json``, ``model.safetensors`` and ``accuracy.png``."""
    ledgers = facts.ledgers.values()
    kinds = {kind for ledger in ledgers for kind in ledger.sent}
    names = sorted({name for ledger in ledgers for name in ledger.canaries} - {tracer})
    seen = {name: sum(ledger.canaries[name] for ledger in ledgers) for name in names}
    model = directory / "model.safetensors"
    shutil.copy(facts.job.model, model)
    report = {
        "metric": facts.job.metric,
        facts.job.metric: facts.job.score,
        "rounds": len(facts.rounds),
        "seconds": round(facts.seconds, 2),
        "training_seconds": round(sum(result.seconds for result in facts.rounds), 2),
        "devices": [device.name for device in facts.devices],
        "private_bytes_kept": sum(ledger.private_bytes for ledger in ledgers),
        "tunnel_bytes": {kind: sum(ledger.sent[kind] for ledger in ledgers) for kind in sorted(kinds)},
        "tunnel_interfaces": {
            device.name: {"to": device.tunnel[0], "from": device.tunnel[1]} for device in facts.devices
        },
        "private_bytes_leaked": sum(CANARY_BYTES[name] * count for name, count in seen.items()),
        "privacy": {
            "canaries_seen": seen,
            "control_found": sum(ledger.canaries[tracer] for ledger in ledgers),
            "searched": "every byte that an agent sends, before encryption",
            "markers": "a text in private data files, in a note and in a file's name; a private image, as it "
            "lies in its file and as a worker computes with it",
        },
        "model": str(model),
        "curve": str(directory / "accuracy.png"),
        "ssh": facts.ssh,
        "volumes": facts.volumes,
        "emulation": "devices are process trees in namespaces of this machine; speeds are this machine's",
        "history": [dump(result) for result in facts.rounds],
    }
    (directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _draw(facts, directory / "accuracy.png")
    return report


def _draw(facts: Facts, path: Path) -> None:
    title = f"{facts.job.name}: emulated devices: {len(facts.devices)}"
    drawn = job_plot.curves([JobCourse(facts.job, tuple(facts.rounds))], metric=facts.job.metric)
    job_plot.save(drawn, title, facts.job.unit, path)


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report on a terminal."""
    console.rule("report")
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _lines(report):
        table.add_row(Text(name, "bold"), value)
    console.print(table)
    ssh, volume = report["ssh"], report["volumes"][0]
    console.rule(f"millpond run {ssh['device']} -- '{ssh['command']['line']}'")
    console.print(ssh["command"]["stdout"].rstrip(), markup=False)
    console.rule(f"the volume of {volume['device']}, mounted on the host")
    console.print("\n".join(volume["files"]), markup=False)
    console.print(
        "private: no such file or directory" if not volume["private_exists"] else "private: VISIBLE"
    )


def _lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    crossed = ", ".join(f"{size(count)} {kind}" for kind, count in report["tunnel_bytes"].items() if count)
    privacy, metric = report["privacy"], report["metric"]
    return [
        (metric, f"{report[metric]:.4f} after {counted(report['rounds'], 'round')}"),
        ("time", f"{report['seconds']:.1f} s in all, {report['training_seconds']:.1f} s of it in rounds"),
        ("private data", f"{size(report['private_bytes_kept'])} stayed on the devices"),
        ("left the devices", crossed),
        (
            "private markers",
            f"{sum(privacy['canaries_seen'].values())} of private texts and images seen in all that left; "
            f"the controls in public files: {privacy['control_found']}",
        ),
        ("model", report["model"]),
        ("curve", report["curve"]),
        ("emulation", report["emulation"]),
    ]
