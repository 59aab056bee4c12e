# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages of a host and an agent about a launched script (over a control connection)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from millpond.base.errors import ConfigError, ProtocolError
from millpond.base.text import printable
from millpond.wire.messages import Kind, Message, message

MOST_CODE = 3 << 20
"""Most bytes of all files of a script, with their names: they are sent in the head of one message."""
MOST_FILES = 4096
"""Most files of a script, and most that one of its workers saves."""
LONGEST_LINE = 4096
"""Most characters of a line of output; longer ones are cut into several."""

MOST_AT_ONCE = 1 << 16
"""Most characters of all lines of one Output, line ends counted."""
SAVED_PART = 1 << 17
"""Most bytes of a saved file in one message."""
LONGEST_PATH = 1024
MOST_PROCESSES = 256
MOST_NAMED = 8
"""Most names of files that were left out."""
WORKER = "MILLPOND_WORKER"
"""The variable of a script's environment that holds its worker's name, such as csd0 or host."""
SHARED, SHARED_PLACE = "MILLPOND_SHARED", "/shared"
"""The variable that tells where the folder is that all workers share, if they do; and that place."""


@dataclass(frozen=True, slots=True)
class ElasticAgents:
    """How the elastic agents of torch run a script: on ``least`` to ``most`` workers, with so many
    ``restarts`` of each one's processes, and with settings of the rendezvous, see torchrun's --rdzv-conf.
    """

    least: int
    most: int
    restarts: int = 0
    conf: tuple[tuple[str, str], ...] = ()


@message("launch")
@dataclass(frozen=True, slots=True)
class Launch(Message):
    """Run ``script``, one of ``files``, as worker ``rank`` of ``world_size``, named ``worker``, in the launch
    ``run``.

    The workers meet at the master's port, and each is at its own ``address``; ``names`` are the addresses of
    all, each with the names that it has. If ``confined``, they have no network but the exchanges of this
    connection, see ``group_messages``, and see the private ``folders`` (all that the device's policy
    allows, if there are none); ``signature`` is of an owner of the device. At the end come the files that the
    script has saved, up to ``most_saved`` bytes; their number alone if that is 0.

    The script is run as the ``module`` of that name, if there is one, which may be installed rather than one
    of the files, by so many ``processes``, which share the worker's folder; with ``shared`` processors, those
    of several workers' machine, each has one thread. It has ``variables`` in its environment. With
    ``inputs``, InputParts and InputsEnd follow. If it ``tells_ports``, its first process sends Listening
    whenever these change; if it ``tells_begin``, Begun comes first. If it ``shares`` a folder with the
    others, see ShareFolder, that is at SHARED_PLACE. The data services of the launch apply the functions of
    ``transforms``, one of the files. If it is ``elastic``, torch's agent runs the script, gives it its
    variables and has the rendezvous at the master's port; ``rank`` and ``world_size`` are those of the agents
    at the start.

    Answered by any number of Outputs, then Exited, SavedParts, and at last AllSaved. The script runs for as
    long as this connection is open.
    """

    script: str
    arguments: tuple[str, ...]
    files: dict[str, bytes]
    rank: int
    world_size: int
    master_address: str
    master_port: int
    address: str = ""
    most_saved: int = 0
    confined: bool = False
    folders: tuple[str, ...] = ()
    signature: str = ""
    worker: str = ""
    run: str = ""
    names: tuple[tuple[str, str], ...] = ()
    module: str = ""
    processes: int = 1
    shared: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    inputs: bool = False
    tells_ports: bool = False
    shares: bool = False
    transforms: str = ""
    elastic: ElasticAgents | None = None
    tells_begin: bool = False


@message("launch.share")
class ShareFolder(Message):
    """Mount the folder that the launch ``run`` shares, before its Launch, over another connection.

    Answered by a Ticket for each connection to its server that the mount wants, which the host makes with it,
    and by Ok once it is mounted. These are encrypted if ``tls``. The mount ends with this connection.
    """

    run: str
    tls: bool


@message("launch.share.end")
class EndSharing(Message):
    """Unmount the shared folder once all that was written is sent; answered as ShareFolder, at last by Ok."""


@message("launch.ports")
@dataclass(frozen=True, slots=True)
class Listening(Message):
    """The script now listens on these TCP ports."""

    ports: tuple[int, ...]


@message("launch.input")
@dataclass(frozen=True, slots=True)
class InputPart(Message):
    """A part of the file ``path`` of ``size`` bytes, which the script finds in its folder, or, if it is a
    ``wheel``, installed; the payload begins at ``start``. The parts of a file come in order.
    """

    path: str
    start: int
    size: int
    wheel: bool = False


