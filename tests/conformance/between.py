# SPDX-License-Identifier: Apache-2.0
"""Edge: passes a SQLite database from one mount of a volume to another."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from conformance import database, results
from conformance.context import OWN_FILES, Context, Update
from millpond.fs.store.layout import PUBLIC


def run(context: Context, update: Update) -> None:
    """What one side commits to a database, the other reads."""
    kept, tops = dict[str, results.Kept](), dict[str, Path]()
    with contextlib.ExitStack() as stack:
        for side, mount in (("the device", "device"), ("the host", OWN_FILES)):
            point = context.scratch / mount
            stack.enter_context(context.mounted(mount, point))
            tops[side] = point / PUBLIC / "sqlite"
        tops["the device"].mkdir()
        for (writer, its), (reader, other) in itertools.permutations(tops.items()):
            way, name = f"{writer} writes, {reader} reads", str(len(kept))
            (its / name).mkdir()
            notes, count = context.scratch / f"sqlite-{name}", context.arguments.transactions
            kept[way] = database.exercise(its / name, other / name, notes, count)
            update([results.database_entry(kept)])
            context.say(f"SQLite: {way}: {kept[way].brief()}")
