# SPDX-License-Identifier: Apache-2.0
"""Entry: the tunnel against its peers, ``make bench-tunnel``: one table, ``tunnel.json`` and a picture."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from bench import harness
from bench.picture import draw_ratios
from bench.rows import write
from bench.table import table
from bench.tunnel.figures import EMULATION, Circumstances, headlines, plain
from bench.tunnel.isolation import SCRATCH, run_isolated
from bench.tunnel.our_routes import OURS
from bench.tunnel.plain_routes import PLAIN_PEERS
from bench.tunnel.plan import Plan, crowd_key, plan
from bench.tunnel.programs import CompilationFailed, compile_program
from bench.tunnel.record import Record
from bench.tunnel.route import Tools
from bench.tunnel.run import Run
from bench.tunnel.ssh_routes import SSH_PEERS
from bench.tunnel.table import EXPLANATION, routes_table

PEERS = {candidate.key: candidate for candidate in (*PLAIN_PEERS, *SSH_PEERS)}
CANDIDATES = PEERS | {candidate.key: candidate for candidate in OURS}


def main() -> int:
    """Exit codes: 0 done, 1 millpond's tunnel or the benchmark failed, 2 wrong arguments, 130 interrupted."""
    parser = harness.command_line("tunnel", "millpond's tunnel against its peers, for all figures or one.")
    arguments = parser.parse_args()
    try:
        chosen = plan(quick=arguments.quick, only=arguments.only)
    except ValueError as error:
        parser.error(str(error))
    output = harness.folder_of(arguments)
    return run_isolated(lambda: bench(chosen, output))


def bench(chosen: Plan, output: Path) -> int:
    """Measure, print and write; in the namespaces that ``run_isolated`` made."""
    say = harness.progress()
    with ExitStack() as undo:
        try:
            relay, traffic = (compile_program(name, SCRATCH) for name in ("relay", "traffic"))
        except CompilationFailed as error:
            print(f"bench-tunnel: {error}", file=sys.stderr)
            return 1
        run = Run(chosen, Tools(relay, traffic, SCRATCH, undo), CANDIDATES, labels(chosen), say)
        try:
            with harness.limited(chosen.durations.limit):
                record = run.all()
        except harness.LimitReachedError as error:
            print(f"bench-tunnel: {error}", file=sys.stderr)
            return 1
    report(chosen, record, run.congestion_control, output)
    say(f"written: {output}/tunnel.json, {output}/tunnel.png")
    return 1 if record.failed - set(PEERS) else 0


def labels(chosen: Plan) -> dict[str, str]:
    """What a person reads for each key."""
    crowd = f"{chosen.durations.crowd} tunnels at once"
    names = {key: CANDIDATES[key].label for key in (*chosen.routes, *chosen.engines)}
    return names | {crowd_key(engine): f"{crowd}, {engine} engine" for engine in chosen.engines}


def report(chosen: Plan, record: Record, congestion_control: str, output: Path) -> None:
    """Print the table; write ``tunnel.json`` and ``tunnel.png``."""
    names = labels(chosen)
    known = Circumstances(names, record.default_engine(), congestion_control, chosen.durations.crowd)
    first = headlines(record, known)
    for part in (routes_table(record, names), EXPLANATION, table("The tunnel against its peers", first)):
        print("", *part, sep="\n")
    write([*first, *plain(record, known)], output / "tunnel.json")
    note = (
        f"medians and ranges of {chosen.durations.repeats}, {os.cpu_count()} cores, TCP {congestion_control}"
    )
    draw_ratios(first, f"{note}; {EMULATION}", output / "tunnel.png")


if __name__ == "__main__":
    sys.exit(main())
