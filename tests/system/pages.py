# SPDX-License-Identifier: Apache-2.0
"""A page of the documents as a reader follows it: its blocks, in order, in one shell.

The shell has mounts and a network of its own, so nothing of a page that fails stays behind.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from documents.blocks import Block
from documents.site import ROOT

from .support import unshare

_BEGIN = """\
set -eu
python -c "from millpond.linux.network import loopback_up; loopback_up()"
running=()
finish() {
  for group in "${running[@]}"; do kill -INT -- "-$group" 2>/dev/null && wait "$group" || true; done
}
trap finish EXIT
"""
_BACKGROUND = """\
set -m
bash -eu %(file)s >%(file)s.out 2>&1 &
running+=($!)
set +m
for _ in $(seq 600); do [ -s %(file)s.out ] && break; sleep 0.1; done
"""
_AGAIN = """\
for _ in $(seq 120); do
  (. %(file)s) >%(file)s.out 2>&1 && tr '\\n' ' ' <%(file)s.out | grep -Eq %(regex)s && break
  sleep 0.5
done
tr '\\n' ' ' <%(file)s.out | grep -Eq %(regex)s || { cat %(file)s.out; exit 1; }
"""
_FAILS = """\
code=0
(. %(file)s) || code=$?
[ "$code" = %(code)s ] || { echo "exit code $code, not %(code)s"; exit 1; }
"""


def follow(blocks: list[Block], folder: Path, variables: Mapping[str, str], seconds: float) -> str:
    """Run the blocks of a page in ``folder``, a copy of what a reader has. Returns the fault, "" for none."""
    kept = folder.parent / "blocks"
    kept.mkdir()
    for part in ("agent/examples", "host/templates"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "test"))
    script = kept / "page.sh"
    script.write_text(_BEGIN + "".join(_steps(block, kept) for block in blocks if block.runs))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    home = folder.parent / "home"
    home.mkdir()
    given = {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **variables}
    with (kept / "output").open("wb") as output:
        process = subprocess.Popen(
            [*unshare(), "-n", "bash", str(script)],
            cwd=folder,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"nothing within {seconds:.0f} s"
        finally:
            _end(process)
    return "" if code == 0 else f"exit code {code}:\n{_told(kept)}"


def _steps(block: Block, kept: Path) -> str:
    """Return the shell's lines for a block, whose text is in a file of its own."""
    file = kept / f"line-{block.line}"
    file.write_text(block.text if "file" in block.marks else block.commands)
    words = {"file": shlex.quote(str(file))}
    told = f"echo '--- line {block.line}'\n"
    if target := block.marks.get("file"):
        return f"{told}mkdir -p -- {shlex.quote(str(Path(target).parent))}\ncp {words['file']} {target}\n"
    if "background" in block.marks:
        return told + _BACKGROUND % words
    if regex := block.marks.get("again until"):
        return told + _AGAIN % (words | {"regex": shlex.quote(regex)})
    if code := block.marks.get("fails"):
        return told + _FAILS % (words | {"code": code})
    return f"{told}. {words['file']}\n"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a page that hangs has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
        for each in below if process.poll() is None else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGTERM)
        psutil.wait_procs(below, 10)
    process.kill()
    process.wait(10)


def _told(kept: Path) -> str:
    """Return the last lines of the page's shell, and of what ran in the background."""
    outputs = [kept / "output", *sorted(kept.glob("*.out"))]
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in outputs)
