# SPDX-License-Identifier: Apache-2.0
"""Pure: the version of millpond, which pyproject.toml reads here: the package's metadata would take 2 MB."""

VERSION = "0.2.0"
