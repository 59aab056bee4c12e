# SPDX-License-Identifier: Apache-2.0
"""Edge: makes this process, a fork of one that has torch, what ``python script.py`` would be."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import importlib.util
import io
import os
import pwd
import runpy
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, MillpondError
from millpond.train import error_texts
from millpond.train.distributed.data_service_messages import REQUESTS_CHANNEL
from millpond.train.distributed.group_messages import GROUP_CHANNEL
from millpond.train.distributed.launch_messages import Launch, environment
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure

_REPORT_SECONDS = 10.0
_SETTLE_SECONDS = 0.2
_INTERRUPTED = 130
_BEFORE_A_SCRIPT = (__file__, "<frozen ", str(importlib.util.__file__))
"""The beginnings of the names of files whose code is run before a script's own."""


def run_script(launch: Launch, folder: Path, interface: str, requests: int, local: int) -> NoReturn:
    """Run the script's ``local``-th process in its ``folder`` and exit as it does; ``requests`` is the
    channel of its requests.
    """
    code = 1
    try:
        code = script_code(launch, folder, interface, requests, local)
    except BaseException:  # noqa: BLE001 - nothing may go on in a copy of the first process
        traceback.print_exc()
    finally:
        os._exit(code)


def script_code(launch: Launch, folder: Path, interface: str, requests: int, local: int = 0) -> int:
    """Run the script as ``run_script`` does, to the end of its threads; return its exit code."""
    _prepare(launch, folder, interface, requests, local)
    code = _run(launch, folder, requests if launch.confined else None)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python ends: threads first
        atexit._run_exitfuncs()
        _flush()
    except BaseException:  # noqa: BLE001 - the script has ended as it has
        traceback.print_exc()
    return code


def _prepare(launch: Launch, folder: Path, interface: str, requests: int, local: int) -> None:
    os.chdir(folder)
    user = pwd.getpwuid(os.getuid()).pw_name
    wheels = os.environ.get("PYTHONPATH", "")
    os.environ.update({"USER": user, "LOGNAME": user} | environment(launch, interface, local))
    os.environ[GROUP_CHANNEL if launch.confined else REQUESTS_CHANNEL] = str(requests)
    path = folder / launch.script
    sys.argv = [str(path) if launch.module else launch.script, *launch.arguments]
    sys.path.insert(0, str(folder if launch.module else path.parent))
    _take_effect(dict(launch.variables), wheels)
    lines = launch.processes > 1  # otherwise parts of several processes' lines would make one
    sys.stdout, sys.stderr = _stream(1, lines), _stream(2, lines)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # all forks have the same state; Python's own random has new ones by itself
    if torch := sys.modules.get("torch"):
        torch.use_deterministic_algorithms(False)  # which is on for workers of jobs
        torch.seed()
        threads = os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
        with contextlib.suppress(ValueError, RuntimeError):  # whatever the user has set
            torch.set_num_threads(int(threads))
        if launch.confined:
            torch.distributed.init_process_group = _refuse_network
        else:
            _settle_before_the_end(torch.distributed)
    Path("/proc/self/comm").write_text(path.name[-15:])


def _take_effect(variables: Mapping[str, str], wheels: str) -> None:
    """Do with the user's variables what Python and torch do when they start, which was before; programs that
    the script starts find the ``wheels``, too.
    """
    tempfile.tempdir = None  # of TMPDIR
    time.tzset()
    if given := variables.get("PYTHONPATH"):
        sys.path[1:1] = [str(Path(entry).absolute()) for entry in given.split(os.pathsep) if entry]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (given, wheels)))
    if filters := variables.get("PYTHONWARNINGS"):
        sys.warnoptions[:0] = filters.split(",")
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    if "TORCH_LOGS" in variables and (logs := sys.modules.get("torch._logging")):
        logs._init_logs()


def _refuse_network(*_: Any, **__: Any) -> NoReturn:
    raise LocalError(error_texts.NO_NETWORK())


