# SPDX-License-Identifier: Apache-2.0
"""Pure: the ``[policy]`` table of ``agent.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Policy:
    """The jobs that the device takes part in, and what it answers them.

    A folder's private samples are in groups of ``least_samples``, and an answer covers whole groups; 1 shows
    single samples. At one state of a model there are ``answers_per_state`` answers about a private folder, 0
    for any number. ``folders`` are the private folders that jobs may read, such as "private/digits"; none
    means all, each job its own.
    ``code`` "listed" takes jobs whose code, see ``policy.digest``, has a SHA-256 in ``listed``.
    ``largest_model`` is a number of float32 values.
    """

    least_samples: int = 8
    answers_per_state: int = 256
    folders: tuple[str, ...] = ()
    code: Literal["any", "listed"] = "any"
    listed: tuple[str, ...] = ()
    largest_model: int = 1 << 30


def check_policy(policy: Policy, where: str) -> None:
    """Raise ConfigError, naming ``where``, for values that make no sense."""
    if policy.least_samples < 1:
        raise ConfigError(f"{where}: least_samples must be 1 or more")
    if policy.answers_per_state < 0 or policy.largest_model < 1:
        raise ConfigError(f"{where}: answers_per_state and largest_model must not be negative or none")
    for folder in policy.folders:
        if not folder.startswith("private/") or ".." in folder.split("/"):
            raise ConfigError(f"{where}: folders: '{folder}' is not a folder in private/")
