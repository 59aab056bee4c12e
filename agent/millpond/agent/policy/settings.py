# SPDX-License-Identifier: Apache-2.0
"""Pure: the ``[policy]`` table of ``agent.toml``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from millpond.base.errors import ConfigError
from millpond.base.keys import Key

_KEY = re.compile(r"(sk-)?(ssh|ecdsa)-[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( [^\n]*)?")
"""A public key's line."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The jobs that the device takes part in, and what it answers them.

    A folder's private samples are in groups of ``least_samples``, and an answer covers whole groups; 1 shows
    single samples. At one state of a model there are ``answers_per_state`` answers about a private folder, 0
    for any number. ``folders`` are the private folders that jobs may read, such as "private/digits"; none
    means all, each job its own. ``code`` "listed" takes jobs whose code, with its arguments, has its digest,
    see ``train.job.signed_code``, in ``listed``, "signed" those whose code is signed by a key of ``owners``,
    public keys as OpenSSH writes them. ``largest_model`` is a number of float32 values, ``largest_files`` the
    bytes of a job's files together, ``largest_state`` those that the tasks of one job keep on the device.
    With ``plain_lan`` updates may leave to other devices of a job by UDP, authenticated and not encrypted.
    """

    least_samples: Annotated[int, Key(least=1)] = 8
    answers_per_state: Annotated[int, Key(least=0)] = 256
    folders: tuple[str, ...] = ()
    code: Literal["any", "listed", "signed"] = "any"
    listed: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    largest_model: Annotated[int, Key(least=1, most=math.inf)] = 1 << 30
    largest_files: Annotated[int, Key(least=0, most=math.inf)] = 4 << 30
    largest_state: Annotated[int, Key(least=0, most=math.inf)] = 1 << 30
    plain_lan: bool = False


def check_policy(policy: Policy, where: str) -> None:
    """Raise ConfigError, naming ``where``, for values that make no sense."""
    for key in policy.owners:
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: owners: '{key[:40]}' is no public key, such as 'ssh-ed25519 AAAA...'"
            )
    if policy.code == "signed" and not policy.owners:
        raise ConfigError(f"{where}: code: 'signed' needs keys in owners")
    for folder in policy.folders:
        if not folder.startswith("private/") or ".." in folder.split("/"):
            raise ConfigError(f"{where}: folders: '{folder}' is not a folder in private/")
