"""The command line. This module takes care of signals and streams before anything else is imported."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from typing import Any


def main() -> None:
    """Run the command line and leave with its exit code."""
    import _signal as signal  # type: ignore[import-not-found]  # loads ten times as fast as signal

    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of a command that has not begun
    except ValueError:  # not the main thread: signals are someone else's
        pass
    from gradalign import stopping

    stopping.listen()
    secure_streams()
    code = _run()
    reason = lost_output()
    if reason is not None:
        print(f"error: standard output could not be written: {reason}", file=sys.stderr)
        code = code or 2
    stopping.let_go()
    sys.exit(code)


def _run() -> str | int | None:
    try:
        from gradalign.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        needed = f"the command line needs the package {missing.name}"
        print(f"error: {needed}; install it with: pip install 'gradalign[cli]'", file=sys.stderr)
        return 2
    warnings.showwarning = _show_warning
    try:
        app(sorted(sys.argv[1:], key="--debug".__ne__))  # an option of all commands, wherever it stands
    except SystemExit as end:
        return end.code
    return 0


_show_others, _told = warnings.showwarning, set[str]()


def _show_warning(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning of this library as one line, without code, once in a command; others' as they are."""
    if category.__module__ != "gradalign.errors":
        _show_others(message, category, *where, **more)
    elif str(message) not in _told:
        _told.add(str(message))
        print(f"warning: {message}", file=sys.stderr)


# Standard output and standard error that nobody reads any more, or that were never there: a run goes on without them.


class _Patient(io.RawIOBase):
    """A standard stream. What cannot be written is dropped, and the first reason remembered."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.lost: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        try:
            return os.write(self._number, view)
        except BlockingIOError:  # somebody made the pipe so; its reader is only slow
            import select

            select.select([], [self._number], [])
            return self.write(view)
        except OSError as error:
            self.lost = self.lost or error
            return len(view)


_patient: dict[str, _Patient] = {}


def secure_streams() -> None:
    """Let no write to a standard stream raise.

    Numbers of closed ones are taken first: else the next file that is opened gets one, and messages go into it.
    """
    spare = os.open(os.devnull, os.O_RDWR)
    while spare <= 2:
        spare = os.dup(spare)
    os.close(spare)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, io.TextIOWrapper):
            continue  # somebody's own
        if stream is not None and not _is_number(stream, number):
            stream.reconfigure(errors="replace")
            continue
        raw = _patient[name] = _Patient(number)
        text = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding if stream is not None else "utf-8",
            errors="replace",  # a terminal that cannot show ± shows ? and goes on
            line_buffering=number == 2 or raw.isatty(),
        )
        setattr(sys, name, text)


def _is_number(stream: io.TextIOWrapper, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def output_is_lost() -> bool:
    """Return whether something that was printed could not be written."""
    return "stdout" in _patient and _patient["stdout"].lost is not None


def lost_output() -> str | None:
    """Write what is still waiting; return why standard output is not whole, None when it is or its reader left."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    lost = _patient["stdout"].lost if "stdout" in _patient else None
    if lost is None or lost.errno == errno.EPIPE:
        return None
    return lost.strerror or str(lost)
