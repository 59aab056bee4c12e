# SPDX-License-Identifier: Apache-2.0
"""Edge (torch): what an optimizer keeps from step to step, as a checkpoint holds it: tensors, and figures of
its state and of its parameter groups.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.base.errors import LocalError
from millpond.train.state import layout
from millpond.train.state.flat import Vector
from millpond.train.state.layout import Tensor as Entry

_FIGURES = "figures"
"""The entry of all figures: the bytes of a JSON text, one a value."""
Groups = Sequence[Mapping[str, Any]]


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of an optimizer's parameter groups, without the parameters."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of a parameter group are the same."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def read(optimizer: torch.optim.Optimizer, first: Groups) -> tuple[tuple[Entry, ...], Vector]:
    """Return the tensors of an optimizer, named ``parameter.name``, and its figures, those of its groups that
    are not as in ``first``; and their values, float32 [size]. Raises LocalError for anything else.
    """
    entries, values, figures = [], [], {}
    for number, state in sorted(optimizer.state_dict()["state"].items(), key=lambda item: str(item[0])):
        for name, value in sorted(state.items()):
            if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16):
                entries.append(Entry(f"{number}.{name}", tuple(value.shape), "float32"))
                values.append(value.detach().reshape(-1).to("cpu", torch.float32).numpy())
            else:
                figures[f"{number}.{name}"] = value
    changed = [
        {key: value for key, value in now.items() if key not in old or not is_same(value, old[key])}
        for now, old in zip(groups_of(optimizer), first, strict=True)
    ]
    if figures or any(changed):
        text = np.frombuffer(_text(figures, changed).encode(), np.uint8)
        entries.append(Entry(_FIGURES, (len(text),), "uint8"))
        values.append(text.astype(np.float32))
    return tuple(entries), np.concatenate(values) if values else np.empty(0, np.float32)


def write(optimizer: torch.optim.Optimizer, entries: tuple[Entry, ...], values: Vector) -> None:
    """Give an optimizer back what ``read`` has returned. Raises LocalError for that of another one."""
    whole = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    exact: dict[str, Any] = {}
    for entry, span in layout.spans(entries):
        if entry.name == _FIGURES:
            exact = json.loads(values[span].astype(np.uint8).tobytes())
            continue
        number, name = _place(entry.name)
        state.setdefault(number, {})[name] = torch.from_numpy(values[span].copy()).view(entry.shape)
    figures = {_place(name): _value(value) for name, value in exact.get("state", {}).items()}
    for (number, name), value in figures.items():
        state.setdefault(number, {})[name] = value
    whole["state"] = state
    for group, changed in zip(whole["param_groups"], exact.get("groups", ()), strict=False):
        group.update({key: _like(group.get(key), _value(value)) for key, value in changed.items()})
    optimizer.load_state_dict(whole)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for (number, name), value in figures.items():  # torch gives tensors the type of their parameter
        optimizer.state[parameters[number]][name] = value


def _text(figures: Mapping[str, Any], groups: Groups) -> str:
    try:
        return json.dumps({"state": figures, "groups": groups}, default=_plain)
    except (TypeError, ValueError) as error:
        raise LocalError(f"the optimizer keeps what a checkpoint does not hold: {error}") from None


def _plain(value: object) -> dict[str, Any]:
    """Return a tensor, of a type that float32 does not hold, as JSON has it. Raises TypeError for others."""
    if isinstance(value, Tensor) and value.numel() <= 1 << 16:
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(f"{kind} is neither a float32 tensor nor a figure")


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
    return value


def _like(before: Any, value: Any) -> Any:
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value


def _place(name: str) -> tuple[int, str]:
    number, _, own = name.partition(".")
    if not number.isdigit():
        raise LocalError(f"the checkpoint's '{name}' is not of an optimizer")
    return int(number), own