def _settle_before_the_end(distributed: ModuleType) -> None:
    """Have threads of gloo finish before a process group ends. torch 2.13 joins them while it holds Python's
    lock; one that still has to free a tensor of a script waits for that lock, and both for ever.
    """
    destroy = distributed.destroy_process_group

    @functools.wraps(destroy)
    def settled(*arguments: Any, **options: Any) -> None:
        time.sleep(_SETTLE_SECONDS)
        destroy(*arguments, **options)

    for module in (distributed, sys.modules.get("torch.distributed.distributed_c10d")):
        if module and hasattr(module, "destroy_process_group"):
            module.destroy_process_group = settled  # type: ignore[attr-defined]


def _stream(descriptor: int, lines: bool) -> io.TextIOWrapper:
    """Open an output that is shown line by line: Python must not keep it until a buffer is full."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=lines, write_through=not lines)


def _run(launch: Launch, folder: Path, group: int | None) -> int:
    """Run a file as the main module; ``group`` is the channel of a confined one. Returns the exit code."""
    path = folder / launch.script
    module = ModuleType("__main__")
    package = launch.module.rpartition(".")[0] if launch.module else None
    found = {"__file__": str(path), "__builtins__": builtins, "__cached__": None, "__package__": package}
    module.__dict__.update(found)
    sys.modules["__main__"] = module
    try:
        if launch.module:
            if not importlib.util.find_spec(launch.module):
                raise ModuleNotFoundError(f"No module named '{launch.module}'", name=launch.module)
            runpy._run_module_as_main(launch.module)  # type: ignore[attr-defined]
        else:
            exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # noqa: S102 - what it is for
    except SystemExit as end:
        return _code(end)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - a script may raise anything
        _show(error, launch)
        if group is not None:
            _report(error, group, folder)
        return 1
    return 0


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _show(error: BaseException, launch: Launch) -> None:
    """Print the traceback, from the first line of the script or its package on, and what can be done about
    it.
    """
    trace: TracebackType | None = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith(_BEFORE_A_SCRIPT):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if hint := _hint(error, launch):
        print(f"millpond: {hint}", file=sys.stderr)


def _hint(error: BaseException, launch: Launch) -> str:
    """Return what a script that was written for another place needs here, "" if that is not known."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        file = error.name.replace(".", "/")
        return (
            f"'{error.name}' is not here: send a module of your own by --file {file}.py, others by --wheels"
        )
    if isinstance(error, ImportError) and error.name and _is_namespace(error.name):
        return f"'{error.name}' is here in part: send all of it by --file {error.name.replace('.', '/')}"
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return f"relative imports are for modules: -m {launch.script.removesuffix('.py').replace('/', '.')}"
    if (torch := sys.modules.get("torch")) and not torch.cuda.is_available():
        if "NCCL" in str(error):
            return "nccl needs a GPU on each worker: init_process_group('gloo') works without"
        if "cuda" in str(error).lower():
            return "there is no CUDA here: ask the script for the CPU, as by an option such as --device cpu"
    return ""


def _is_namespace(name: str) -> bool:
    """Return whether ``name`` is a package without a file, as one whose ``__init__.py`` was not sent."""
    package = sys.modules.get(name)
    return hasattr(package, "__path__") and getattr(package, "__file__", None) is None


def _report(error: BaseException, group: int, folder: Path) -> None:
    """Send what may leave the device of an exception: a text of millpond's own, or its type and its place."""
    from millpond.train.worker.error_reports import failure  # only here: scripts with a network need none

    own = isinstance(error, LocalError)
    report = Failure("model", str(error)) if own else failure(error, folder, "", full=False)
    try:
        with Channel(socket.socket(fileno=group), "the agent") as channel:
            channel.send(report, Deadline.after(_REPORT_SECONDS))
    except (MillpondError, OSError):
        print("the error could not be reported", file=sys.stderr)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
