# SPDX-License-Identifier: Apache-2.0
"""Edge (this machine): all tables and figures with data of the paper Federated-learning server on a DPU, in
its order.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from bench.experiment import Run
from bench.papers.dpu_server import convergence, timing
from bench.papers.exhibit import Exhibit, Paper, Shown, computed

_PRINTED = {
    "OS": "all: Ubuntu 20.04",
    "CPU": "server: Intel Core i7-11700; DPU: ARM Cortex-A72; clients: Intel Core i7-10700",
    "RAM": "server: 16 GB; DPU: 16 GB; clients: 32 GB",
    "NIC": "server: NVIDIA BF-2 DPU; clients: Intel XXV710-DA2",
}


def measure_machines(_run: Run) -> Shown:
    """Table 1: the three machines, all of which are this one here."""
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GB"
    ours = (f"Linux {platform.release().split('-')[0]}", _processor(), memory, "loopback")
    rows = [computed(part, "", paper, own) for (part, paper), own in zip(_PRINTED.items(), ours, strict=True)]
    text = "No such card is here: one machine is all three, and a part of a core stands for the DPU."
    return Shown(tuple(rows), "server, DPU and clients are processes of one machine", text)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


PAPER = Paper(
    "dpu-server",
    "Federated-learning server on a DPU",
    (
        Exhibit("table-1", "Table 1: specification of the machines", measure_machines),
        Exhibit("fig-6", "Fig. 6: server response time at the client", timing.measure_response),
        Exhibit("fig-7", "Fig. 7: server execution time at the server", timing.measure_parts),
        Exhibit("fig-8", "Fig. 8: training convergence", convergence.measure),
    ),
)
