"""Pure: which millpond this is; pyproject.toml reads it here. To ask the package's metadata takes 2 MB."""

VERSION = "0.1.0"
