# SPDX-License-Identifier: Apache-2.0
"""Entry: runs a script of pytorch/examples, as it is, on processors alone: ``on_cpu.py SCRIPT.py [WORD...]``.

What the script asks of accelerators is answered with the CPU and gloo, and what it imports for S3 and for its
command line (boto3, hydra) by stand-ins. All ranks begin with the same seed. Its settings are in SETTINGS, as
JSON, for those of a hydra configuration.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.parallel
import torch.utils.data
from torch.utils.data import DataLoader


def _without_devices(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``to`` of a tensor or module that heeds no number of an accelerator."""

    @functools.wraps(call)
    def to(self: Any, *where: Any, **more: Any) -> Any:
        return self if where and isinstance(where[0], int) else call(self, *where, **more)

    return to


class _Parallel(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module: torch.nn.Module, device_ids: object = None) -> None:
        super().__init__(module)


class _Loader(DataLoader[Any]):
    def __init__(self, *arguments: Any, pin_memory: bool = False, **more: Any) -> None:
        super().__init__(*arguments, **more)


def _main(**_: object) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Stand in for ``hydra.main``."""
    return lambda body: lambda: body(json.loads(os.environ["SETTINGS"]))


def _stand_in(name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def prepare() -> None:
    """Have this process answer for accelerators and for the missing packages."""
    torch.manual_seed(7)
    begin, accelerator = dist.init_process_group, torch.accelerator
    torch.cuda.set_device = lambda *_: None
    dist.init_process_group = lambda *_, **__: begin("gloo")
    accelerator.is_available, accelerator.device_count = lambda: True, lambda: 2
    accelerator.current_accelerator = lambda check_available=False: (
        None if check_available else torch.device("cpu")  # torch itself asks for one that is there
    )
    accelerator.set_device_index = lambda *_: None
    torch.Tensor.to = _without_devices(torch.Tensor.to)  # type: ignore[method-assign]
    torch.nn.Module.to = _without_devices(torch.nn.Module.to)  # type: ignore[method-assign]
    torch.nn.parallel.DistributedDataParallel = _Parallel  # type: ignore[assignment,misc]
    torch.utils.data.DataLoader = _Loader  # type: ignore[misc]
    _stand_in("boto3")
    _stand_in("hydra", main=_main)
    _stand_in("omegaconf", DictConfig=dict)


if __name__ == "__main__":
    prepare()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
