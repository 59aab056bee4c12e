# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, namespaces): streamed data beside mosaicml-streaming, on one link."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from bench.data.shaped import EMULATION, ShapedService, found, serving, sparse_images
from bench.experiment import Run
from bench.installed import installed
from bench.rows import Row, summary

TITLE = "beside mosaicml-streaming"
_MOSAIC = "mosaicml-streaming==0.13.0"
_PEER = Path(__file__).with_name("mosaic_peer.py")
_RATE, _SHAPE, _BATCH, _WORKERS, _PORT = 125e6, (3, 64, 64), 64, 2, 8000


def measure(run: Run) -> list[Row]:
    """Alternate epochs of both over a link of 1 Gbit/s."""
    python = installed("mosaic", "torch==2.13.0", _MOSAIC, figures=["mosaic_over_ours"])
    ratios = list[float]()
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        root = Path(folder)
        sparse_images(root / "set", 4_000 if run.quick else 30_000, _SHAPE)
        subprocess.run([python, str(_PEER), "write", str(root / "set"), str(root / "mds")], check=True)
        with serving(root, _RATE) as service:
            web = service.serve_files(root / "mds", _PORT)
            try:
                for repeat in range(run.repeats):
                    theirs = _theirs(service, python, root / f"cache {repeat}")
                    ours = _ours(service)
                    ratios.append(theirs / ours)
                    run.say(f"{theirs:.0f} samples/s, ours {ours:.0f}")
            finally:
                web.terminate()
                web.wait()
    about = "samples per second of an epoch of 12 KB images, its first batch included, theirs over ours"
    peer = f"{_MOSAIC} with {_WORKERS} DataLoader processes, MDS shards over HTTP; ours reads in one process"
    emulation = f"{EMULATION} of 1 Gbit/s"
    return [summary("mosaic_over_ours", about, ratios, "x", peer=peer, emulation=emulation)]


def _theirs(service: ShapedService, python: str, cache: Path) -> float:
    argv = [python, str(_PEER), "read", service.url(_PORT), str(cache), str(_BATCH), str(_WORKERS)]
    told = json.loads(service.run(argv).splitlines()[-1])
    return float(told["samples"] / told["seconds"])


def _ours(service: ShapedService) -> float:
    spec = {"name": "set", "batch": _BATCH, "step": 0.0, "each": 0.0}
    told = found(service.start("consume", spec))["cells"][0]
    return float(told["samples"] / told["seconds"])
