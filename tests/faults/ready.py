"""An interpreter that has imported everything and forks a copy for each command: a trial then costs milliseconds.

Reads one request a line, and answers with the copy's process id, then with its exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Any


def _import_all() -> None:
    import torch

    torch.set_num_threads(1)


def _become(request: dict[str, Any]) -> None:
    """Run one command in this process, as a shell would have started it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of a command that has not begun
    os.chdir(request["folder"])
    for number, (file, mode) in enumerate(
        ((os.devnull, os.O_RDONLY), (request["out"], os.O_WRONLY), (request["err"], os.O_WRONLY))
    ):
        opened = os.open(file, mode | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = ["gradalign", *request["words"]]
    sys.path.insert(0, request["folder"])
    os.environ |= request["environment"]
    code: Any = 1
    try:
        from gradalign.cli import main

        signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python starts a command
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def serve() -> None:
    _import_all()
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
