# SPDX-License-Identifier: Apache-2.0
"""Edge: passes fio's files and a SQLite database from one mount of a volume to another."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from conformance import database, fio, results
from conformance.context import OWN_FILES, Context, Update
from millpond.fs.store.layout import PUBLIC


@contextlib.contextmanager
def _both(context: Context, name: str) -> Iterator[Mapping[str, Path]]:
    """A directory as each of both mounts shows it."""
    with contextlib.ExitStack() as stack:
        tops = dict[str, Path]()
        for side, mount in (("the device", "device"), ("the host", OWN_FILES)):
            point = context.scratch / mount
            stack.enter_context(context.mounted(mount, point))
            tops[side] = point / PUBLIC / name
        next(iter(tops.values())).mkdir()
        yield tops


def verify(context: Context, update: Update) -> None:
    """What one writes, the other verifies."""
    if not (program := shutil.which("fio")):
        update([results.missing_entry("fio_verify", "files", "the package fio is not installed")])
        return
    with _both(context, "fio") as tops:
        update([results.fio_entry(fio.verify(program, tops, context.scratch, context.say))])


def keep(context: Context, update: Update) -> None:
    """What one commits to a database, the other reads."""
    kept = dict[str, results.Kept]()
    with _both(context, "sqlite") as tops:
        for (writer, its), (reader, other) in itertools.permutations(tops.items()):
            way, name = f"{writer} writes, {reader} reads", str(len(kept))
            (its / name).mkdir()
            notes, count = context.scratch / f"sqlite-{name}", context.arguments.transactions
            kept[way] = database.exercise(its / name, other / name, notes, count)
            update([results.database_entry(kept)])
            context.say(f"SQLite: {way}: {kept[way].brief()}")
