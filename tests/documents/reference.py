# SPDX-License-Identifier: Apache-2.0
"""Edge (imports the product): all pages of the reference, by their names in docs/reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from documents import api, cli, configuration, exported, files, outputs, protocols

PAGES: Final[dict[str, Callable[[], str]]] = {
    "commands.md": cli.commands_page,
    "exit-codes.md": cli.exit_codes_page,
    **{f"{name}.md": functools.partial(configuration.toml_page, name) for name in configuration.FILES},
    "python-api.md": api.api_page,
    "metrics.md": outputs.outputs_page,
    "prometheus.md": exported.exported_page,
    "files.md": files.files_page,
    **{f"{name}.md": functools.partial(protocols.protocol_page, name) for name in protocols.PAGES},
}
