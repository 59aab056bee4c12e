# SPDX-License-Identifier: Apache-2.0
"""Edge (files): a worker's report of an error, rebuilt from a closed set: the job's own code runs in the
worker, and could put anything into a text.

A text that may leave is one of millpond's own, whose only free parts are names that the host itself has sent,
types and small numbers; or, of any other exception, its type and its place in the job's or millpond's files.
A type or a function is named only if it is Python's, or a name in the job's files. Its own text is told only
if it is one of torch's, numpy's or Python's without a value, see ``fixed_texts``.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from millpond import train
from millpond.agent.policy.batch_structure import is_word
from millpond.train.worker.fixed_texts import is_fixed
from millpond.wire.messages import Failure

CODES = ("data", "model", "io", "memory")
_HIDDEN = "an error whose text stays on the device; the job's log there has it"
_NUMBER = "(?:0|[1-9][0-9]{0,7})"  # not \\d, which has the digits of all scripts
_SHAPE = f"(?:{_NUMBER}x){{0,3}}{_NUMBER}"
_TUPLE = rf"\((?:{_NUMBER},|{_NUMBER}(?:, {_NUMBER}){{1,5}})?\)"
_DTYPE = (
    "(?:bool|u?int(?:8|16|32|64)|float(?:16|32|64|128)|bfloat16"
    "|complex(?:64|128|256)|[<>|][fiucSUV][0-9]{1,4})"
)
_NAME = "(.+)"
_PICTURE = f"{_NUMBER}x{_NUMBER} (?:grey|RGB)(?: of 16 bits)?"
_TEMPLATES = (
    f"missing data: there is no folder {_NAME}",
    "missing data: there are no samples",
    f"missing data: {_NAME} holds no samples",
    rf"missing data: {_NAME} has no (?:images\.npy|labels\.npy|a file of the samples|sub-folder per class)",
    rf"missing data: {_NAME} has no images\.npy, no \*-images-idx3-ubyte and no sub-folder per class",
    rf"missing data: {_NAME} has no (?:PNG or JPEG images|\*-images-idx3-ubyte|\*\.tar|\*\.parquet)",
    f"the data service of {_NAME} is away",
    f"the data service of {_NAME} gives no samples of {_NAME}",
    "a worker without a socket for streams has no streamed samples",
    f"samples of {_NUMBER} folders are wanted; there are {_NUMBER}",
    f"samples {_NUMBER} to {_NUMBER} are wanted; there are {_NUMBER}",
    "an exchange without samples is wanted",
    rf"\[tier\] fast holds {_NUMBER} samples twice, and a group of them is {_NUMBER}",
    f"{_NAME} holds samples of {_SHAPE}, {_NAME} of {_SHAPE}",
    f"{_NAME} holds {_DTYPE} of shape {_TUPLE}, not images",
    f"{_NAME} holds {_DTYPE}: images are uint8 or floats; read other data in a task's dataset",
    f"{_NAME} holds a label beyond the model's {_NUMBER} classes",
    f"{_NAME} is shorter than it was",
    f"{_NAME} holds a sparse file",
    f"{_NAME}: {_NUMBER} images have labels of {_DTYPE} in shape {_TUPLE}, not one whole number each",
    f"{_NAME}: a label is negative",
    f"{_NAME} holds values that are not finite",
    f"{_NAME} is larger than [1-9][0-9]{{0,11}} bytes",
    f"{_NAME}: (?:{'|'.join(re.escape(os.strerror(number)) for number in errno.errorcode)})",
    rf"{_NAME} is not a whole (?:\.npy file of numbers|IDX file of bytes|Parquet file|tar file)",
    f"{_NAME}: {_NAME} is not one of the job's classes",
    f"{_NAME} is {_PICTURE}; the images before it are {_PICTURE}",
    f"{_NAME} is not a picture that can be read",
    f"{_NAME} builds (?:another model|other frozen parameters or local layers) than the host",
    f"{_NAME} builds other frozen parameters or local layers than the host: "
    f"'{_NAME}' differs beyond rounding",
    "the task's metrics must return a dict of names to sums and counts",
    "each of the task's metrics must be a sum and a count",
    f"the task's metrics must be at most {_NUMBER}, named by identifiers",
    "the task's loss must return a sum, a tensor of one value, and its count",
    "the task's state must have a state_dict of tensors by name",
    "the state that the task has kept does not fit it any more: give the job another name",
    "the personal state that the device has kept is damaged or of another model: submit the job anew",
    "the personal state of this job has made way for that of another job of its name: submit the job anew",
    "the personal state cannot be kept: there is no room for it, or the disk has failed",
    "the task's dataset is no map-style Dataset: it has no length or no items",
    "a batch of one sample has tensors whose first dimension is not 1",
    "the samples of several folders are in batches that cannot be joined",
    "the model has no parameter that may be trained",
    f"the model's tensor '{_NAME}' is {_DTYPE}, which float32 cannot carry",
    f"the model's tensor '{_NAME}' is {_DTYPE}, which float32 cannot carry; set persistent=False",
    rf"the model's tensor '{_NAME}' is float64, which float32 cannot carry; call \.float\(\) on the model",
    f"the model's tensor '{_NAME}' holds numbers over {_NUMBER}",
    f"the model's forward changes its parameter '{_NAME}'; only the optimizer may",
    f"the model changes its buffer '{_NAME}', which is of a type or a size that float32 cannot carry",
    f"'{_NAME}' should be whole numbers, and is not finite",
    f"the model's state is {_NUMBER} float32 values; got {_DTYPE} {_TUPLE}",
    f"there are {_NUMBER} states, and none with number {_NUMBER}",
    f"rank {_NUMBER} has no samples",
    f"rank {_NUMBER} has {_NUMBER} samples; its device's policy.least_samples is {_NUMBER}",
    rf"the ranks have {_TUPLE} samples: use private=True for data that differs",
    f"a batch of {_NUMBER} is too small: {_NUMBER} ranks need {_NUMBER} or more",
    "step without a batch: take one from group.loader before each",
    "the next batch is wanted, but the last one's loss was not given to step",
    rf"the loss has the shape {_TUPLE}: step wants one number, the sum over the batch",
    "the ranks have models of different sizes",
    r"a private launch has no network: train with millpond\.train\.group in place of torch\.distributed, "
    "or leave --private out",
    "the model has no parameters to train",
)
_OWN = tuple(re.compile(template) for template in _TEMPLATES)
_PLACE = re.compile(
    r"([A-Za-z_]\w*) (?:at (\S+):([1-9][0-9]{0,5})(?: in (\S+))?|in the model that (\S+) makes"
    r"|(outside of the model's files|in the optimizer's step|in the backward pass"
    r"|in torch's default_collate))"
    r"(: out of memory)?(?:; .*|: (.+))"
)
_OWN_FILE = re.compile("millpond/train/((?:[a-z0-9_]+/)*[a-z0-9_]+[.]py)")
"""A file of millpond in which an exception can be raised that none of the job's files is part of."""
_TRAIN = Path(str(train.__file__)).parent
_LONGEST = 4096