@message("launch.inputs_end")
@dataclass(frozen=True, slots=True)
class InputsEnd(Message):
    """All parts of files have come."""


@message("launch.begun")
@dataclass(frozen=True, slots=True)
class Begun(Message):
    """The script's files are in place, and its wheels installed: its processes start."""


@message("launch.stop")
@dataclass(frozen=True, slots=True)
class StopScript(Message):
    """Kill the script now; what it has saved until then is wanted."""


@message("launch.restart")
@dataclass(frozen=True, slots=True)
class RestartScript(Message):
    """End the processes of an elastic script, which its agent starts again: another worker is lost, whose
    connections may have ended without a word.
    """


@message("launch.output", Kind.LAUNCHED)
@dataclass(frozen=True, slots=True)
class Output(Message):
    """Lines that the script printed."""

    lines: tuple[str, ...]


@message("launch.taken")
@dataclass(frozen=True, slots=True)
class Taken(Message):
    """The host has taken the last Output or SavedPart of a device: the next one may come. So the script waits
    for the reader of its output, and nothing waits in the connection, which would be given up then.
    """


@message("launch.exited", Kind.LAUNCHED)
@dataclass(frozen=True, slots=True)
class Exited(Message):
    """The script has ended: its exit code, 128 + N if signal N ended it, and the exception of a confined one
    that raised one, as far as it may leave the device.
    """

    code: int
    error: str = ""


@message("launch.saved", Kind.LAUNCHED)
@dataclass(frozen=True, slots=True)
class SavedPart(Message):
    """A part of the file ``path``, relative to the script's folder, which has ``size`` bytes; the payload
    begins at ``start``. The parts of a file come in order.
    """

    path: str
    start: int
    size: int


@message("launch.all_saved", Kind.LAUNCHED)
@dataclass(frozen=True, slots=True)
class AllSaved(Message):
    """The script had saved ``files`` files of ``size`` bytes; all that were wanted have come. So many were
    ``left_out``, for their size or because they are no plain files; the first of them are ``named``.
    """

    files: int
    size: int
    left_out: int
    named: tuple[str, ...] = ()


def check_path(path: str) -> None:
    """Raise ConfigError unless ``path`` names a file below the folder that it is relative to."""
    parts = path.split("/")
    odd = not path.isprintable() or len(path) > LONGEST_PATH or any(len(part) > 255 for part in parts)
    if odd or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(f"'{path:.80}' is no name of a file")


def check_files(script: str, files: Mapping[str, bytes], *, installed: bool = False) -> None:
    """Check the files of a script, which itself may be ``installed`` where it runs. Raises ConfigError for
    names that lead outside of its folder or that cannot be beside each other, and for too many bytes.
    """
    check_names(script, files, installed=installed)
    check_size(len(files), sum(len(name.encode()) + len(content) for name, content in files.items()))


def check_names(script: str, names: Collection[str], *, installed: bool = False) -> None:
    """Check the names of a script's files, see ``check_files``."""
    for name in (script, *names):
        check_path(name)
    for name in names:
        for folder in map(str, PurePosixPath(name).parents):
            if folder in names:
                raise ConfigError(f"'{folder:.80}' cannot be a file and the folder of '{name:.80}'")
    if script not in names and not installed:
        raise ConfigError(f"the script '{script:.80}' is not among its files")


def check_size(files: int, size: int) -> None:
    """Raise ConfigError for more files, or more bytes of them with their names, than can be sent."""
    if files > MOST_FILES:
        raise ConfigError(f"the script has {files} files; {MOST_FILES} are possible")
    if size > MOST_CODE:
        raise ConfigError(
            f"the script's files have {size / 1e6:.1f} MB; {MOST_CODE >> 20} MiB are possible: put data into"
            " the public part of the devices' volumes",
        )


def check_transforms_file(name: str, files: Collection[str]) -> None:
    """Raise ConfigError unless ``name`` is one of a launch's Python files."""
    if name not in files or not name.endswith(".py"):
        raise ConfigError(f"the transforms '{name:.80}' are no Python file among the script's files")


