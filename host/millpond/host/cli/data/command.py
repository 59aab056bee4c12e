# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands 'data check' and 'data explain'."""

from __future__ import annotations

from millpond.host.cli.data.check import check
from millpond.host.cli.data.explain import explain
from millpond.host.cli.options import new_app

app, data = new_app(), new_app(help="Look at data before, and while, it is trained on.", no_args_is_help=True)
app.add_typer(data, name="data")
data.command()(check)
data.command()(explain)
