# SPDX-License-Identifier: Apache-2.0
"""Entry: the tables and figures of the five papers, ``make papers``: the paper's values beside ours.

A run writes ``papers.json`` and a picture for each figure; with ``--only`` the other exhibits keep their
results. ``--publish`` also copies what it has measured into docs/papers, from where ``make reference``
writes it into the pages.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.experiment import Run, Unmeasured
from bench.harness import LimitReachedError, command_line, folder_of, limited, positive, progress
from bench.papers.exhibit import Exhibit, Paper, Shown, choose, key
from bench.papers.papers import PAPERS
from bench.papers.results import Result, read, write
from bench.papers.tables import lines
from bench.picture import draw

DOCS = Path(__file__).parents[3] / "docs" / "papers"
QUICK_SECONDS = 300  # a peer may have to be installed


def main() -> int:
    """Run the exhibits. Exit codes: 0 done, 1 an exhibit has not ended in time, 2 wrong arguments."""
    parser = command_line(
        "papers", "The tables and figures of the papers, with the papers' values beside ours."
    )
    parser.prog = "make papers"
    parser.add_argument("--repeats", type=positive, metavar="N", help="of each measurement: 3, 1 if quick")
    parser.add_argument("--publish", action="store_true", help="copy the results into docs/papers")
    arguments = parser.parse_args()
    try:
        chosen = choose(PAPERS, arguments.only)
    except ValueError as error:
        parser.error(str(error))
    folder = folder_of(arguments)
    whole = run_all(chosen, _run(arguments), folder)
    if arguments.publish:
        publish(chosen, folder)
    return 0 if whole else 1


def _run(arguments: argparse.Namespace) -> Run:
    return Run(arguments.quick, progress(), arguments.repeats or (1 if arguments.quick else 3))


def run_all(chosen: Sequence[tuple[Paper, Exhibit]], run: Run, folder: Path) -> bool:
    """Make the exhibits, print each and write ``papers.json`` after it. Returns whether all have ended."""
    path = folder / "papers.json"
    whole = True
    for paper, exhibit in chosen:
        run.say(f"{paper.title}: {exhibit.title}")
        began = time.monotonic()
        try:
            with limited(QUICK_SECONDS if run.quick else exhibit.seconds):
                shown = _measured(exhibit, run)
        except LimitReachedError as error:
            print(f"papers: {key(paper, exhibit)}: {error}", file=sys.stderr)
            whole = False
            continue
        picture = _picture(paper, exhibit, shown, folder)
        seconds = round(time.monotonic() - began, 1)
        result = Result(
            exhibit.title, shown.rows, shown.emulation, shown.difference, picture, run.quick, seconds
        )
        write({**read(path), key(paper, exhibit): result}, path)
        print("", *lines(result), "", sep="\n", flush=True)
    run.say(f"written: {path}")
    return whole


def _measured(exhibit: Exhibit, run: Run) -> Shown:
    threads = torch.get_num_threads()  # one that trains a small network sets 1
    try:
        return exhibit.measure(run)
    except Unmeasured as error:
        return Shown((), "", f"Not measured on this machine: {error}.")
    finally:
        torch.set_num_threads(threads)


def _picture(paper: Paper, exhibit: Exhibit, shown: Shown, folder: Path) -> str:
    if not shown.panels:
        return ""
    name = f"{paper.name}-{exhibit.name}.svg"
    draw(shown.panels, f"{os.cpu_count()} cores", folder / name)
    return name


def publish(chosen: Sequence[tuple[Paper, Exhibit]], folder: Path) -> None:
    """Copy the results of the chosen exhibits, and their pictures, into docs/papers."""
    results = read(folder / "papers.json")
    for paper in PAPERS:
        names = [key(*pair) for pair in chosen if pair[0] is paper and key(*pair) in results]
        if not names:
            continue
        path = DOCS / f"{paper.name}.json"
        merged = {**read(path), **{name: results[name] for name in names}}
        ordered = [key(paper, exhibit) for exhibit in paper.exhibits]
        write({name: merged[name] for name in ordered if name in merged}, path)
        for name in names:
            if picture := results[name].picture:
                shutil.copyfile(folder / picture, DOCS / picture)


if __name__ == "__main__":
    sys.exit(main())
