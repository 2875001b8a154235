"""Where the command line begins: signals and streams are taken care of before anything else is imported."""

from __future__ import annotations


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
    from gradalign.cli.streams import lost_output, secure_streams

    secure_streams()
    import sys

    from gradalign.cli.app import app

    try:
        app()
        code: str | int | None = 0
    except SystemExit as end:
        code = end.code
    reason = lost_output()
    if reason is not None:
        print(f"error: standard output could not be written: {reason}", file=sys.stderr)
        code = code or 2
    stopping.let_go()
    sys.exit(code)
