# SPDX-License-Identifier: Apache-2.0
"""Pure: a worker's report of an error, rebuilt from a closed set: the job's own code runs in the worker, and
could put anything into a text.

A text that may leave is one of millpond's own, whose only free parts are names that the host itself has sent
and small numbers; or, of any other exception, its type and its place in the job's files. A type or a function
is named only if it is Python's, or a name in the job's files.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
from collections.abc import Mapping, Sequence

from millpond.wire.messages import Failure

CODES = ("data", "model", "io")
_HIDDEN = "an error whose text stays on the device; the job's log there has it"
_NUMBER = r"\d{1,8}"
_SHAPE = r"(?:\d{1,8}x){0,3}\d{1,8}"
_TUPLE = r"\((?:\d{1,8},? ?){0,4}\)"
_DTYPE = r"(?:bool|u?int(?:8|16|32|64)|float(?:16|32|64)|bfloat16|complex(?:64|128))"
_NAME = "NAME"
_TEMPLATES = (
    f"missing data: there is no folder {_NAME}",
    "missing data: there are no samples",
    f"missing data: {_NAME} holds no samples",
    f"missing data: {_NAME} has no (?:images.npy|a file of the samples|sub-folder per class)",
    rf"missing data: {_NAME} has no (?:PNG or JPEG images|\*-images-idx3-ubyte)",
    f"samples of {_NUMBER} folders are wanted; there are {_NUMBER}",
    f"samples {_NUMBER} to {_NUMBER} are wanted; there are {_NUMBER}",
    "an exchange without samples is wanted",
    f"{_NAME} holds samples of {_SHAPE}, {_NAME} of {_SHAPE}",
    f"{_NAME} holds {_DTYPE} of shape {_TUPLE}, not images",
    f"{_NAME}: {_NUMBER} images have labels of {_DTYPE} in shape {_TUPLE}, not one whole number each",
    f"{_NAME}: a label is negative",
    f"{_NAME} holds values that are not finite",
    rf"{_NAME} is larger than \d{{1,12}} bytes",
    f"{_NAME}: (?:{'|'.join(re.escape(os.strerror(number)) for number in errno.errorcode)})",
    f"{_NAME} is not a whole (?:.npy file of numbers|IDX file of bytes)",
    f"{_NAME} is not one of the job's classes",
    f"{_NAME} is {_NUMBER}x{_NUMBER} (?:grey|RGB); the images before it are {_NUMBER}x{_NUMBER} (?:grey|RGB)",
    f"{_NAME} is not a picture that can be read",
    r"[\w-]{1,63} builds another model than the host",
    "the model has no parameter(?:s| that may be trained)",
)
_PLACE = re.compile(r"([A-Za-z_]\w*) (?:at (\S+):(\d{1,6})(?: in (\S+))?|outside of the model's files); .*")
_OWN_FILE = re.compile(r"millpond/train/[a-z_/]{1,60}\.py")


def rebuilt(failure: Failure, names: Sequence[str], code: Mapping[str, str]) -> Failure:
    """Return the part of a report that may leave the device. ``names`` are the folders that the host has
    named, ``code`` the job's files.
    """
    found = failure.code if failure.code in CODES else "model"
    text = failure.text if _is_own(failure.text, names) else _place(failure.text, code)
    return Failure(found, text or _HIDDEN)


def _is_own(text: str, names: Sequence[str]) -> bool:
    usual = r"(?:/(?:images|labels)\.npy)?"
    name = "(?:a file of the samples|" + "|".join(re.escape(each) + usual for each in names) + ")"
    return any(re.fullmatch(template.replace(_NAME, name), text) for template in _TEMPLATES)


def _place(text: str, code: Mapping[str, str]) -> str:
    if not (match := _PLACE.fullmatch(text)):
        return ""
    kind, file, line, function = match.groups()
    known = "\n".join(code.values())
    if not (_is_exception(kind) or _is_word(kind, known)):
        kind = "an exception"
    if file is None:
        return f"{kind} outside of the model's files; its message stays on the device"
    if not (_OWN_FILE.fullmatch(file) or int(line) <= code.get(file, "").count("\n") + 1):
        return f"{kind}; its message stays on the device"
    where = f" in {function}" if _is_word(function or "", known) else ""
    return f"{kind} at {file}:{line}{where}; its message stays on the device"


def _is_exception(name: str) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and issubclass(found, BaseException)


def _is_word(name: str, text: str) -> bool:
    return bool(name) and name.isidentifier() and bool(re.search(rf"\b{re.escape(name)}\b", text))
