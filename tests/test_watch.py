"""``gradalign watch``: what it reads, what it draws, and when it ends."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import gradalign as ga
from conftest import blobs, hear_ctrl_c
from gradalign.cli.app import app
from gradalign.runs.folder import RunFolder
from gradalign.runs.locks import is_held, locked
from gradalign.runs.metrics import MetricsTail
from gradalign.watch import Followed, Watched
from gradalign.watch.frame import Frame, duration, seconds_left
from gradalign.watch.textplot import Axis, Canvas, Curve, plot

SMALL = ("--set", "rounds=3", "--set", "task.clients=5", "--set", "clients.per_round=3", "--workers", "0")
SPEC = {"name": "n", "seed": 4, "rounds": 3, "algorithm": {"name": "fedga"}}


def call(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + result.stderr
    return result


def row(number: int, **more: float) -> dict[str, float | None]:
    return {"round": number, "seconds": 2.0 * number, "test_accuracy": number / 10, "test_loss": 1.0, "r": None} | more


def line(number: int) -> str:
    return json.dumps(row(number)) + "\n"


# Drawing


def test_dots_are_braille():
    canvas = Canvas(2, 1)
    canvas.dot(0, 0, "")
    canvas.dot(1, 3, "")
    canvas.dot(2, 1, "")
    canvas.dot(99, 99, "")  # outside: nothing happens
    # Unicode numbers the dots of a cell 1-2-3-7 down the left and 4-5-6-8 down the right, dot n being bit n - 1.
    assert canvas.row(0).plain == chr(0x2800 + 0b1000_0001) + chr(0x2800 + 0b10)


def test_ticks_are_round_numbers():
    assert Axis(0, 15).ticks(4) == [0, 5, 10, 15]
    assert Axis(0.05, 0.91).ticks(5) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert Axis(0.003, 40, log=True).ticks(5) == pytest.approx([0.01, 0.1, 1, 10])
    assert Axis(1, 100, log=True).position(10) == pytest.approx(0.5)


def test_a_curve_runs_from_corner_to_corner():
    drawn = plot("t", [Curve([(0, 0), (5, 0.5), (10, 1)], "")], width=40, height=13, x_end=10)
    body = [text.plain.split("│")[1] for text in drawn[1:11]]
    first = [next(i for i, c in enumerate(cells) if c != " ") for cells in body]
    assert first == sorted(first, reverse=True), "rising to the right"
    assert len(body[0].rstrip()) == len(drawn[11].plain.split("└")[1]), "up to the last column"
    assert body[-1][0] != " "
    assert drawn[12].plain.split() == ["0", "5", "10"]


@given(
    st.integers(1, 150),
    st.integers(4, 40),
    st.lists(st.floats(-1e100, 1e100) | st.floats(-1, 1), max_size=20),
    st.booleans(),
)
def test_a_plot_has_the_size_asked_for(width, height, values, braille):
    curve = Curve([(float(i), value) for i, value in enumerate(values)], "red")
    drawn = plot("title", [curve], width=width, height=height, x_end=20, log=True, braille=braille)
    assert len(drawn) == height
    if width > 12:
        assert max(text.cell_len for text in drawn) <= width
    if not braille:
        assert all(text.plain.isascii() for text in drawn)


def test_times():
    assert [duration(s) for s in (4.4, 75, 7260, 90000)] == ["4 s", "1 min 15 s", "2 h 01 min", "1 d 1 h"]


def test_time_left_is_each_algorithms_own(tmp_path):
    quick, slow, later = (Followed(tmp_path, entry=name, spec={"rounds": 10}) for name in ("a", "b", "a"))
    quick.tail.rows = [row(0), row(1), row(2)]  # 2 s a round
    slow.tail.rows = [row(n, seconds=7.0 * n) for n in range(5)]
    quick.state, slow.state, later.state = "complete", "running", "planned"
    assert seconds_left([quick, slow, later]) == pytest.approx(6 * 7 + 10 * 2)


# Reading


def test_only_new_bytes_are_read_and_a_torn_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    tail.poll()
    assert tail.rows == []
    path.write_text(line(0) + line(1)[:10])
    tail.poll()
    assert [r["round"] for r in tail.rows] == [0]
    with path.open("r+") as file:  # what was read already is not looked at again
        file.write("x" * 20)
    with path.open("a") as file:
        file.write(line(1)[10:] + line(2))
    tail.poll()
    assert [r["round"] for r in tail.rows] == [0, 1, 2]
    assert tail.bad_line is None


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rows_after", [2, 6])
def test_a_file_that_was_cut_back_is_read_anew(tmp_path, in_place, rows_after):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(n) for n in range(4)))
    tail = MetricsTail(path)
    tail.poll()
    with path.open("a") as file:
        file.write(line(4)[:5])
    text = "".join(json.dumps(row(n, test_loss=2.0)) + "\n" for n in range(rows_after))
    if in_place:
        # The worst case: the same file number, as the system may give to a new file, and rows that have begun again.
        path.write_text(text if rows_after < 4 else "".join(line(n) for n in range(4)) + text)
        if rows_after > 4:
            tail.poll()
            assert tail.bad_line == 5
            return
    else:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(path)
    tail.poll()
    assert [(r["round"], r["test_loss"]) for r in tail.rows] == [(n, 2.0) for n in range(rows_after)]


def test_states_of_a_run(tmp_path):
    folder = tmp_path / "a b"
    watched = Watched(folder)

    def state() -> str:
        watched.poll()
        return watched.runs[0].state if watched.runs else "none"

    assert state() == "none"
    with RunFolder(folder, SPEC, resume=False) as run:
        assert is_held(folder)
        assert state() == "starting"
        run.restore()
        run.append(row(0))
        assert state() == "running"
        assert watched.advice() == ""
    assert not is_held(folder)
    assert state() == "stopped"
    assert watched.advice() == f"continue with: gradalign run '{folder}/spec.toml' --out '{folder}' --resume"
    with RunFolder(folder, SPEC, resume=True) as run:
        assert state() == "running"
        run.fail("it became NaN", diverged=True)
    assert (state(), watched.runs[0].reason) == ("failed", "it became NaN")
    with RunFolder(folder, SPEC, resume=True) as run:
        assert state() == "running", "the reason is gone when the run goes on"
        run.append(row(3))
        run.finish({}, {"rounds": 3})
    assert state() == "complete"
    assert watched.ended
    assert watched.runs[0].label == "fedga, seed 4"


def test_looking_at_the_lock_never_turns_a_writer_away(tmp_path):
    RunFolder(tmp_path, SPEC, resume=False).close()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            is_held(tmp_path)

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(100):
            RunFolder(tmp_path, SPEC, resume=True).close()
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()


# The command


def test_a_run_that_is_given_more_rounds_is_followed_to_its_new_end(tmp_path):
    run = {"out": tmp_path, "workers": 0, "resume": True}
    ga.run(blobs(), ga.FedAvg(), rounds=2, **run)
    followed = Followed(tmp_path, entry="fedavg")
    followed.poll()
    assert (followed.state, followed.round, followed.rounds) == ("complete", 2, 2)
    heard = []

    def look(row: dict) -> None:
        followed.poll()
        heard.append((followed.state, followed.round, followed.rounds))

    ga.run(blobs(), ga.FedAvg(), rounds=5, on_round=look, **run)
    assert heard == [("complete", 2, 2), ("running", 3, 5), ("running", 4, 5)], "a row is told before it is written"
    for rounds in (5, 6):
        ga.run(blobs(), ga.FedAvg(), rounds=rounds, **run)  # from one end to the next between two looks
        followed.poll()
        assert (followed.state, followed.round, followed.rounds) == ("complete", rounds, rounds)


def test_one_frame_of_a_run_and_the_command_it_names_works(tmp_path):
    out = tmp_path / "r"
    call("run", "digits", *SMALL, "--out", out)
    (out / "summary.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}
    shown = call("watch", out).stdout
    assert before == {path: path.stat().st_mtime_ns for path in [out, *out.iterdir()]}, "only read"
    assert "test accuracy, by round" in shown
    assert "round 3 of 3" in shown
    command = shown.split("continue with: ")[1].splitlines()[0]
    call(*shlex.split(command)[1:], "--workers", "0")
    assert "complete" in call("watch", "--once", out).stdout


def test_one_frame_of_a_comparison(tmp_path):
    call("compare", "digits", *SMALL, "--seeds", 2, "--algorithms", "fedga,fedavg", "--out", tmp_path / "c")
    shown = call("watch", tmp_path / "c", "--once").stdout
    assert "4 of 4 runs complete" in shown
    for words in ("fedga, seed 0", "fedga, seed 1", "fedavg, seed 0", "fedavg, seed 1"):
        assert words in shown
    above = call("watch", tmp_path).stdout
    assert "4 of 4 runs complete" in above
    assert "c/fedavg, seed 1" in above
    for name in ("summary.json", "fedavg/seed1/summary.json"):
        (tmp_path / "c" / name).unlink()
    (tmp_path / "c/fedavg/seed0/spec.toml").write_text("not TOML")
    (tmp_path / "c/fedavg/seed0/summary.json").unlink()
    shown = call("watch", tmp_path / "c", "--once").stdout
    assert "gradalign compare RECIPE" in shown
    assert "unreadable" in shown


def test_what_is_no_run_folder_is_one_line(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("hello")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/spec.toml").write_text("rounds = 'many'")
    for folder, words in (
        ("notes", "holds no run"),
        ("notes/a.txt", "is a file"),
        ("odd", "is not a run folder"),
        ("nowhere", "there is no run in"),
    ):
        done = call("watch", tmp_path / folder, code=2)
        assert done.stderr.count("\n") == 1
        assert words in done.stderr


def test_what_a_folder_says_does_not_command_the_terminal(tmp_path):
    with RunFolder(tmp_path / "a\x1b[2Jb" / "[red]c", SPEC, resume=False) as run:
        run.append(row(0))
        run.fail("bad \x1b]0;title\x07 news", diverged=False)
    watched = Watched(tmp_path)
    watched.poll()
    shown = "\n".join(text.plain for text in Frame(watched).lines(100, 30))
    assert "\x1b" not in shown
    assert "a?[2Jb/[red]c, seed 4: bad ?]0;title? news" in shown


def test_many_runs_fit_the_screen(tmp_path):
    for number in range(60):
        with RunFolder(tmp_path / f"trial{number:02d}", SPEC, resume=False) as run:
            for n in range(3):
                run.append(row(n, test_loss=1.0 + number))
    watched = Watched(tmp_path)
    watched.poll()
    for width, height in ((80, 24), (200, 50), (40, 12)):
        lines = Frame(watched).lines(width, height)
        assert len(lines) <= height
        assert any("more" in text.plain for text in lines)
        assert any("accuracy" in text.plain for text in lines)
        assert sum(text.plain.startswith("━━") for text in lines) <= height / 2, "the curves have room"


def test_a_sweep_is_over_when_its_summary_is_there_and_its_workers_are_gone(tmp_path):
    def texts() -> str:
        watched.poll()
        return "\n".join(text.plain for text in Frame(watched).lines(120, 40))

    (tmp_path / "sweep.toml").write_text("")
    watched = Watched(tmp_path)
    with locked(tmp_path / ".workers/a"):
        for name, rounds in (("000_lr0.1", 3), ("001_lr0.2", 1)):
            with RunFolder(tmp_path / "trials/coarse" / name, SPEC, resume=False) as run:
                for n in range(rounds):
                    run.append({"round": n, "seconds": float(n), "validation_accuracy": n / 4})
        shown = texts()
        assert watched.at_work, "between two trials"
        assert "coarse/001_lr0.2  ended early" in shown
        assert "validation accuracy, by round" in shown
    assert "gradalign sweep RECIPE" in texts()
    assert not watched.ended
    (tmp_path / "summary.json").write_text("{}")
    assert "RECIPE" not in texts()
    assert watched.ended
    assert {run.group for run in watched.runs} == {"coarse"}


class Terminal:
    """``gradalign watch`` in a terminal of its own."""

    def __init__(self, *words: object) -> None:
        self.main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 110, 0, 0))
        command = [sys.executable, "-m", "gradalign", "watch", *map(str, words), "--interval", "0.1"]
        self.process = subprocess.Popen(
            command,
            stdin=side,
            stdout=side,
            stderr=side,
            env=os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parent.parent / "src")},
            preexec_fn=hear_ctrl_c,
        )
        os.close(side)
        self.seen = ""

    def until(self, words: str | None, seconds: float = 60) -> str:
        """Read until these words are on the screen, or, for None, until the end."""
        limit = time.monotonic() + seconds
        while words is None or words not in self.seen:
            assert time.monotonic() < limit, f"{words!r} did not come: {self.seen[-2000:]}"
            if select.select([self.main], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.main, 1 << 16).decode(errors="replace")
                except OSError:  # the other side is closed
                    assert words is None, self.seen[-2000:]
                    break
        return self.seen

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.main)


def test_live_from_before_the_start_over_a_crash_to_the_end(tmp_path):
    folder = tmp_path / "r"
    with Terminal(folder) as terminal:
        terminal.until("waiting for a run in")
        with RunFolder(folder, SPEC, resume=False) as run:
            run.append(row(0))
            run.append(row(1))
            terminal.until("round 1 of 3")
        terminal.until("nobody is writing here")
        assert terminal.process.poll() is None, "it may be resumed"
        with RunFolder(folder, SPEC, resume=True) as run:
            run.restore()
            run.append(row(0))
            terminal.until("round 0 of 3")
            for number in (1, 2, 3):
                run.append(row(number))
            run.finish({}, {"rounds": 3})
        terminal.until(None)
        assert terminal.process.wait(timeout=30) == 0
        last = terminal.seen.split("\x1b[?1049l")[-1]
        assert "complete" in last, "the last picture stays on the screen"
        assert "round 3 of 3" in last


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_leaving_early(tmp_path, end, code):
    with RunFolder(tmp_path, SPEC, resume=False) as run, Terminal(tmp_path) as terminal:
        run.append(row(0))
        terminal.until("round 0 of 3")
        terminal.process.send_signal(end)
        terminal.until(None)
        assert terminal.process.wait(timeout=30) == code
        assert "only the watching has ended" in terminal.seen
        assert "Traceback" not in terminal.seen


def test_a_failed_run_and_a_timeout_end_the_watch(tmp_path):
    with RunFolder(tmp_path / "r", SPEC, resume=False) as run:
        run.append(row(0))
    with Terminal(tmp_path / "r", "--timeout", "0.3") as terminal:
        terminal.until(None)
        assert terminal.process.wait(timeout=30) == 2
        assert "nobody has written to" in terminal.seen
    with RunFolder(tmp_path / "r", SPEC, resume=True) as run:
        run.fail("the loss became NaN", diverged=True)
    with Terminal(tmp_path / "r") as terminal:
        terminal.until(None)
        assert terminal.process.wait(timeout=30) == 2
        assert "fedga, seed 4: the loss became NaN" in terminal.seen
