# SPDX-License-Identifier: Apache-2.0
"""Edge (files): a worker's report of an error, rebuilt from a closed set: the job's own code runs in the
worker, and could put anything into a text.

A text that may leave is one of millpond's own, see ``train.error_texts``, with names that the host itself has
sent; or, of any other exception, its type and its place in the job's or millpond's files. A type or a
function is named only if it is Python's, or a name in the job's files. Its own text is told only if it is one
of torch's, numpy's or Python's without a value, see ``fixed_texts``.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from millpond import train
from millpond.agent.policy.batch_structure import is_word
from millpond.train.error_texts import TEXTS
from millpond.train.worker.fixed_texts import is_fixed
from millpond.wire.messages import Failure

CODES = ("data", "model", "io", "memory")
_HIDDEN = "an error whose text stays on the device; the job's log there has it"
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
    return any((match := own.pattern.fullmatch(text)) and known.issuperset(match.groups()) for own in TEXTS)


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
