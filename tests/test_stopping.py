"""What signals do to a command: the rules of ``gradalign.stopping``, each in a small process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

START = """
import os, signal, sys, time
from gradalign import stopping
stopping.listen()
stopping.advise(lambda: "go on with --resume")

def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(0)
"""


def run(body: str, tmp_path, *, ignore: bool = False) -> subprocess.CompletedProcess[str]:
    code = START + textwrap.dedent(body)

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if ignore else signal.SIG_DFL)

    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, preexec_fn=begin, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_nothing_is_at_stake_the_process_ends_at_once(number, tmp_path):
    done = run(f"try:\n    send({int(number)})\nfinally:\n    print('unwound')", tmp_path)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == "stopped; go on with --resume\n"


@pytest.mark.parametrize(
    ("before", "resume", "written", "advised"),
    [
        (False, False, False, False),
        (False, False, True, True),
        (True, True, False, True),
        (True, False, False, False),  # somebody else's run, which this command will refuse to touch
    ],
)
def test_resuming_is_advised_only_where_there_is_something_to_resume(before, resume, written, advised, tmp_path):
    (tmp_path / "run").mkdir()
    if before:
        (tmp_path / "run" / "spec.toml").touch()
    body = f"""
    from pathlib import Path
    from gradalign.cli.common import advise_resume, plain_errors
    with plain_errors():
        advise_resume(Path("run"), resume={resume})
        if {written}:
            Path("run/spec.toml").touch()
        send()
    """
    advice = "; continue with the same command and --resume" if advised else ""
    assert run(body, tmp_path).stderr == f"stopped{advice}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_where_something_is_at_stake_it_becomes_an_interrupt_once(number, tmp_path):
    body = f"""
    try:
        with stopping.at_stake():
            send({int(number)})
    except KeyboardInterrupt as stop:
        send({int(number)})  # the same wish again, as timeout sends it: nothing is disturbed
        stopping.answer()
        stopping.let_go()
        sys.exit(stopping.exit_code(stop))
    """
    done = run(body, tmp_path)
    assert (done.returncode, done.stderr) == (128 + number, "")


def test_a_swallowed_interrupt_comes_again_and_its_work_is_not_taken(tmp_path):
    body = """
    with stopping.at_stake():
        try:
            send()
        except BaseException:
            print("swallowed")
        try:
            stopping.stop_if_asked()
        except KeyboardInterrupt:
            print("noticed")
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            print("again")
            stopping.answer()
    """
    assert run(body, tmp_path).stdout.split() == ["swallowed", "noticed", "again"]


def test_imports_and_finalisers_are_not_interrupted(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.1)\n"
    )
    body = """
    class Kept:
        def __del__(self):
            send()
            time.sleep(0.1)
            print("finalised")

    for what in (lambda: __import__("slow"), lambda: Kept() and None):
        stopping._now.asked, stopping._now.caught = None, False
        try:
            with stopping.at_stake():
                what()
                time.sleep(30)
        except KeyboardInterrupt:
            print("interrupted")
            stopping.answer()
    print("slow" in sys.modules)
    """
    done = run(body, tmp_path)
    assert done.stdout.split() == ["interrupted", "finalised", "interrupted", "True"]
    assert done.stderr == ""


def test_a_held_block_is_finished_first(tmp_path):
    body = """
    try:
        with stopping.at_stake():
            with stopping.held():
                send()
                time.sleep(0.1)
                print("written")
            print("not reached")
    except KeyboardInterrupt:
        stopping.answer()
    """
    assert run(body, tmp_path).stdout.split() == ["written"]


def test_an_ignored_signal_stays_ignored(tmp_path):
    assert run("send(signal.SIGINT)\nprint('alive')", tmp_path, ignore=True).stdout == "alive\n"


def test_a_new_process_meets_no_signal_before_it_is_ready(tmp_path):
    """A terminal sends Ctrl-C to the group: the child has it waiting until it has said what to do with it."""
    body = """
    with stopping.at_stake(), stopping.held(), stopping.blocked():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            stopping.unblock()
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run(body, tmp_path)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_numbers_of_closed_streams_are_not_given_to_files(tmp_path):
    code = "from gradalign.cli import secure_streams; import sys; secure_streams(); print('x')"
    code += "; print('y', file=sys.stderr); f = open('kept', 'w'); sys.exit(f.fileno())"
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, code], cwd=tmp_path, timeout=60)
    assert done.returncode == 3
    assert (tmp_path / "kept").read_text() == ""
