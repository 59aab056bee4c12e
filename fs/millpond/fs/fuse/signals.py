# SPDX-License-Identifier: Apache-2.0
"""Edge (signals): ends a mount by a signal, so that it is not left behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Stop(BaseException):
    """Raised by a signal to end the mount. Not an Exception: the handling of one request's errors must not
    catch it.
    """


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals: a mount made meanwhile must not be left behind."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[int]:
    """End the context at the first signal; later ones do not disturb the end of the process.

    Yields a descriptor that is readable once a signal has come: it may come just before the thread begins to
    wait.
    """

    def stop(_number: int, _frame: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise _Stop

    before: dict[signal.Signals, Any] = {number: signal.signal(number, stop) for number in _SIGNALS}
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    wakened = signal.set_wakeup_fd(writing)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)  # the parent process may have blocked them
        yield reading
    except _Stop:
        before = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        signal.set_wakeup_fd(wakened)
        os.close(reading)
        os.close(writing)
        for number, handler in before.items():
            signal.signal(number, handler)
