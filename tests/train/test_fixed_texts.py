# SPDX-License-Identifier: Apache-2.0
"""Texts of torch, numpy and Python that may leave a device are whole texts without a value; others stay."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from millpond.agent.policy.error_reports import rebuilt
from millpond.train.data.errors import DataError
from millpond.train.worker.error_reports import failure

ONES = torch.ones(2, requires_grad=True)


def sparse(kind: Any, **more: Any) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2).to_sparse()
    kind([parameter], **more).step()


def told(call: Callable[[], Any]) -> str:
    """Return what leaves a device of the error of a call, which no line of the job's files is part of."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        found = failure(error, Path("/code"), "net:Net", full=False)
        passed = rebuilt(found, ("net:Net",), {"net.py": ""})
        assert passed == rebuilt(passed, ("net:Net",), {"net.py": ""})
        return passed.text
    raise AssertionError("it does not fail")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: torch.ones(1).backward(), "does not require grad and does not have a grad_fn"),
        (
            lambda: ONES.exp().backward(),
            "in the backward pass: grad can be implicitly created only for scalar",
        ),
        (lambda: ONES.add_(1), "a leaf Variable that requires grad is being used in an in-place operation."),
        (lambda: ONES.numpy(), "Can't call numpy() on Tensor that requires grad."),
        (lambda: bool(torch.ones(2)), "Boolean value of Tensor with more than one value is ambiguous"),
        (lambda: functional.embedding(torch.tensor([5]), torch.ones(2, 2)), "index out of range in self"),
        (lambda: nn.Linear(2, 2)(torch.ones(1, 2).double()), "must have the same dtype, but got Double and"),
        (
            lambda: nn.Conv2d(1, 1, 1)(torch.ones(1, 1, 1, 1).double()),
            "Input type (double) and bias type (float)",
        ),
        (lambda: default_collate([[1], [1, 2]]), "in torch's default_collate: each element in list of batch"),
        (lambda: default_collate([None]), "found <class 'NoneType'>"),
        (
            lambda: sparse(torch.optim.AdamW),
            "in the optimizer's step: Adam does not support sparse gradients",
        ),
        (lambda: sparse(torch.optim.RMSprop), "RMSprop does not support sparse gradients"),
        (lambda: sparse(torch.optim.LBFGS), "LBFGS.step() missing 1 required positional argument: 'closure'"),
        (lambda: bool(np.ones(2)), "The truth value of an array with more than one element is ambiguous."),
        (lambda: np.concatenate([]), "need at least one array to concatenate"),
        (lambda: int(math.nan), "cannot convert float NaN to integer"),
        (lambda: [][0], "list index out of range"),
        (lambda: len(None), "object of type 'NoneType' has no len()"),  # type: ignore[arg-type]
    ],
)
def test_texts_without_a_value_are_told(call: Callable[[], Any], text: str) -> None:
    assert text in told(call)


@pytest.mark.parametrize(
    "call",
    [
        lambda: functional.cross_entropy(torch.randn(2, 3), torch.tensor([7, 0])),
        lambda: torch.ones(2).item(),
        lambda: torch.stack([torch.ones(3), torch.ones(4)]),
        lambda: default_collate([object()]),
        lambda: {}["anna"],
        lambda: int("anna"),
        lambda: torch.ones(2)[7],
    ],
)
def test_texts_with_a_value_stay(call: Callable[[], Any]) -> None:
    assert told(call).endswith("; its message stays on the device")


def test_a_name_that_is_not_utf8_is_escaped() -> None:
    error = DataError(f"{os.fsdecode(bytes([99, 233]))} is not a picture that can be read", "")
    assert failure(error, Path("/code"), "", full=True).text == r"c\xe9 is not a picture that can be read"


def test_a_text_with_more_around_it_stays() -> None:
    for text in (
        "list index out of range: anna",
        "anna list index out of range",
        "Singular",
    ):

        def call(text: str = text) -> None:
            raise IndexError(text)

        assert told(call).endswith("; its message stays on the device")
