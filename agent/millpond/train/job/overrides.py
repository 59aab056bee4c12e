# SPDX-License-Identifier: Apache-2.0
"""Pure: settings that change a job's TOML document before it is read: ``federated.rounds=5``, or values by
dotted keys; a job that goes on for more rounds.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from millpond.base.errors import ConfigError
from millpond.train.job.spec import Job

Settings = Iterable[str] | Mapping[str, Any]
"""Texts of a dotted key, "=" and a value, as the command line has them, or values by dotted key."""


def overridden(document: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return ``document`` with each setting put into it in order.

    Raises ConfigError for a setting that is none, or a key below a value that is no table.
    """
    changed = copy.deepcopy(dict(document))
    for shown, keys, value in _parsed_all(settings):
        table = changed
        for depth, key in enumerate(keys[:-1], 1):
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{shown}: '{'.'.join(keys[:depth])}' is not a table")
        table[keys[-1]] = value
    return changed


def _parsed_all(settings: Settings) -> Iterator[tuple[str, list[str], Any]]:
    """Yield each setting as an error shows it, its keys and its value."""
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            keys = str(name).split(".")
            if not all(keys):
                raise ConfigError(f"set {name}: not a key, such as train.learning_rate")
            yield f"set {name}", keys, copy.deepcopy(value)
        return
    for setting in settings:
        yield f"--set {setting}", *_parsed(setting)


def _parsed(setting: str) -> tuple[list[str], Any]:
    name, equals, text = setting.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"--set {setting}: expected a key and a value, such as train.learning_rate=0.1")
    return keys, _value(text.strip(), setting)


def _value(text: str, setting: str) -> Any:
    """Return a TOML value, or a bare word as text."""
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"--set {setting}: not a TOML value: {error}") from None
        return text
    return document["value"] if len(document) == 1 else text


def longer(job: Job, rounds: int) -> Job:
    """Return the same job with ``rounds`` rounds or epochs, and without an end before them."""
    job = replace(job, evaluate=replace(job.evaluate, target=None, patience=None))
    if job.synchronous:
        return replace(job, synchronous=replace(job.synchronous, epochs=rounds))
    return replace(job, federated=replace(job.averaging, rounds=rounds))
