# SPDX-License-Identifier: Apache-2.0
"""Edge (Jinja2): the dashboard's pages as HTML. Every value is escaped, whoever has said it.

The blocks of a page's template whose names begin with ``live_`` can be rendered alone: the browser puts each
into the element with that id.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from starlette.responses import HTMLResponse

from millpond.base.text import LONGEST, printable
from millpond.host.records.data_costs import waiting_for_data
from millpond.host.records.energy import rounded
from millpond.host.terminal.printing import size

HERE: Final = Path(__file__).parent
LIVE: Final = "live_"
UNKNOWN: Final = "-"


class Renderer:
    """Renders the templates of the dashboard of a ``fleet``."""

    def __init__(self, fleet: str) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals["fleet"] = fleet
        self._environment.filters |= _FILTERS

    def page(self, template: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
        """Return a whole page."""
        return HTMLResponse(self._environment.get_template(template).render(values), status)

    def message(self, status: int, title: str, text: str) -> HTMLResponse:
        """Return a page that says one thing."""
        return self.page("message.html", {"title": title, "text": text}, status)

    def parts(self, template: str, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the live parts of a page by their ids."""
        found: Template = self._environment.get_template(template)
        context = found.new_context(dict(values))
        return {
            name: "".join(block(context)) for name, block in found.blocks.items() if name.startswith(LIVE)
        }


def clean(text: object) -> str:
    """Return a text as one line without control characters, nor such as turn the direction of a line."""
    return printable(str(text), LONGEST)


def known(value: object, form: str = "{}") -> str:
    """Return a value in a format, or the sign for an unknown one."""
    return UNKNOWN if value is None else form.format(value)


def sized(value: float | None, per: str = "") -> str:
    """Return a number of bytes as people read it."""
    return UNKNOWN if value is None else size(value) + per


def clock(seconds: float | None) -> str:
    """Return a time (Unix seconds) as that of this machine's clock."""
    if seconds is None:
        return UNKNOWN
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def lasting(seconds: float | None) -> str:
    """Return a duration: 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


_FILTERS: Final = {
    "clean": clean,
    "known": known,
    "size": sized,
    "clock": clock,
    "lasting": lasting,
    "joules": lambda value: UNKNOWN if value is None else f"{rounded(value)} J",
    "toml": lambda value: json.dumps(value, ensure_ascii=False),
    "waiting": waiting_for_data,
    "share": lambda value: UNKNOWN if value is None else f"{value:.0%}",
}
