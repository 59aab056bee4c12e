# SPDX-License-Identifier: Apache-2.0
"""Pure: Table I: Laguna's features beside the boards that images are built for."""

from __future__ import annotations

from collections.abc import Iterator

from bench.experiment import Run
from bench.papers.exhibit import Exhibit, Shown, Value, computed
from millpond.images import boards
from millpond.images.boards import Board

_TUNNELS = {
    "nvme": "TCP/IP tunnel by vendor commands of NVMe",
    "ivshmem": "TCP/IP tunnel by NVMe-style queues in shared memory (PCI BAR)",
}
_DATA_SHEETS = {
    "bluefield2": ("PCIe card", "8 Cortex-A72", "16 GB"),
    "rockpro64": ("single board, 133 x 80 mm", "2 Cortex-A72, 4 Cortex-A53", "2 or 4 GB"),
    "generic-uefi": ("any", "any aarch64", "any"),
}
"""Form factor, cores and memory as the makers have them; the files of boards do not name them."""


def measure(_run: Run) -> Shown:
    """Read the boards' files."""
    rows = [row for name in boards.names() for row in _rows(name, boards.read(name))]
    back_end = "3 + 1 Cortex-M7, flash translation"
    rows.append(
        computed("any board: front end and back end", "", back_end, "not modelled: the board's drive")
    )
    rows.append(
        computed("any board: link to the flash", "", "direct, inside the chip", "the board's own disk")
    )
    return Shown(
        tuple(rows),
        "nothing is measured: only QEMU's board has been at hand; its processors and drives are QEMU's",
        "Laguna is an ASIC with its own controller; millpond's boards are bought ones with their own drives.",
    )


def _rows(name: str, board: Board) -> Iterator[Value]:
    form, cores, memory = _features(name, board)
    yield computed(f"{board.title}: form factor", "", "M.2 22110", form)
    yield computed(f"{board.title}: cores for applications", "", "4 Cortex-A53, 1.0 GHz", cores)
    yield computed(f"{board.title}: memory", "", "4 GB, shared", memory)
    yield computed(
        f"{board.title}: link", "", "TCP/IP tunnel over NVMe/PCIe", _TUNNELS[board.tunnel.transport]
    )
    yield computed(f"{board.title}: tried", "", "prototype", board.tried)


def _features(name: str, board: Board) -> tuple[str, str, str]:
    if board.qemu is None:
        return _DATA_SHEETS[name]
    arguments = board.qemu.arguments
    cores = f"{board.qemu.processors} {arguments[arguments.index('-cpu') + 1]}, emulated"
    return "virtual machine", cores, f"{board.qemu.memory} MiB"


EXHIBIT = Exhibit("table-1", "Table I: Laguna's features", measure)
