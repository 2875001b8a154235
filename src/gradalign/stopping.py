"""What SIGINT and SIGTERM do to a command, from its first moment to its last. Imports nothing heavy.

While nothing is at stake (imports, data, worker processes being started) a signal ends the process at once: an
exception thrown into a library that is being loaded may be lost there, or abort the process. Where rounds are played it
becomes a KeyboardInterrupt, so that a checkpoint is kept; not inside an import or a finaliser, where it waits for a
better moment, and again when somebody swallowed it. Without ``listen``, as in a program of the user's own, all of this
does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
_SOON, _AGAIN = 0.02, 1.0  # seconds until the next try: when the moment was bad; when the exception was swallowed
# Seconds in which a signal that comes again is the same wish: ``timeout`` sends it to a process and to its group.
_TWICE = 2.0
_LONGEST_IMPORT = 20.0
BY_TORCHRUN = " by torchrun, as when another rank has ended"


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C: a checkpoint is kept and workers end."""


class _now:
    """What is known in this process."""

    advice: Callable[[], str] = str
    at_stake = 0
    held = 0
    asked: int | None = None
    since = 0.0
    caught = False


def listen() -> None:
    """Take over SIGINT and SIGTERM; one that the caller ignores, as under nohup, stays ignored."""
    try:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _on_signal)
    except ValueError:  # not the main thread: signals are someone else's
        return


def let_go() -> None:
    """Give the signals back: from here on the kernel ends the process, also while the interpreter shuts down."""
    answer()
    for number in SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)


def _on_signal(number: int, frame: FrameType | None) -> None:
    again = number in SIGNALS and _now.asked is not None
    if again and time.monotonic() - _now.since < _TWICE:
        return
    if number in SIGNALS and not again:
        _now.asked, _now.since = number, time.monotonic()
    if again or not _now.at_stake:
        _end_at_once()
    if _now.held or _is_delicate(frame):
        _try_again(_SOON)
    elif not _now.caught:
        _try_again(_AGAIN)
        _raise()


def _raise() -> NoReturn:
    raise Terminated if _now.asked == signal.SIGTERM else KeyboardInterrupt


def _try_again(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.signal(signal.SIGALRM, _on_signal)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _is_delicate(frame: FrameType | None) -> bool:
    """Return whether an exception would be lost or do harm here: in an import, or in a finaliser."""
    if time.monotonic() - _now.since > _LONGEST_IMPORT:
        return False
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "__del__" or file.startswith("<frozen importlib") or file.endswith("weakref.py"):
            return True
        frame = frame.f_back
    return False


def _end_at_once() -> NoReturn:
    """Leave without unwinding; worker processes end with this one."""
    try:
        if os.isatty(2):
            os.write(2, b"\r\x1b[K\x1b[?25h")  # a progress bar may have hidden the cursor
        # Of a job of ranks two speak: it may be the first that has ended.
        job = "TORCHELASTIC_RUN_ID" in os.environ and _now.asked == signal.SIGTERM
        if os.environ.get("RANK", "0") in ("0", "1" if job else "0"):
            os.write(2, f"{last_words(BY_TORCHRUN if job else '')}\n".encode())
    except OSError:  # nobody reads it
        pass
    os._exit(128 + (_now.asked or signal.SIGTERM))


class at_stake:
    """Inside this block a signal becomes a KeyboardInterrupt."""

    def __enter__(self) -> None:
        _now.at_stake += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                stop_if_asked()
        finally:
            _now.at_stake -= 1


class held:
    """Inside this block, which must be short, a KeyboardInterrupt waits."""

    def __enter__(self) -> None:
        _now.held += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _now.held -= 1
        if error is None:
            stop_if_asked()


def stop_if_asked() -> None:
    """Raise when a signal has come that nobody has answered: somebody may have swallowed its exception."""
    if _now.asked is not None and _now.at_stake and not _now.held and not _now.caught:
        _raise()


def answer() -> None:
    """Say that the KeyboardInterrupt has arrived, so that it is not raised again while things are put in order."""
    if _now.asked is not None:
        _now.caught = True
        _try_again(0.0)  # which is never


def advise(advice: Callable[[], str]) -> None:
    """Set what is asked, when a signal ends the process, for a word on how to go on."""
    _now.advice = advice


def last_words(why: str = "") -> str:
    """Return what is said when a signal ends the process."""
    advice = _now.advice()
    return f"stopped{why}; {advice}" if advice else f"stopped{why}"


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code that tells a shell which signal it was."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


class left_to_the_kernel:
    """Inside this block a signal ends the process by itself: for long waits in C, in which no Python code runs."""

    def __enter__(self) -> None:
        self._ours = [number for number in SIGNALS if signal.getsignal(number) is _on_signal]
        let_go()

    def __exit__(self, *_: object) -> None:
        for number in self._ours:
            signal.signal(number, _on_signal)


class blocked:
    """Inside this block the signals wait in the kernel, also for a process that is started here, until it unblocks."""

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if sys.platform != "win32" else None

    def __exit__(self, *_: object) -> None:
        if sys.platform != "win32" and self._before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)


def unblock() -> None:
    """In a process started in a ``blocked`` block, once it has said what the signals do to it: let them come."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
