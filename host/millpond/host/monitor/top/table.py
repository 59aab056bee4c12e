# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): a table whose rows have names, and of which only cells that have changed are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.widgets import DataTable

from millpond.host.terminal.tables import COLOURS


class LiveTable(DataTable[Text]):
    """A table of named rows below ``columns``, given with the width of each."""

    def __init__(self, columns: Mapping[str, int], **settings: Any) -> None:
        super().__init__(cursor_type="row", cell_padding=0, **settings)
        self._columns = columns
        self._shown: dict[str, tuple[str, ...]] = {}

    @property
    def selected(self) -> str:
        """The name of the row below the cursor, "" without one."""
        place = self.cursor_coordinate
        return (
            str(self.coordinate_to_cell_key(place).row_key.value) if self.is_valid_coordinate(place) else ""
        )

    def show(self, rows: Mapping[str, Sequence[str]]) -> None:
        """Show these rows in their order, by their names; the cursor stays on its row."""
        for name, width in () if self.columns else self._columns.items():
            self.add_column(Text(name), width=width, key=name)
        selected = self.selected
        kept = [name for name in self._shown if name in rows]
        if kept != list(rows)[: len(kept)]:  # new rows come last otherwise
            self.clear()
            self._shown.clear()
        for name in self._shown.keys() - rows.keys():
            self.remove_row(name)
            del self._shown[name]
        for name, cells in rows.items():
            self._show_row(name, tuple(cells))
        if selected in rows and selected != self.selected:
            self.move_cursor(row=self.get_row_index(selected))

    def _show_row(self, name: str, cells: tuple[str, ...]) -> None:
        before = self._shown.get(name)
        self._shown[name] = cells
        if before is None:
            styled = (_styled(cell, width) for cell, width in zip(cells, self._columns.values(), strict=True))
            self.add_row(*styled, key=name)
            return
        for (column, width), old, new in zip(self._columns.items(), before, cells, strict=True):
            if old != new:
                self.update_cell(name, column, _styled(new, width))


def _styled(cell: str, width: int) -> Text:
    """Return a cell with a space at its end; the line below the tables has what does not fit."""
    text = Text(cell, COLOURS.get(cell, ""), no_wrap=True)
    text.truncate(width - 1, overflow="ellipsis")
    return text.append(" ")
