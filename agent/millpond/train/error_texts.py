# SPDX-License-Identifier: Apache-2.0
"""Pure: the texts of millpond's own errors that may leave a device, each with what its fields may hold.

What raises one of them fills in its fields; the agent lets a text pass that is one of them, whoever has said
it: names that the host itself has sent, types and small numbers are all that it can tell.
"""

from __future__ import annotations

import errno
import os
import re
from typing import Final

_NUMBER = "(?:0|[1-9][0-9]{0,7})"  # not \\d, which has the digits of all scripts
_FIELDS = {
    "name": "(.+)",
    "file": r"(?:images\.npy|labels\.npy|a file of the samples|sub-folder per class|PNG or JPEG images"
    r"|\*-images-idx3-ubyte|\*\.tar|\*\.parquet)",
    "number": _NUMBER,
    "bytes": "[1-9][0-9]{0,11}",
    "shape": f"(?:{_NUMBER}x){{0,3}}{_NUMBER}",
    "tuple": rf"\((?:{_NUMBER},|{_NUMBER}(?:, {_NUMBER}){{1,5}})?\)",
    "dtype": "(?:bool|u?int(?:8|16|32|64)|float(?:16|32|64|128)|bfloat16"
    "|complex(?:64|128|256)|[<>|][fiucSUV][0-9]{1,4})",
    "picture": f"{_NUMBER}x{_NUMBER} (?:grey|RGB)(?: of 16 bits)?",
    "reason": f"(?:{'|'.join(re.escape(os.strerror(number)) for number in errno.errorcode)})",
}
"""The pattern of each kind of field. A name must be one of those that the host has sent."""
TEXTS: Final[list[ErrorText]] = []


class ErrorText:
    """A text with fields of these kinds, such as ``"{name} holds no samples"``."""

    def __init__(self, template: str) -> None:
        parts = re.split(r"\{(\w+)\}", template)
        self._fixed, kinds = parts[::2], parts[1::2]
        pattern = "".join(re.escape(a) + _FIELDS[kind] for a, kind in zip(self._fixed, kinds, strict=False))
        self.pattern = re.compile(pattern + re.escape(self._fixed[-1]))
        """Matches the text; its groups are the names."""
        TEXTS.append(self)

    def __call__(self, *fields: object) -> str:
        """Return the text with its fields in order."""
        told = [fixed + str(field) for fixed, field in zip(self._fixed, fields, strict=False)]
        return "".join(told) + self._fixed[-1]

    def is_in(self, text: str) -> bool:
        """Return whether a longer text has this one in it."""
        return self.pattern.search(text) is not None