class SavedOrder:
    """Checks the order of SavedParts of one worker: each file whole, once, and all within ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most, self._paths, self._folders = most, set[str](), set[str]()
        self._path, self._next, self._size = "", 0, 0

    def take(self, part: SavedPart, payload: int) -> None:
        """Note a part with so many bytes. Raises ProtocolError."""
        if part.start == 0 and part.path not in self._paths and self._next == self._size:
            self._begin(part)
        if (part.path, part.start, part.size) != (self._path, self._next, self._size):
            raise ProtocolError("a worker sent parts of files out of order")
        if not 0 <= payload <= min(SAVED_PART, part.size - part.start) or (not payload and part.size):
            raise ProtocolError(f"a worker sent {payload} bytes of a file at once")
        self._next += payload

    def _begin(self, part: SavedPart) -> None:
        try:
            check_path(part.path)
        except ConfigError as error:
            raise ProtocolError(f"a worker saved a file that is refused: {error}") from None
        parents = {str(folder) for folder in PurePosixPath(part.path).parents}
        self._most -= part.size
        if part.size < 0 or self._most < 0 or len(self._paths) >= MOST_FILES:
            raise ProtocolError("a worker saved more than was asked for")
        if part.path in self._folders or self._paths & parents:
            raise ProtocolError("a worker saved a file below another one")
        self._paths.add(part.path)
        self._folders |= parents
        self._path, self._next, self._size = part.path, 0, part.size


def script_digest(
    script: str,
    files: Mapping[str, bytes],
    arguments: Sequence[str] = (),
    module: str = "",
    transforms: str = "",
) -> str:
    """Return the SHA-256 of a script, its files, its arguments, the module that it is run as and the file of
    transforms, if there are such, in hexadecimal, which owners of devices list or sign.
    """
    kind = f"launch -m {module}" if module else "launch"
    kind = f"{kind} --transforms {transforms}" if transforms else kind
    contents = [[name, hashlib.sha256(content).hexdigest()] for name, content in sorted(files.items())]
    return hashlib.sha256(json.dumps([kind, script, contents, *arguments]).encode()).hexdigest()


def environment(launch: Launch, interface: str, local: int = 0) -> dict[str, str]:
    """Return the variables that torchrun gives a worker's process, the ``local``-th, and those that the user
    gives it; ``interface`` is the one that leads to the others. A confined one has no address to meet at.
    """
    found = {
        "HF_HUB_OFFLINE": "1",  # no worker reaches it, and each look-up would be tried again and again
        WORKER: launch.worker,
    }
    if launch.shares:
        found[SHARED] = SHARED_PLACE
    if launch.shared or launch.processes > 1:
        found["OMP_NUM_THREADS"] = "1"
    if not launch.confined:
        found["GLOO_SOCKET_IFNAME"] = interface
        found["TP_SOCKET_IFNAME"] = interface  # torch.distributed.rpc: otherwise by the name of the machine
    if not launch.elastic:  # torch's agent sets these by itself
        found |= _place(launch, local)
        found |= {} if launch.confined else _meeting(launch)
    return found | dict(launch.variables)


def _place(launch: Launch, local: int) -> dict[str, str]:
    rank, size = launch.rank * launch.processes + local, launch.world_size * launch.processes
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(launch.processes),
        "GROUP_RANK": str(launch.rank),
        "GROUP_WORLD_SIZE": str(launch.world_size),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(size),
    }


def _meeting(launch: Launch) -> dict[str, str]:
    return {
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": launch.run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 has the store
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def check_start(processes: int, variables: Mapping[str, str], elastic: ElasticAgents | None = None) -> None:
    """Raise ConfigError for a number of processes, variables of the environment, or numbers of workers and
    restarts, that cannot be.
    """
    if elastic and not (1 <= elastic.least <= elastic.most <= MOST_PROCESSES and elastic.restarts >= 0):
        numbers = f"{elastic.least} to {elastic.most} workers with {elastic.restarts} restarts"
        raise ConfigError(f"{numbers} cannot be: 1 to {MOST_PROCESSES} workers are possible")
    if not 1 <= processes <= MOST_PROCESSES:
        raise ConfigError(f"a worker has 1 to {MOST_PROCESSES} processes, not {processes}")
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(f"'{printable(name, 80)}' cannot be a variable of the environment")


class Lines:
    """Splits a stream of bytes into lines. Bytes that are not UTF-8 are replaced."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> tuple[str, ...]:
        """Return the lines that ``data`` completes; a carriage return, as of a progress bar, ends one too."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        while len(self._rest) >= LONGEST_LINE:
            whole.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return tuple(part for line in whole for part in _parts(line))

    def end(self) -> tuple[str, ...]:
        """Return the last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return tuple(_parts(rest)) if rest else ()


def _parts(line: bytes) -> list[str]:
    text = line.decode(errors="replace")
    return [text[at : at + LONGEST_LINE] for at in range(0, max(len(text), 1), LONGEST_LINE)]
