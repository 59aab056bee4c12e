# SPDX-License-Identifier: Apache-2.0
"""Processes that a zygote forks: confined, signalled, killed and waited for like any others."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import Refused
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import SandboxedProcess, end, start
from millpond.linux.zygote import client
from millpond.linux.zygote.client import Child, Zygote
from millpond.train.protocol import GetMomentum
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

from ..tunnel.processes import runs
from ..waiting import eventually

SOON = 30.0
NOBODY = 65534
WORKER = "millpond.train.worker.process"  # it needs no torch until it is told to prepare
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and uids of this machine")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker, and this end of its channel."""

    process: SandboxedProcess
    channel: Channel

    def lives(self) -> bool:
        """Whether it answers: it has begun, and waits for its first task."""
        with pytest.raises(Refused, match="came before 'prepare'"):
            self.channel.call(GetMomentum(), Ok, Deadline.after(SOON))
        return True


Begin = Callable[..., Worker]


@pytest.fixture
def zygotes() -> Iterator[Zygote]:
    """One without torch, of which nothing is left."""
    made = Zygote(WORKER, idle=600.0)
    yield made
    made.close()


@pytest.fixture
def begin(zygotes: Zygote, tmp_path: Path) -> Iterator[Begin]:
    """Starts workers of the zygote, or each by itself."""
    with contextlib.ExitStack() as stack:

        def run(sandbox: Sandbox, *shared: int, alone: bool = False) -> Worker:
            ours, theirs = socket.socketpair()
            channel = stack.enter_context(Channel(ours, "the worker"))
            with theirs, (tmp_path / "log").open("ab") as log:
                passed = [theirs.fileno(), *shared]
                process: SandboxedProcess
                if alone:
                    command = [sys.executable, "-m", WORKER, str(theirs.fileno())]
                    process = start(
                        sandbox, command, pass_fds=passed, stdout=log.fileno(), stderr=log.fileno()
                    )
                else:
                    process = zygotes.start(sandbox, ["3"], passed, log.fileno())
            stack.callback(end, process)
            return Worker(process, channel)

        yield run


def children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def links(pid: int) -> dict[int, str]:
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found[int(entry.name)] = str(entry.readlink())
    return found


_NUMBERS = ("Pid", "PPid", "Tgid", "Ngid", "NStgid", "NSpid", "NSpgid", "NSsid")
UNLIKE = frozenset(("Name", "State", "FDSize", "Threads", *_NUMBERS))


def confinement(pid: int) -> dict[str, object]:
    """What confines a process and what it is given, without its numbers and its memory."""
    process = Path(f"/proc/{pid}")
    lines = [line.split(":\t") for line in (process / "status").read_text().splitlines()]
    status = {key: text for key, text in lines if key not in UNLIKE and key[:2] != "Vm" and key[:3] != "Rss"}
    status = {key: text for key, text in status.items() if "ctxt_switches" not in key}
    # glibc catches signals 32 and 33 itself in a process that has ever had a second thread
    status["SigCgt"] = f"{int(status['SigCgt'], 16) & ~(3 << 31):016x}"
    mounts = [line.split()[3:] for line in (process / "mountinfo").read_text().splitlines()]
    spaces = {
        path.name: path.readlink() == Path("/proc/self/ns", path.name).readlink()
        for path in process.glob("ns/*")
    }
    session = (process / "stat").read_text().rsplit(")", 1)[1].split()[2:4] == [str(pid)] * 2
    return {
        "status": status,
        "mounts": mounts,
        "spaces": spaces,
        "leads its session": session,
        "limits": [
            line for line in (process / "limits").read_text().splitlines() if "Max processes" not in line
        ],
        "owner": (process.stat().st_uid, process.stat().st_gid),  # root's, if it could not look at itself
        "descriptors": sorted(link.partition("[")[0] for link in links(pid).values()),
        "places": [str((process / name).readlink()) for name in ("cwd", "root")],
        "oom": (process / "oom_score_adj").read_text(),
        "shared": [
            line for line in (process / "maps").read_text().splitlines() if line.split()[1][1::2] == "ws"
        ],
    }


def device(folder: Path) -> Sandbox:
    binds = (*system_binds(), *python_binds(), Bind(folder, folder))
    return Sandbox(binds=binds, own_network=True, own_pids=True, uid=64002)


def host(folder: Path) -> Sandbox:
    binds = (*system_binds(), *python_binds(), Bind(folder, folder))
    return Sandbox(binds=binds, own_network=True, own_pids=True, capabilities=False)


