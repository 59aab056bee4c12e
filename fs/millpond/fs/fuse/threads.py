# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): performs a mount's requests in as many threads as wait at once, within bounds.

One thread at a time receives. It performs each request itself, and passes the receiving on only when it is
about to wait and another request has come: what needs no waiting is performed in the kernel's order, and
without contention for the interpreter's lock. A thread that waits without saying so loses the receiving, too.
What exceeds the bound is performed when another request has ended.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from millpond.fs.fuse.abi import Code, Header
from millpond.fs.fuse.device import FuseDevice
from millpond.fs.fuse.interrupts import Interrupts
from millpond.fs.vfs.operation import NOTHING, Operation, current

log = logging.getLogger(__name__)
MOST_AT_ONCE: Final = 96
"""Requests performed at once: a client's share of the server's session slots."""
MORE_READS: Final = 16
"""Beyond these: a recall waits for the pages that a read is to fill, and others may wait for the recall."""
_MAX_IDLE = 8
_UNREFUSABLE = frozenset({Code.FLUSH, Code.RELEASE, Code.RELEASEDIR})
"""Requests that the kernel does not repeat: locks and handles would be left."""
_STUCK_SECONDS = 0.2
_FINISH_SECONDS, _CLOSE_SECONDS = 2.0, 15.0


class Request(Operation):
    """A request of the kernel. ``wait`` is called before it waits, ``withdraw`` when it is interrupted."""

    __slots__ = ("body", "header", "wait", "withdraw")

    def __init__(self, header: Header, body: memoryview, withdraw: Callable[[Request], None]) -> None:
        super().__init__(time.monotonic())
        self.header, self.body, self.withdraw = header, body, withdraw
        self.wait: Callable[[int, float], None] = lambda _descriptor, _seconds: None

    def about_to_wait(self, descriptor: int = NOTHING, seconds: float = 0.0) -> None:
        """Tell the thread that performs the request that it is about to wait."""
        self.wait(descriptor, seconds)

    def interrupt(self) -> None:
        """Interrupt the request."""
        super().interrupt()
        self.withdraw(self)


class _Worker:
    """A thread. ``receives``: it alone receives requests. ``busy``: it performs its ``served``-th one."""

    __slots__ = ("buffer", "busy", "gate", "receives", "served", "thread")

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.receives, self.busy, self.served = buffer, True, False, 0
        self.gate = threading.Lock()
        self.gate.acquire()
        self.thread: threading.Thread | None = None


