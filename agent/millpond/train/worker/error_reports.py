# SPDX-License-Identifier: Apache-2.0
"""Pure: a worker's report of an exception, without the parts that must stay on the device.

The message of an exception can hold private samples. A device therefore reports the text of millpond's own
errors, which are written for that, and of all others only the type, the place in the user's files, and texts
of a closed set, see ``fixed_texts``.
"""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.base.text import escaped
from millpond.train.data.errors import TRANSIENT, DataError
from millpond.train.worker.fixed_texts import is_fixed
from millpond.wire.messages import Failure

PROCESSES = "processes"
"""The code of an error that a refused process or thread may have caused."""
_ALLOCATION = re.compile("can't allocate memory|not enough memory|out of memory")
_NO_THREAD = re.compile("can't start new thread|Resource temporarily unavailable")
_LONGEST_CHAIN = 20
_HERE = Path(__file__).parents[1]
_MODULE_FILE = "torch/nn/modules/module.py"
_PARTS = {
    "torch/optim/": "in the optimizer's step",
    "torch/autograd/": "in the backward pass",
    "torch/utils/data/_utils/collate.py": "in torch's default_collate",
}
"""Parts of torch that call no line of the user's."""


def failure(error: BaseException, code_dir: Path, factory: str, *, full: bool) -> Failure:
    """Report an error: code ``data``, ``io`` (which another try may mend), ``memory``, ``processes`` or
    ``model``, and one line of text; with any message if ``full``. ``factory`` makes the task or the model.
    """
    if isinstance(error, LocalError) and _is_ours(error):
        if isinstance(error, DataError):
            text = str(error) if full else error.discreet
            return Failure("io" if error.transient else "data", escaped(text))
        return Failure("model", escaped(str(error)))
    place = _users_place(error, code_dir) or _place_in_model(error, factory) or _part(error)
    place = place or _own_place(error)
    code = "io" if isinstance(error, OSError) and error.errno in TRANSIENT else "model"
    if _is_out_of_memory(error):
        code, place = "memory", f"{place}: out of memory"
    elif _may_lack_processes(error):
        code = PROCESSES
    if full:
        message = " ".join("".join(traceback.format_exception_only(error)).split())
        return Failure(code, escaped(f"{message} ({place})"))
    text = " ".join(str(error).split())
    told = f": {text}" if code != "memory" and is_fixed(text) else "; its message stays on the device"
    return Failure(code, f"{type(error).__name__} {place}{told}")


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed: torch raises RuntimeError for the processor's memory, and
    OutOfMemoryError for that of an accelerator.
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_ALLOCATION.search(str(error)))
    )


def _may_lack_processes(error: BaseException) -> bool:
    """Return whether the error, or one that it was raised after, is that of a refused process or thread; a
    socket without data raises the same.
    """
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if isinstance(found, BlockingIOError):
            return True
        if isinstance(found, RuntimeError) and _NO_THREAD.search(str(found)):
            return True
        found = found and (found.__cause__ or found.__context__)
    return False


def _is_ours(error: BaseException) -> bool:
    """Return whether millpond alone raised the error: user code can raise a LocalError too, even from no
    file.
    """
    return all(_below(frame.filename, _HERE) for frame in traceback.extract_tb(error.__traceback__))


def _users_place(error: BaseException, code_dir: Path) -> str | None:
    """Return the last place in the user's code that the error went through, None if there is none."""
    if isinstance(error, SyntaxError) and error.filename and _below(error.filename, code_dir):
        return f"at {_below(error.filename, code_dir)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if name := _below(frame.filename, code_dir):
            return f"at {name}:{frame.lineno} in {frame.name}"
    return None


def _place_in_model(error: BaseException, factory: str) -> str | None:
    """Return the model as the place if the error went through a torch module: its layers are torch's, but the
    user has put them together.
    """
    called = any(frame.filename.endswith(_MODULE_FILE) for frame in traceback.extract_tb(error.__traceback__))
    return f"in the model that {factory} makes" if called and factory else None


def _part(error: BaseException) -> str | None:
    """Return the part of torch that the error comes from, if it is one that has no line of the user's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((told for part, told in _PARTS.items() if any(part in file for file in files)), None)


def _own_place(error: BaseException) -> str:
    """Return the last place in millpond."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if name := _below(frame.filename, _HERE):
            return f"at millpond/train/{name}:{frame.lineno} in {frame.name}"
    return "outside of the model's files"


def _below(filename: str, folder: Path) -> str | None:
    path = Path(filename)
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else None
