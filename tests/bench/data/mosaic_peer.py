# SPDX-License-Identifier: Apache-2.0
"""Entry: mosaicml-streaming, for an interpreter that has it: ``write FOLDER OUT`` makes its shards of a
folder of arrays; ``read URL CACHE BATCH WORKERS`` reads an epoch over HTTP and prints samples and seconds as
JSON.

It has no downloader for plain HTTP, so one is registered here; its sub-packages for vision, text and several
modalities, which need a torchvision that does not load beside torch for processors alone, are left out.
"""

from __future__ import annotations

import json
import sys
import time
import types
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

for _name in ("vision", "text", "multimodal"):
    sys.modules[f"streaming.{_name}"] = types.ModuleType(f"streaming.{_name}")

import streaming  # type: ignore[import-not-found]  # noqa: E402
from streaming.base.storage import download  # type: ignore[import-not-found]  # noqa: E402


class HttpDownloader(download.CloudDownloader):  # type: ignore[misc]
    """Downloads files from a plain HTTP server."""

    @staticmethod
    def _client_identifier() -> str:
        return "http"

    def clean_up(self) -> None:
        """Do nothing."""

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        fresh = Path(f"{local}.tmp")
        with urllib.request.urlopen(remote, timeout=timeout) as answer, fresh.open("wb") as out:  # noqa: S310
            while part := answer.read(1 << 20):
                out.write(part)
        fresh.rename(local)


def write(folder: Path, out: str) -> None:
    """Write shards."""
    images, labels = np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "labels.npy")
    shape = ",".join(map(str, images.shape[1:]))
    columns = {"image": f"ndarray:uint8:{shape}", "label": "int"}
    with streaming.MDSWriter(out=out, columns=columns, size_limit=1 << 23) as writer:
        for image, label in zip(images, labels, strict=True):
            writer.write({"image": np.ascontiguousarray(image), "label": int(label)})


def read(url: str, cache: str, batch: int, workers: int) -> dict[str, Any]:
    """Read an epoch."""
    download.DOWNLOADER_MAPPINGS["http"] = HttpDownloader
    began, samples = time.monotonic(), 0
    data = streaming.StreamingDataset(remote=url, local=cache, shuffle=True, batch_size=batch)
    for found in DataLoader(data, batch_size=batch, num_workers=workers):
        images = found["image"].to(torch.float32) / 255
        samples += len(images)
    return {"samples": samples, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), sys.argv[3])
    else:
        print(json.dumps(read(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