@needs_root
@pytest.mark.parametrize("kind", [device, host])
def test_a_fork_is_as_confined_as_a_process_that_is_started_alone(
    kind: Callable[[Path], Sandbox], begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("MILLPOND_SECRET", "x")
    shared = memory.make("sums of the test")
    old, new = begin(kind(tmp_path), shared, alone=True), begin(kind(tmp_path), shared)
    os.close(shared)
    assert old.lives() and new.lives()
    expected, found = confinement(old.process.pid), confinement(new.process.pid)
    assert (expected.pop("oom"), found.pop("oom")) == ("0\n", "500\n")  # jobs' processes are killed first
    assert found == expected
    assert found["status"]["CapEff"] == "0" * 16 and found["status"]["NoNewPrivs"] == "1"  # type: ignore[index]
    assert {name for name, same in found["spaces"].items() if not same} >= {"net", "pid", "mnt", "ipc"}  # type: ignore[attr-defined]
    assert found["shared"] == []
    variables = Path(f"/proc/{new.process.pid}/environ").read_text().split("\0")
    names = {line.partition("=")[0] for line in variables if line} - {"COVERAGE_PROCESS_CONFIG"}
    assert names <= {"PATH", "LANG", "LC_ALL", "TZ", "HOME", "PYTHONHASHSEED"}


@needs_root
def test_the_zygote_has_no_network_and_nobody_elses_memory(
    zygotes: Zygote, begin: Begin, tmp_path: Path
) -> None:
    secrets = [Bind(tmp_path, Path(f"/canary-4711-{number}")) for number in range(100)]
    first = begin(Sandbox(binds=(*system_binds(), *python_binds(), *secrets), own_pids=True))
    assert first.lives()
    second = begin(device(tmp_path))
    assert second.lives()
    assert Path(f"/proc/{zygotes.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    assert b"canary-4711" in written_memory(first.process.pid)
    assert b"canary-4711" not in written_memory(zygotes.pid)
    assert b"canary-4711" not in written_memory(second.process.pid)


def written_memory(pid: int | None) -> bytes:
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as file:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, flags = line.split()[:2]
            if flags.startswith("rw"):
                low, high = (int(part, 16) for part in place.split("-"))
                file.seek(low)
                found.append(file.read(high - low))
    return b"".join(found)


@needs_root
def test_the_descriptors_of_a_fork_are_its_own(begin: Begin, zygotes: Zygote, tmp_path: Path) -> None:
    shared = [memory.make(f"memory {number}") for number in range(4)]
    workers = [begin(device(tmp_path), *shared[:2]), begin(device(tmp_path), *shared[2:])]
    for worker, names in zip(workers, (("0", "1"), ("2", "3")), strict=True):
        assert worker.lives()
        own = links(worker.process.pid)
        assert list(own) == [0, 1, 2, 3, 4, 5]
        assert own[0] == "/dev/null" and own[1] == own[2] == str(tmp_path / "log")
        assert own[3].startswith("socket:")
        assert [own[4], own[5]] == [f"/memfd:memory {name} (deleted)" for name in names]
    assert links(workers[0].process.pid)[3] != links(workers[1].process.pid)[3]
    held = len(links(zygotes.pid or 0))
    third = begin(device(tmp_path))
    end(third.process)
    eventually(lambda: len(links(zygotes.pid or 0)) == held, "the zygote closes what a request brought")
    for worker in workers:
        worker.channel.close()
        assert worker.process.wait(SOON) == 0
    for descriptor in shared:
        os.close(descriptor)
    eventually(lambda: children(zygotes.pid) == [], "the zygote has no child left")


@needs_root
def test_how_a_fork_ends_is_told(begin: Begin, zygotes: Zygote) -> None:
    sandbox = Sandbox(own_pids=True)
    good, bad, killed = begin(sandbox), begin(sandbox), begin(sandbox)
    assert {good.process.pid, bad.process.pid, killed.process.pid} == set(children(zygotes.pid))
    with pytest.raises(subprocess.TimeoutExpired):
        good.process.wait(0.01)
    good.channel.close()
    bad.channel.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    killed.process.kill()
    assert [worker.process.wait(SOON) for worker in (good, bad, killed)] == [0, 1, -signal.SIGKILL]
    assert good.process.wait(0) == 0
    killed.process.kill()  # nobody else has its pid
    eventually(lambda: children(zygotes.pid) == [], "the zygote has no child left")


@needs_root
def test_a_zygote_that_is_warmed_up_is_the_one_that_forks(begin: Begin, zygotes: Zygote) -> None:
    for _ in range(2):
        zygotes.warm_up()
    loader = zygotes.pid
    assert begin(Sandbox()).lives() and zygotes.pid == loader


def test_many_begin_at_once(begin: Begin, zygotes: Zygote) -> None:
    workers: list[Worker] = []
    threads = [
        threading.Thread(target=lambda: workers.append(begin(Sandbox(own_pids=True)))) for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(worker.lives() for worker in workers)
    assert sorted(worker.process.pid for worker in workers) == sorted(children(zygotes.pid))
    assert len(set(children(zygotes.pid))) == 12


@needs_root
def test_a_fork_that_nobody_holds_is_killed(begin: Begin, zygotes: Zygote) -> None:
    worker = begin(Sandbox(own_pids=True))
    assert worker.lives() and isinstance(worker.process, Child)
    worker.process._connection.shutdown(socket.SHUT_RDWR)
    eventually(lambda: children(zygotes.pid) == [], "the zygote has no child left")


@needs_root
def test_a_zygote_that_is_killed_takes_its_forks_along_and_is_followed_by_another(
    begin: Begin, zygotes: Zygote
) -> None:
    first = begin(Sandbox(own_pids=True))
    assert first.lives()
    pid = zygotes.pid
    assert pid
    os.kill(pid, signal.SIGKILL)
    assert first.process.wait(SOON) == -signal.SIGKILL
    second = begin(Sandbox(own_pids=True))
    assert second.lives() and zygotes.pid != pid
    eventually(lambda: not runs(pid), "the former zygote is gone")


@needs_root
def test_a_zygote_that_hangs_is_left_and_its_forks_live_on(
    begin: Begin, zygotes: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin(Sandbox(own_pids=True))
    old = zygotes.pid
    assert first.lives() and old
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    os.kill(old, signal.SIGSTOP)
    late, theirs = socket.socketpair()
    with theirs, pytest.raises(TimeoutError, match=f"the zygote of {WORKER} does not answer"):
        zygotes.start(Sandbox(own_pids=True), ["3"], [theirs.fileno()], 2)
    monkeypatch.undo()
    second = begin(Sandbox(own_pids=True))
    assert second.lives() and first.lives() and zygotes.pid != old
    os.kill(old, signal.SIGCONT)  # it finds a request of which nobody wants the answer any more
    with late:
        late.settimeout(SOON)
        assert late.recv(1) == b""  # of the late one, nothing is left
    eventually(lambda: children(old) == [first.process.pid], "the zygote has its first child alone")
    assert first.lives()
    os.kill(old, signal.SIGSTOP)
    monkeypatch.setattr(client, "_STATUS_SECONDS", 0.5)
    end(first.process)
    eventually(lambda: not runs(old), "the zygote that hangs is ended")
    assert second.lives()


@needs_root
def test_a_zygote_that_may_have_no_more_descriptors_is_left(begin: Begin, zygotes: Zygote) -> None:
    first = begin(Sandbox(own_pids=True))
    assert first.lives() and zygotes.pid
    resource.prlimit(zygotes.pid, resource.RLIMIT_NOFILE, (5, 5))
    second = begin(Sandbox(own_pids=True))
    assert second.lives() and first.lives()


@needs_root
def test_a_fork_that_fails_is_refused_and_leaves_no_descriptor(begin: Begin, zygotes: Zygote) -> None:
    end(begin(Sandbox(own_pids=True)).process)
    assert zygotes.pid and eventually(lambda: children(zygotes.pid) == [], "the zygote has no child left")
    before = set(links(zygotes.pid))
    free = [number for number in range(64) if number not in before]
    usual = resource.prlimit(zygotes.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(zygotes.pid, resource.RLIMIT_NOFILE, (free[3], usual[1]))  # room for a request's three
    with pytest.raises(OSError, match="Too many open files"):
        begin(Sandbox(own_pids=True))
    eventually(lambda: set(links(zygotes.pid or 0)) == before, "the zygote has no descriptor more")
    resource.prlimit(zygotes.pid, resource.RLIMIT_NOFILE, usual)
    assert begin(Sandbox(own_pids=True)).lives()


@needs_root
def test_an_idle_zygote_ends_and_another_follows(tmp_path: Path) -> None:
    idle = Zygote(WORKER, idle=0.4)
    pids = []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        with theirs, (tmp_path / "log").open("wb") as log:
            child = idle.start(Sandbox(own_pids=True), ["3"], [theirs.fileno()], log.fileno())
        pids.append(idle.pid)
        time.sleep(0.8)
        assert runs(idle.pid), "it ended while a fork of it lived"
        ours.close()
        assert child.wait(SOON) == 0
        eventually(lambda: not runs(idle.pid), "the idle zygote ends")
    assert pids[0] != pids[1]
    idle.close()


@needs_root
def test_what_is_closed_starts_nothing(begin: Begin, zygotes: Zygote) -> None:
    worker = begin(Sandbox(own_pids=True))
    zygotes.close()
    assert worker.process.wait(SOON) == -signal.SIGKILL
    with pytest.raises(OSError, match=f"the zygote of {WORKER} is closed"):
        begin(Sandbox(own_pids=True))


STARTS = """
    import os, socket, sys
    from millpond.linux.confinement.sandbox import Sandbox, enter_user_namespace
    from millpond.linux.zygote.client import Zygote
    if sys.argv[1:]:
        enter_user_namespace(0)
    zygote = Zygote("millpond.train.worker.process", idle=600.0)
    ours, theirs = socket.socketpair()
    uid = int(sys.argv[1]) if sys.argv[1:] else None
    sandbox = Sandbox(own_pids=True, own_network=True, capabilities=False, uid=uid)
    child = zygote.start(sandbox, ["3"], [theirs.fileno()], 2)
    theirs.close()
    print(zygote.pid, child.pid, flush=True)
    if sys.stdin.readline():
        ours.close()
        print(child.wait(30), flush=True)
        sys.stdin.readline()
"""


@contextlib.contextmanager
def starter(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    command = [sys.executable, "-c", textwrap.dedent(STARTS), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pids = [int(word) for word in process.stdout.readline().split()]
        handles = [os.pidfd_open(pid) for pid in pids]
        try:
            yield process, handles
            process.kill()
            for handle in handles:
                assert select.select([handle], [], [], SOON)[0], "it outlived the process that started it"
        finally:
            process.kill()
            for handle in handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)


@needs_root
@pytest.mark.parametrize("stopped", [False, True])
def test_all_die_with_the_process_that_starts_them(stopped: bool) -> None:
    with starter() as (process, handles):
        if stopped:
            signal.pidfd_send_signal(handles[0], signal.SIGSTOP)
        assert process.poll() is None


@pytest.mark.parametrize("uid", [[], ["64002"]])
def test_where_there_is_one_uid(uid: list[str]) -> None:
    """In a user namespace, as on emulated devices, a process stands between the zygote and a fork's PIDs."""
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], check=False).returncode:
        pytest.skip("user namespaces are off on this machine")
    with starter(*(uid or ["0"])) as (process, _):
        assert process.stdin and process.stdout
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "0\n"


def loading(script: str) -> subprocess.CompletedProcess[str]:
    code = f"from millpond.linux.zygote.preloading import load\n{textwrap.dedent(script)}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON)


@needs_root
def test_threads_that_end_before_a_fork_are_none() -> None:
    """OpenBLAS has one for each further processor as soon as numpy is loaded, and ends them itself."""
    done = loading("import os; print(load(['numpy']), os.listdir('/proc/self/task') == [str(os.getpid())])")
    assert (done.stdout, done.stderr) == (" True\n", "")


@needs_root
def test_threads_that_stay_are_noticed() -> None:
    done = loading("""
        import threading, time
        from millpond.linux.zygote import preloading
        preloading.END_SECONDS = 0.2
        threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
        print(load([]))
    """)
    assert (done.stdout, done.stderr) == ("1 threads stay\n", "")


LOOKS = """
    import os, sys
    from pathlib import Path

    left, hidden = map(Path, sys.argv[1:])
    found = []
    left.parent.mkdir(parents=True)
    left.touch()
    found.append(left.exists())
    try:
        Path("/left").touch()
    except OSError as error:
        found.append(error.errno)
    found.append([name for name in os.listdir("/sys")] if Path("/sys").exists() else [])
    status = Path(f"/proc/self/task/{__import__('threading').get_native_id()}/status").read_text()
    found.append(int(status.partition("CapEff:")[2].split()[0], 16))
    found.append(hidden.exists())
"""


@needs_root
def test_modules_are_loaded_where_nothing_but_programs_exists(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(textwrap.dedent(LOOKS))
    left = tmp_path / "left"
    done = loading(f"""
        import sys
        from pathlib import Path
        from millpond.linux.zygote import preloading
        from millpond.linux.confinement.sandbox import Bind
        binds = (*preloading.python_binds(), Bind(Path("{tmp_path}"), Path("/shown")))
        preloading.python_binds = lambda: binds
        sys.path.insert(0, "/shown")
        sys.argv[1:] = there = ["{left}", "{__file__}"]
        print(load(["looks"]), *sys.modules["looks"].found, *(Path(path).exists() for path in there))
    """)
    assert (done.stdout, done.stderr) == (" True 30 [] 0 False False True\n", "")


@needs_root
def test_what_cannot_be_loaded_ahead_is_said_and_left_to_the_forks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    without = Zygote(WORKER, "json", "there_is_no_such_module", idle=600.0)
    ours, theirs = socket.socketpair()
    with theirs, (tmp_path / "log").open("wb") as log:
        child = without.start(Sandbox(own_pids=True), ["3"], [theirs.fileno()], log.fileno())
    with Channel(ours, "the worker") as channel:
        assert Worker(child, channel).lives()
    assert child.wait(SOON) == 0
    without.close()
    told = "zygote of millpond.train.worker.process: nothing is loaded ahead: ModuleNotFoundError"
    assert capfd.readouterr().err.startswith(told)