def rebuilt(failure: Failure, names: Collection[str], code: Mapping[str, str]) -> Failure:
    """Return the part of a report that may leave the device. ``names`` are those that the host itself has
    sent, of folders, tensors and the worker; ``code`` has the job's files.
    """
    found = failure.code if failure.code in CODES else "model"
    text = failure.text if len(failure.text) <= _LONGEST else ""
    return Failure(found, (text if _is_own(text, names) else _place(text, names, code)) or _HIDDEN)


def _is_own(text: str, names: Collection[str]) -> bool:
    known = {"a file of the samples", *names}
    known |= {f"{name}/{usual}.npy" for name in names for usual in ("images", "labels")}
    return any((match := own.fullmatch(text)) and known.issuperset(match.groups()) for own in _OWN)


def _place(text: str, names: Collection[str], code: Mapping[str, str]) -> str:
    if not (match := _PLACE.fullmatch(text)):
        return ""
    kind, file, line, function, factory, part, memory, own = match.groups()
    if own and not is_fixed(own):
        return ""
    stays = f": {own}" if own else f"{memory or ''}; its message stays on the device"
    known = "\n".join(code.values())
    if not (_is_exception(kind) or is_word(kind, known)):
        kind = "an exception"
    if factory in names:
        return f"{kind} in the model that {factory} makes{stays}"
    if file is None:
        return f"{kind} {part}{stays}"
    if int(line) > _lines_of(file, code):
        return f"{kind}{stays}"
    where = f" in {function}" if is_word(function or "", known) else ""
    return f"{kind} at {file}:{line}{where}{stays}"


def _lines_of(file: str, code: Mapping[str, str]) -> int:
    """Return the lines of a file of the job's or of millpond's, 0 of any other."""
    if file in code:
        return code[file].count("\n") + 1
    own = _OWN_FILE.fullmatch(file)
    path = _TRAIN / own[1] if own else None
    return path.read_text().count("\n") if path and path.is_file() else 0


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)
