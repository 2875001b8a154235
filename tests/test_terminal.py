"""What the command line shows: help for everything, whole words at 80 columns, progress in a pipe, where errors lie."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from gradalign.cli.app import app
from gradalign.cli.tables import print_comparison
from gradalign.errors import told
from gradalign.tracking import progress

SMALL = ("--set", "rounds=4", "--set", "task.clients=5", "--set", "clients.per_round=3", "--workers", "0")
COMMANDS = typer.main.get_command(app)


def call(*words: object, code: int = 0, columns: int = 80):
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output + result.stderr
    return result


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def every_command(command=COMMANDS, path=()):
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*path, name))


def words_of(text: str) -> set[str]:
    return set(re.split(r"[\s│┃╭╮╰╯─━┏┓┗┛┡┩┳┻╇┴┬┼└┘]+", text))


@pytest.mark.parametrize(
    ("path", "command"), list(every_command()), ids=lambda one: " ".join(one) if type(one) is tuple else ""
)
def test_every_command_and_argument_has_help_in_whole_words(path, command):
    assert command.help
    assert not [one.name for one in command.params if not (one.help or "").strip()]
    shown = call(*path, "--help")
    given = " ".join(
        [command.help, *(one.help for one in command.params), *(str(one.metavar or "") for one in command.params)]
    )
    assert words_of(given) <= words_of(shown.stdout) | {""}
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_no_word_of_a_table_or_footer_is_broken_at_80_columns():
    call("compare", "digits", *SMALL, "--algorithms", "fedga,fedavg", "--seeds", 2, "--out", "c")
    for words in (("show", "c"), ("show", "c/fedga/seed0"), ("tasks",), ("data",), ("data", "show", "digits")):
        narrow, wide = (call(*words, columns=columns).stdout for columns in (80, 250))
        assert words_of(narrow) == words_of(wide)
        assert max(map(len, narrow.splitlines())) <= 80
    summary = json.loads(Path("c/summary.json").read_text())
    summary |= {"paper": {"source": "Table 1", "claim": "FedGA is the best " * 5}}
    summary["algorithms"][0] |= {"name": "fedga+fedprox+fedadam", "paper_test_accuracy": [85.95, 0.33]}
    folder = Path("a-very-long-folder" * 6)
    consoles = [Console(width=width, record=True, file=io.StringIO()) for width in (80, 250)]
    for console in consoles:
        print_comparison(console, summary, folder)
    narrow, wide = (console.export_text() for console in consoles)
    assert words_of(narrow) == words_of(wide)
    assert f"{folder}/summary.json" in narrow, "a path stays whole"
    assert all(len(line) <= 80 or str(folder) in line for line in narrow.splitlines())


def test_in_a_pipe_every_tenth_is_a_line():
    lines = call("run", "digits", *SMALL, "--out", "r").stderr.splitlines()
    assert [line.split(" after ")[0] for line in lines] == [f"{25 * n} % ({n} of 4 rounds)" for n in (1, 2, 3, 4)]
    assert re.search(r" s: fedga: test accuracy \d+\.\d%$", lines[-1])
    lines = call("compare", "digits", *SMALL, "--algorithms", "fedga,fedavg", "--seeds", 4, "--out", "c").stderr
    first = [math.ceil(48 * tenth / 10) for tenth in range(1, 11)]  # of 4 · 4 rounds of FedGA, 4 · 8 of FedAvg
    assert [line.split()[0] for line in lines.splitlines()] == [str(100 * rounds // 48) for rounds in first]
    assert ": fedavg, seed 3: test accuracy" in lines.splitlines()[-1]


def test_a_slow_run_says_a_word_every_half_minute(monkeypatch, capsys):
    clock = iter(range(0, 10_000, 11))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.rounds_bar(1000) as tick:
        for number in range(9):
            tick("fedga", {"round": number})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == ["(2", "(5", "(8"], "33 seconds apart, below a tenth"


def test_after_hours_the_words_are_further_apart(monkeypatch, capsys):
    """A round a minute: a twentieth of the time is at most one up to the 20th, and at most two up to the 40th."""
    clock = iter(range(0, 100_000, 60))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.rounds_bar(1000) as tick:
        for number in range(1, 31):
            tick("fedga", {"round": number})
    rounds = [int(line.split()[2][1:]) for line in capsys.readouterr().err.splitlines()]
    assert rounds == [*range(1, 21), 22, 24, 26, 28, 30]


TASK = """
import torch
import gradalign as ga

def loss(outputs, targets):
    raise ValueError("no such loss")

def make():
    part = (torch.zeros(6, 3), torch.zeros(6, dtype=torch.long))
    return ga.Task(name="mine", model=lambda: torch.nn.Linear(3, 2), clients=[part] * 3, test=part, loss=loss)

def fails():
    return {}["age"]
"""


def test_an_error_in_the_users_own_function_says_where(tmp_path, monkeypatch):
    Path("own_loss.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    where = f"({tmp_path.name}/own_loss.py, line"
    words = ("run", "digits", "--set", "clients.per_round=2", "--workers", "0", "--out", "r", "--task")
    (line,) = call(*words, "own_loss:fails", code=2).stderr.splitlines()
    assert line == f"error: the task own_loss:fails could not be made: KeyError: 'age' {where} 13)"
    (line,) = call(*words, "own_loss:make", code=2).stderr.splitlines()
    assert line.endswith(f"ValueError: no such loss {where} 6)")
    command = [sys.executable, "-m", "gradalign", *words, "own_loss:make", "--workers", "2", "--resume", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    *trace, last = done.stderr.splitlines()
    assert last == line, "the same from a worker process"
    assert "Traceback (most recent call last):" in trace
    assert any(line.endswith('own_loss.py", line 6, in loss') for line in trace)


def test_only_the_users_own_lines_are_named():
    with pytest.raises(ValueError, match="Expecting property name") as caught:
        json.loads("{")
    here = caught.value.__traceback__.tb_lineno
    assert told(caught.value).endswith(f"(tests/test_terminal.py, line {here})"), "not a line of the json package"
    with pytest.raises(SyntaxError) as caught:
        compile("x = = 1", "own_loss.py", "exec")
    assert told(caught.value) == "SyntaxError: invalid syntax (own_loss.py, line 1)"
