# SPDX-License-Identifier: Apache-2.0
"""Pure: Table I: Laguna's features beside the boards that images are built for."""

from __future__ import annotations

from collections.abc import Sequence

from bench.experiment import Run
from bench.papers.exhibit import Exhibit, Shown, computed
from millpond.images import boards
from millpond.images.boards import Board

_TUNNELS = {
    "nvme": "TCP/IP tunnel by vendor commands of NVMe",
    "ivshmem": "TCP/IP tunnel by NVMe-style queues in shared memory (PCI BAR)",
}
_DATA_SHEETS = {
    "bluefield2": ("PCIe card", "16 GB", "8 Cortex-A72"),
    "rockpro64": ("single board, 133 x 80 mm", "2 or 4 GB", "2 Cortex-A72, 4 Cortex-A53"),
    "generic-uefi": ("any", "any", "any aarch64"),
}
"""Form factor, memory and cores as the makers have them; the files of boards do not name them."""
_PRINTED = {
    "form factor": "M.2 22110",
    "memory": "4 GB, shared",
    "processors for applications": "4 Cortex-A53, 1.0 GHz",
    "link of applications to the host": "TCP/IP tunnel over NVMe/PCIe",
}
"""The paper's cells."""


def measure(_run: Run) -> Shown:
    """Read the boards' files."""
    read = {name: boards.read(name) for name in boards.names()}
    features = [_features(name, board) for name, board in read.items()]
    titles = [board.title for board in read.values()]
    rows = [
        computed(what, "", paper, _by_board(titles, ours))
        for (what, paper), ours in zip(_PRINTED.items(), zip(*features, strict=True), strict=True)
    ]
    drive = "3 Cortex-M7 (back end), 1 Cortex-M7 (front end), PCIe Gen 3.0 x4"
    rows.append(computed("drive and its link to the host", "", drive, "not modelled: the board's own drive"))
    rows.append(
        computed("link of applications to the flash", "", "direct, inside the chip", "the board's own disk")
    )
    return Shown(
        tuple(rows),
        "nothing is measured: only QEMU's board has been at hand; its processors and drives are QEMU's",
        "Laguna is an ASIC with its own controller; millpond's boards are bought ones with their own drives.",
    )


def _by_board(titles: Sequence[str], values: Sequence[str]) -> str:
    """Return the values, each behind the titles of all boards that have it."""
    found = dict[str, list[str]]()
    for title, value in zip(titles, values, strict=True):
        found.setdefault(value, []).append(title)
    return "; ".join(f"{', '.join(having)}: {value}" for value, having in found.items())


def _features(name: str, board: Board) -> tuple[str, ...]:
    """Return the board's cells in the order of _PRINTED."""
    form, memory, cores = _data_sheet(name, board)
    return form, memory, cores, _TUNNELS[board.tunnel.transport]


def _data_sheet(name: str, board: Board) -> tuple[str, str, str]:
    if board.qemu is None:
        return _DATA_SHEETS[name]
    arguments = board.qemu.arguments
    cores = f"{board.qemu.processors} {arguments[arguments.index('-cpu') + 1]}, emulated"
    return "virtual machine", f"{board.qemu.memory} MiB", cores


EXHIBIT = Exhibit("table-1", "Table I: Laguna's features", measure)
