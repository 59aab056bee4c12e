# SPDX-License-Identifier: Apache-2.0
"""Edge: the daemon's own mounts of the devices' volumes, from which jobs read public data."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from millpond.base.errors import RemoteError
from millpond.base.text import printable
from millpond.fs.fuse.mounts import unmount
from millpond.host.fleet import worker_user
from millpond.host.fleet.directory import Fleet
from millpond.linux.child import first_line
from millpond.linux.syscalls import follow_no_links

log = logging.getLogger(__name__)
MOUNT_SECONDS, END_SECONDS = 60.0, 3.0


def command(
    fleet: Path,
    device: str,
    mountpoint: Path,
    timeout: float | None = None,
    uid: int | None = None,
    gid: int | None = None,
    *,
    read_only: bool = False,
    allow_other: bool = False,
) -> list[str]:
    """Return the command line of the mounter process, which prints ``ready: how`` once it has mounted.
    ``timeout`` is how many seconds an operation may take while the device answers, ``uid`` and ``gid`` whose
    all files show as, if not as by default; others than this process's user are let in then, too.
    """
    module = [sys.executable, "-m", "millpond.host.remote.mounter"]
    given = {"--timeout": timeout, "--uid": uid, "--gid": gid}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    others = allow_other or uid not in (None, os.geteuid()) or gid is not None
    flags = {"--allow-other": others, "--read-only": read_only}
    options += [flag for flag, is_set in flags.items() if is_set]
    return [*module, str(fleet), device, str(mountpoint), *options]


def fault_of(mounter: subprocess.Popen[str]) -> str:
    """Wait until a mounter has mounted, at most MOUNT_SECONDS. Returns "", or why it has not; it has ended
    then.
    """
    assert mounter.stdout
    try:
        if first_line(mounter.stdout.fileno(), MOUNT_SECONDS).startswith("ready: "):
            return ""
        _, complaint = mounter.communicate(timeout=END_SECONDS)
        return printable((complaint or "").strip()) or "its process ended without a word"
    except TimeoutError as error:
        end(mounter)
        return str(error)
    except subprocess.TimeoutExpired:
        end(mounter)
        return "its process does not end"


def end(mounter: subprocess.Popen[str]) -> None:
    """End a mounter, by a kill if need be. A mounter that the kernel does not release stays."""
    for stream in (mounter.stdout, mounter.stderr):
        if stream:
            stream.close()
    mounter.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        mounter.wait(END_SECONDS)
        return
    mounter.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        mounter.wait(END_SECONDS)


class VolumeMounts:
    """Mounts volumes when a job first asks for them. Files are shown as those of the jobs' user, which may
    read also what their owner on the device has closed to others.

    The mounter processes die with the thread that starts them, so one lasting thread starts them all.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="volumes")
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def folder(self, device: str) -> Path:
        """Return the folder of a device's volume, mounted first if need be. Raises RemoteError."""
        try:
            return self._thread.submit(self._mounted, device).result()
        except OSError as error:
            raise RemoteError(f"the volume of {device} cannot be mounted: {error}") from error

    def _mounted(self, device: str) -> Path:
        folder = self._fleet.mountpoint(device)
        process = self._processes.get(device)
        if process and process.poll() is None:
            return folder
        with contextlib.suppress(FileExistsError):  # also a folder whose dead mount stat() refuses
            folder.mkdir(parents=True)
        unmount(folder)  # the mount of a daemon that was killed
        user = worker_user.UID if worker_user.is_separate() else None
        argv = [*command(self._fleet.directory, device, folder, None, user, user), "--die-with-parent"]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout and process.stderr
        if fault := fault_of(process):
            raise RemoteError(f"the volume of {device} cannot be mounted: {fault}")
        process.stdout.close()
        process.stderr.close()
        try:
            follow_no_links(folder)  # a device must not choose which of the host's files is read
        except OSError:
            end(process)
            raise
        self._processes[device] = process
        return folder

    def close(self) -> None:
        """Unmount all volumes."""
        self._thread.submit(self._unmount_all).result()
        self._thread.shutdown()

    def _unmount_all(self) -> None:
        for device, process in self._processes.items():
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                unmount(self._fleet.mountpoint(device))
                end(process)