NO_FOLDER = ErrorText("missing data: there is no folder {name}")
NO_SAMPLES = ErrorText("missing data: there are no samples")
HOLDS_NO_SAMPLES = ErrorText("missing data: {name} holds no samples")
NO_SUCH_FILE = ErrorText("missing data: {name} has no {file}")
NO_COLUMN = ErrorText("missing data: {name} has no column {name}")
NOT_WHOLE_CSV = ErrorText("{name} has a CSV file that cannot be read")
NO_LABELS = ErrorText("a model is scored on batches of two tensors, inputs and labels")
NO_IMAGES = ErrorText(
    "missing data: {name} has no images.npy, no *-images-idx3-ubyte and no sub-folder per class"
)
SERVICE_AWAY = ErrorText("the data service of {name} is away")
SERVICE_REFUSES = ErrorText("the data service of {name} gives no samples of {name}")
NO_STREAMS = ErrorText("a worker without a socket for streams has no streamed samples")
OTHER_FOLDERS = ErrorText("samples of {number} folders are wanted; there are {number}")
OTHER_SAMPLES = ErrorText("samples {number} to {number} are wanted; there are {number}")
EMPTY_EXCHANGE = ErrorText("an exchange without samples is wanted")
SMALL_TIER = ErrorText("[tier] fast holds {number} samples twice, and a group of them is {number}")
NO_ACCURACY = ErrorText("train.repeat weighs an error, which is 1 - accuracy; the task has no such metric")
OTHER_SHAPES = ErrorText("{name} holds samples of {shape}, {name} of {shape}")
SMALL_IMAGES = ErrorText("{name} holds images of {shape}, smaller than the job's crop of {number}")
NOT_IMAGES = ErrorText("{name} holds {dtype} of shape {tuple}, not images")
OTHER_TYPE = ErrorText(
    "{name} holds {dtype}: images are uint8 or floats; read other data in a task's dataset"
)
LARGE_LABEL = ErrorText("{name} holds a label beyond the model's {number} classes")
SHORTER = ErrorText("{name} is shorter than it was")
SPARSE = ErrorText("{name} holds a sparse file")
OTHER_LABELS = ErrorText(
    "{name}: {number} images have labels of {dtype} in shape {tuple}, not one whole number each"
)
NEGATIVE_LABEL = ErrorText("{name}: a label is negative")
NOT_FINITE = ErrorText("{name} holds values that are not finite")
TOO_LARGE = ErrorText("{name} is larger than {bytes} bytes")
UNREADABLE = ErrorText("{name}: {reason}")
NOT_WHOLE_NPY = ErrorText("{name} is not a whole .npy file of numbers")
NOT_WHOLE_IDX = ErrorText("{name} is not a whole IDX file of bytes")
NOT_WHOLE_PARQUET = ErrorText("{name} is not a whole Parquet file")
NOT_WHOLE_TAR = ErrorText("{name} is not a whole tar file")
UNKNOWN_CLASS = ErrorText("{name}: {name} is not one of the job's classes")
OTHER_PICTURE = ErrorText("{name} is {picture}; the images before it are {picture}")
NO_PICTURE = ErrorText("{name} is not a picture that can be read")
OTHER_MODEL = ErrorText("{name} builds another model than the host")
OTHER_VALUES = ErrorText("{name} builds other frozen parameters or local layers than the host")
BEYOND_ROUNDING = ErrorText(
    "{name} builds other frozen parameters or local layers than the host: '{name}' differs beyond rounding"
)
NO_METRICS = ErrorText("the task's metrics must return a dict of names to sums and counts")
NO_SUM = ErrorText("each of the task's metrics must be a sum and a count")
UNNAMED_METRICS = ErrorText("the task's metrics must be at most {number}, named by identifiers")
NO_LOSS = ErrorText("the task's loss must return a sum, a tensor of one value, and its count")
NO_STATE = ErrorText("the task's state must have a state_dict of tensors by name")
UNFIT_STATE = ErrorText(
    "the state that the task has kept does not fit it any more: give the job another name"
)
DAMAGED_STATE = ErrorText(
    "the personal state that the device has kept is damaged or of another model: submit the job anew"
)
LOST_STATE = ErrorText(
    "the personal state of this job has made way for that of another job of its name: submit the job anew"
)
UNKEPT_STATE = ErrorText("the personal state cannot be kept: there is no room for it, or the disk has failed")
NO_ITEMS = ErrorText("the task's dataset is no map-style Dataset: it has no length or no items")
NO_BATCH_DIMENSION = ErrorText("a batch of one sample has tensors whose first dimension is not 1")
UNLIKE_BATCHES = ErrorText("samples of different structures are in batches that cannot be joined")
NOT_TRAINED = ErrorText("the model has no parameter that may be trained")
NOT_CARRIED = ErrorText("the model's tensor '{name}' is {dtype}, which float32 cannot carry")
NOT_PERSISTENT = ErrorText(
    "the model's tensor '{name}' is {dtype}, which float32 cannot carry; set persistent=False"
)
NOT_FLOAT32 = ErrorText(
    "the model's tensor '{name}' is float64, which float32 cannot carry; call .float() on the model"
)
LARGE_NUMBERS = ErrorText("the model's tensor '{name}' holds numbers over {number}")
CHANGED_PARAMETER = ErrorText("the model's forward changes its parameter '{name}'; only the optimizer may")
CHANGED_CONSTANT = ErrorText(
    "the model changes its buffer '{name}', which is of a type or a size that float32 cannot carry"
)
NOT_WHOLE_NUMBERS = ErrorText("'{name}' should be whole numbers, and is not finite")
OTHER_SIZE = ErrorText("the model's state is {number} float32 values; got {dtype} {tuple}")
NO_SUCH_STATE = ErrorText("there are {number} states, and none with number {number}")
EMPTY_RANK = ErrorText("rank {number} has no samples")
SMALL_RANK = ErrorText("rank {number} has {number} samples; its device's policy.least_samples is {number}")
UNEQUAL_RANKS = ErrorText("the ranks have {tuple} samples: use private=True for data that differs")
SMALL_BATCH = ErrorText("a batch of {number} is too small: {number} ranks need {number} or more")
NO_BATCH = ErrorText("step without a batch: take one from group.loader before each")
NO_STEP = ErrorText("the next batch is wanted, but the last one's loss was not given to step")
LARGE_LOSS = ErrorText("the loss has the shape {tuple}: step wants one number, the sum over the batch")
UNLIKE_RANKS = ErrorText("the ranks have models of different sizes")
NO_NETWORK = ErrorText(
    "a private launch has no network: train with millpond.train.group in place of torch.distributed, or leave"
    " --private out"
)
NO_PARAMETERS = ErrorText("the model has no parameters to train")