class RequestThreads:
    """The threads of one mount.

    ``may_wait`` returns whether a request may have to wait; ``perform`` performs and answers it. All others
    ``perform_now`` performs, in order. ``refuse`` answers one that was interrupted before it began,
    ``cancel_lock`` is of Interrupts. ``answer_at_once`` performs and answers a write that needs no waiting,
    and returns False for others.
    """

    def __init__(
        self,
        kernel: FuseDevice,
        may_wait: Callable[[Header], bool],
        perform_now: Callable[[Header, memoryview], None],
        perform: Callable[[Header, memoryview], None],
        refuse: Callable[[Header, int], None],
        cancel_lock: Callable[[int], None] = lambda _unique: None,
        answer_at_once: Callable[[Header, memoryview], bool] = lambda _header, _body: False,
    ) -> None:
        self._kernel, self._may_wait, self._perform_now = kernel, may_wait, perform_now
        self._perform, self._refuse, self._answer_at_once = perform, refuse, answer_at_once
        self._under_way, self._backlog = 0, deque[Request]()
        self.interrupts = Interrupts(cancel_lock)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._receiver: _Worker | None = None
        self._ended, self._has_ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), threading.Event()
        self._failure: Exception | None = None
        self._watched, self._traffic = False, threading.Event()

    def run(self, woken: int | None = None) -> None:
        """Serve until the mount has gone or ``woken`` is readable. Raises what receiving raised."""
        with self._lock:
            self._start_worker()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        state = select.poll()
        for descriptor in (self._ended, woken):
            if descriptor is not None:
                state.register(descriptor, select.POLLIN)
        state.poll()
        if self._failure:
            raise self._failure

    def close(self) -> bool:
        """Receive no more, and wait for the requests under way; interrupt those that take long. Returns
        whether all threads have ended.
        """
        self._end(None)
        self._kernel.stop()
        if not self._join(_FINISH_SECONDS):
            self.interrupts.interrupt_all()
            self._join(_CLOSE_SECONDS)
        self.interrupts.close()
        with self._lock:
            if self._workers:
                return False
        os.close(self._ended)
        return True

    def _join(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        with self._lock:
            for worker in self._idle:
                worker.gate.release()
            self._idle.clear()
            threads = [worker.thread for worker in self._workers if worker.thread]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _end(self, failure: Exception | None) -> None:
        self._failure = self._failure or failure
        self._has_ended.set()
        self._traffic.set()
        os.eventfd_write(self._ended, 1)

    def _start_worker(self) -> None:
        """With the lock: start a thread that receives. Raises RuntimeError if there can be no more."""
        worker = _Worker(self._kernel.new_buffer())
        worker.thread = threading.Thread(target=self._run, args=(worker,), name="fuse", daemon=True)
        worker.thread.start()
        self._workers.add(worker)
        self._receiver = worker

    def _run(self, worker: _Worker) -> None:
        try:
            while self._receive_all(worker):
                worker.gate.acquire()
        except OSError as error:
            self._end(None if error.errno in (errno.ENODEV, errno.ECANCELED) else error)
        except Exception as error:  # noqa: BLE001 - raised again by ``run``
            self._end(error)
        finally:
            with self._lock:
                self._workers.discard(worker)

    def _receive_all(self, worker: _Worker) -> bool:
        """Receive and perform requests until another thread receives. Returns whether this thread may be
        wanted again.
        """
        while worker.receives and not self._has_ended.is_set():
            header, body = self._kernel.receive(worker.buffer)
            if header.code is Code.WRITE and self._answer_at_once(header, body):
                continue
            if self._may_wait(header):
                self._take(worker, Request(header, body, self._withdraw))
            else:
                self._perform_now(header, body)
        with self._lock:
            if self._has_ended.is_set() or len(self._idle) >= _MAX_IDLE:
                return False
            self._idle.append(worker)
            return True

    def _take(self, worker: _Worker, request: Request) -> None:
        """Perform a request that has come, and then others that have waited for their turn."""
        self.interrupts.add(request.header.unique, request)
        with self._lock:
            worker.served += 1
            worker.busy = True
            following = request if self._admit(request) else None
        if not self._watched:
            self._watched = True
            self._traffic.set()
        while following:
            self._perform_one(worker, following)
            with self._lock:
                following = self._next()
        with self._lock:
            worker.busy = False

    def _admit(self, request: Request) -> bool:
        """With the lock: count a request; False if it has to wait for its turn."""
        if self._under_way < MOST_AT_ONCE + (MORE_READS if request.header.code is Code.READ else 0):
            self._under_way += 1
            return True
        request.body = memoryview(bytes(request.body))  # the thread's buffer is used again
        self._backlog.append(request)
        return False

    def _next(self) -> Request | None:
        """With the lock: return the request whose turn it is when one has ended, None if there is none."""
        any_may = self._under_way <= MOST_AT_ONCE
        turns = (request for request in self._backlog if any_may or request.header.code is Code.READ)
        if following := next(turns, None):
            self._backlog.remove(following)
        else:
            self._under_way -= 1
        return following

    def _withdraw(self, request: Request) -> None:
        """Answer a request that was interrupted while it waited for its turn, unless it must be performed."""
        with self._lock:
            if request.header.code in _UNREFUSABLE or request not in self._backlog:
                return
            self._backlog.remove(request)
        self.interrupts.remove(request.header.unique)
        self._refuse(request.header, errno.EINTR)

    def _perform_one(self, worker: _Worker, request: Request) -> None:
        request.wait = lambda descriptor, seconds: self._before_wait(worker, descriptor, seconds)
        current.set(request)
        try:
            self._perform(request.header, request.body)
        finally:
            current.set(None)
            self.interrupts.remove(request.header.unique)

    def _before_wait(self, worker: _Worker, descriptor: int, seconds: float) -> None:
        """Let another thread receive, as soon as there is a request to be received."""
        if worker.receives and (descriptor == NOTHING or self._kernel.has_request(descriptor, seconds)):
            self._pass_receiving(worker)

    def _pass_receiving(self, worker: _Worker, stuck_in: int | None = None) -> None:
        """Have another thread receive; only if this one is still ``stuck_in`` that request, if it is
        given.
        """
        with self._lock:
            is_stuck = stuck_in is None or (worker.busy and worker.served == stuck_in)
            if not (worker.receives and is_stuck) or self._has_ended.is_set():
                return
            try:
                if self._idle:
                    self._receiver = self._idle.pop()
                    self._receiver.receives = True
                    self._receiver.gate.release()
                else:
                    self._start_worker()
            except RuntimeError as error:  # no thread can be started: this one goes on receiving
                log.warning("requests wait for each other: %s", error)
                return
            worker.receives = False

    def _watch(self) -> None:
        """Take the receiving from a thread that has been performing one request for long."""
        seen: tuple[_Worker | None, int] = None, 0
        while not self._has_ended.is_set():
            worker = self._receiver
            now = worker, worker.served if worker else 0
            if worker and now == seen and worker.busy:
                self._pass_receiving(worker, stuck_in=now[1])
            elif now == seen and self._watched:
                self._watched = False
            elif now == seen:
                self._traffic.wait()
                self._traffic.clear()
            seen = now
            self._has_ended.wait(_STUCK_SECONDS)
