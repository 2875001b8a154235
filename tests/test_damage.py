"""Run folders that were damaged, swapped, linked or written by a stranger: the same result or one sentence, always."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gradalign as ga
from gradalign.cli.common import print_json
from gradalign.cli.tables import load_shown, print_shown
from gradalign.cli.tables import print_shown as print_shown_sweep
from gradalign.report import write_report
from gradalign.report.experiments import arrange
from gradalign.report.figures import curve_figure
from gradalign.report.series import VARIANCE, curves_of
from gradalign.runs.read import gather
from gradalign.watch import Watched
from gradalign.watch.frame import watch_once
from run_folders import rows_of, spec_of, write_comparison, write_run

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a Unix")

ALGORITHM = ga.Scaffold(control="kept") + ga.FedAdam(lr=0.03)
OPTIONS = {"rounds": 6, "clients_per_round": 2, "workers": 0, "checkpoint_seconds": 0, "progress": False}
LOCAL = ga.LocalTraining(lr=0.1, steps=2, batch_size=4)
FILES = ("spec.toml", "metrics.jsonl", "checkpoint.safetensors", "holdings.json", ".lock")
FINISHED = ("spec.toml", "metrics.jsonl", "model.safetensors", "summary.json", "holdings.json", ".lock")


def blobs() -> ga.Task:
    stream = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 3, generator=stream), torch.randint(0, 2, (8,), generator=stream)) for _ in range(4)]
    test = (torch.randn(20, 3, generator=stream), torch.randint(0, 2, (20,), generator=stream))
    return ga.Task(name="blobs", model=lambda: torch.nn.Linear(3, 2), clients=clients, test=test)


class Stop:
    """A tracker that ends a run as Ctrl-C does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def start(self, run: object) -> None: ...

    def log(self, row: dict) -> None:
        if row["round"] == self.at:
            raise KeyboardInterrupt

    def end(self, summary: object) -> None: ...


def train(folder: Path, **more) -> ga.Result:
    return ga.run(blobs(), ALGORITHM, local=LOCAL, out=folder, resume=True, **OPTIONS | more)


def bits(model: torch.nn.Module) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One run that is complete, and the same one stopped after its fourth row."""
    home = tmp_path_factory.mktemp("runs")
    train(home / "finished")
    with pytest.raises(KeyboardInterrupt):
        train(home / "stopped", trackers=[Stop(4)])
    assert (home / "stopped/checkpoint.safetensors").exists()
    return {"finished": home / "finished", "stopped": home / "stopped"}


@pytest.fixture(scope="module")
def expected(folders) -> bytes:
    whole = load_file(folders["finished"] / "model.safetensors")
    return b"".join(whole[name].numpy().tobytes() for name in blobs().make_model(0).state_dict())


# What may happen to a file.


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))] if content else b"")


def garbage(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(200))


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, chance: random.Random) -> None:
        path.unlink()
        make(path)

    return damage


def holding(text: str) -> Callable[[Path, random.Random], None]:
    return lambda path, chance: path.write_text(text)


def line_changed(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"0", b"1", 1) if b"0" in content else content + b"1")


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    **{f"flip{n}": flip for n in range(6)},
    **{f"cut{n}": cut for n in range(3)},
    "edited": line_changed,
    "empty": holding(""),
    "garbage": garbage,
    "deleted": replaced_by(lambda path: None),
    "folder": replaced_by(Path.mkdir),
    "fifo": replaced_by(os.mkfifo),
    "link": replaced_by(lambda path: path.symlink_to("/etc/hostname")),
    "broken link": replaced_by(lambda path: path.symlink_to("nowhere")),
    "endless": replaced_by(lambda path: path.symlink_to("/dev/zero")),
    "sparse": lambda path, chance: os.truncate(path, 2**40),
    "huge number": holding('{"round": 0, "rounds": 1' + "0" * 5000 + "}\n"),
    "huge setting": holding("rounds = 1" + "0" * 5000 + "\n"),
    "large numbers": holding('{"round": 0, "test_loss": 1e308, "seconds": -1e308}\n{"round": 1, "seconds": 1e308}\n'),
    "deep JSON": holding('{"a":' * 100_000),
    "deep TOML": holding("a = " + "[" * 100_000),
    "deep but whole": holding('{"round": 0, "a": ' + "[" * 200 + "]" * 200 + "}\n"),
    "dotted": holding(".".join(["a"] * 1200) + " = 1\n"),
    "twice": holding('{"round": 0, "round": 1}\n'),
    "escapes": holding('"\x1b[2J\x07" = "\x9b31m"\n'),
    "escaped": holding('rounds = 6\n"\\u001b[2J" = "\\u001b]0;x\\u0007"\n[algorithm]\nname = "\\u001b[31m"\n'),
    "words": holding('{"round": 0, "seconds": "soon", "test_accuracy": [], "r": {}, "drift": "x"}\n'),
}


KINDS = (
    "empty",
    "garbage",
    "deleted",
    "folder",
    "fifo",
    "link",
    "broken link",
    "endless",
    "sparse",
    "escapes",
    "dotted",
)


def copy_of(folder: Path, place: Path) -> Path:
    shutil.copytree(folder, place, symlinks=True)
    return place


def one_sentence(error: BaseException) -> None:
    assert str(error)
    assert str(error).isprintable(), "one line, and nothing that a terminal obeys"
    assert len(str(error)) < 1000


def held_to_a_sentence(work: Callable[[], object]) -> object:
    try:
        return work()
    except ga.GradalignError as error:
        one_sentence(error)
        return None


def look_at(folder: Path, page: Path | None) -> None:
    """Call all that reads a folder; what is printed cannot command a terminal."""
    printed = io.StringIO()
    console = Console(file=printed, width=100, color_system=None)

    def show() -> None:
        shown = load_shown(folder)
        (print_shown_sweep if shown["kind"] == "sweep" else print_shown)(console, shown, folder)

    held_to_a_sentence(show)
    held_to_a_sentence(lambda: watch_once(folder, console))
    held_to_a_sentence(lambda: watch_once(folder.parent, console))
    assert printed.getvalue().replace("\n", "").isprintable()
    for one in gather([folder], unfinished=True).skipped:
        assert str(one).isprintable()
    if page is not None:
        held_to_a_sentence(lambda: write_report([folder], page, unfinished=True))


CASES = [("stopped", name) for name in FILES] + [("finished", name) for name in FINISHED]


@pytest.mark.parametrize(("which", "name"), CASES)
def test_damaged_files_give_the_same_model_or_one_sentence(folders, expected, tmp_path, which, name, capsys):
    outcomes = {}
    read_for_training = name not in ("holdings.json", ".lock")
    damages = {key: act for key, act in DAMAGES.items() if read_for_training or key in KINDS}
    for damage, act in damages.items():
        folder = copy_of(folders[which], tmp_path / damage / "run")
        act(folder / name, random.Random(f"{which} {name} {damage}"))
        look_at(folder, tmp_path / "page.html" if damage in ("large numbers", "escaped") else None)
        result = held_to_a_sentence(lambda folder=folder: train(folder))
        outcomes[damage] = "refused" if result is None else "same"
        if result is not None:
            assert bits(result.model) == expected, f"{damage} of {name} changed the result"
            assert [*result.history["round"]] == list(range(7)), f"{damage} of {name} lost rows"
        shutil.rmtree(tmp_path / damage)
    if name.endswith("safetensors") or name in ("summary.json", "metrics.jsonl"):
        # Without its checkpoint, or its summary, a run begins again; what follows the checkpoint's rows is cut anyway.
        lenient = ("flip", "deleted") if name in ("checkpoint.safetensors", "summary.json") else ("flip",)
        lenient += ("cut",) if which == "stopped" and name == "metrics.jsonl" else ()
        changed = {damage for damage in DAMAGES if not damage.startswith(lenient)}
        assert {damage for damage in changed if outcomes[damage] == "same"} == set()
    assert capsys.readouterr().out.replace("\n", "").isprintable()


# Checkpoints.


def rewrite(path: Path, change: Callable[[dict, dict], None]) -> None:
    """Write a checkpoint anew as anybody could, with the header that it had."""
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, header)
    save_file(tensors, path, metadata=header)


def another_round(tensors: dict, header: dict) -> None:
    header["gradalign"] = header["gradalign"].replace('"round": 3', '"round": 2').replace('"round": 4', '"round": 2')


CHANGES = {
    "a vector is missing": lambda tensors, header: tensors.pop("memory.m"),
    "clients are missing": lambda tensors, header: tensors.pop("kept.scaffold"),
    "another round": another_round,
    "another kind of number": lambda tensors, header: tensors.update({"memory.m": tensors["memory.m"].float()}),
    "another shape": lambda tensors, header: tensors.update({"x": tensors["x"].reshape(2, 4)}),
    "one bit of x": lambda tensors, header: tensors.update({"x": tensors["x"].nextafter(tensors["x"] + 1)}),
    "renamed": lambda tensors, header: tensors.update(
        {"memory.v": tensors["memory.m"], "memory.m": tensors["memory.v"]}
    ),
    "as an earlier version wrote it": lambda tensors, header: header.pop("sha256"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_is_not_what_was_written_is_refused(folders, tmp_path, change):
    folder = copy_of(folders["stopped"], tmp_path / "run")
    rewrite(folder / "checkpoint.safetensors", CHANGES[change])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        ga.GradalignError, match=r"checkpoint.safetensors (is damaged|has no digest).*; put a good copy"
    ):
        train(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "nothing is lost"


def test_a_checkpoint_of_another_run_is_refused(folders, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "other", seed=1, trackers=[Stop(4)])
    folder = copy_of(folders["stopped"], tmp_path / "run")
    shutil.copy(tmp_path / "other/checkpoint.safetensors", folder)
    with pytest.raises(ga.GradalignError, match=r"checkpoint.safetensors belongs to a run with other settings"):
        train(folder)


@pytest.mark.parametrize("change", [lambda lines: lines[1:], lambda lines: lines[:1], lambda lines: [lines[0], *lines]])
def test_metrics_without_their_early_rows_are_refused(folders, tmp_path, change):
    folder = copy_of(folders["stopped"], tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(change(lines)))
    with pytest.raises(ga.GradalignError, match=r"metrics.jsonl lacks rows from before the checkpoint"):
        train(folder)


def test_what_a_kill_can_leave_behind_goes_on(folders, expected, tmp_path):
    folder = copy_of(folders["stopped"], tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "test_acc')
    (folder / ".checkpoint.safetensors.1-ab.tmp").write_bytes(b"half of")
    result = train(folder)
    assert bits(result.model) == expected
    assert result.history["round"] == list(range(7))
    assert not list(folder.glob(".*.tmp"))


# Links.


def test_links_are_left_alone(folders, tmp_path):
    mine = tmp_path / "thesis.tex"
    for name in FILES[:1] + FILES[2:]:
        mine.write_text("years of work")
        folder = copy_of(folders["stopped"], tmp_path / f"{name}-run")
        (folder / name).unlink()
        (folder / name).symlink_to(mine)
        held_to_a_sentence(lambda folder=folder: train(folder))
        assert mine.read_text() == "years of work"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / ".lock").symlink_to(mine)
    with pytest.raises(ga.GradalignError, match=r"\.lock is a symbolic link"):
        train(fresh)
    assert mine.read_text() == "years of work"


def test_a_lock_under_two_names_keeps_what_it_holds(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / "run").mkdir()
    os.link(tmp_path / "mine", tmp_path / "run/.lock")
    train(tmp_path / "run", rounds=1)
    assert (tmp_path / "mine").read_text() == "years of work"


def test_a_linked_folder_of_a_tracker_is_refused(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/events.out.tfevents.1").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").symlink_to(tmp_path / "mine")
    with pytest.raises(ga.GradalignError, match="tensorboard is a symbolic link"):
        train(tmp_path / "run", trackers=[ga.TensorBoard()])
    assert (tmp_path / "mine/events.out.tfevents.1").read_text() == "mine"


def test_linked_folders_are_followed(folders, expected, tmp_path):
    copy_of(folders["stopped"], tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert bits(train(tmp_path / "link").model) == expected


# A full disk.


@pytest.mark.parametrize("room", [0, 300, 900, 1500, 3000])
def test_a_full_disk_ends_in_one_sentence_and_the_run_goes_on_later(folders, expected, tmp_path, room):
    """A limit on the size of files fails as a full disk does: in the middle of a write."""
    folder = tmp_path / "run"
    if room > 300:
        copy_of(folders["stopped"], folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(ga.GradalignError, match="File too large") as caught:
            train(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    one_sentence(caught.value)
    assert not list(folder.glob(".*.tmp"))
    assert bits(train(folder).model) == expected


# Reports, pictures of the terminal, tables.

ODD_ROWS = [row | {"test_loss": 1e308, "seconds": 1e308, "r": 5e-324, "test_accuracy": -1e308} for row in rows_of(0.8)]
ODD_SPECS = {
    "dotted": ".".join(["a"] * 1200) + " = 1",
    "deep": "a = " + "[" * 3000 + "]" * 3000,
    "digits": "a = 1" + "0" * 5000,
    "many digits": "seed = 1" + "0" * 400,
}


def test_one_bad_folder_never_ends_the_report(tmp_path):
    write_comparison(tmp_path / "good", {"fedga": [0.8, 0.8], "fedavg": [0.7, 0.7]})
    for name, text in ODD_SPECS.items():
        write_run(tmp_path / name, spec=text + '\n[algorithm]\nname = "fedga"\n')
    for seed in (5, 6):
        metrics = "".join(json.dumps(row) + "\n" for row in ODD_ROWS)
        summary = {"final_test_accuracy": 1e308, "seconds": 1e308, "final_test_loss": 5e-324 * seed, "final_r": 1e-200}
        spec = spec_of(seed=seed, name="large")
        write_run(tmp_path / f"large{seed}", spec, metrics=metrics, summary=json.dumps(summary))
    found = gather([tmp_path])
    assert {Path(one.folder).name for one in found.skipped} == set(ODD_SPECS)
    assert len(found.runs) == 6
    assert "fedavg" in write_report([tmp_path], tmp_path / "r.html").read_text()
    for experiment in arrange(found.runs):
        curve_figure(experiment, VARIANCE, curves_of(experiment, VARIANCE), "seconds").draw_without_rendering()


def test_a_run_that_only_drawing_finds_odd_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    from gradalign.report import page as pages
    from gradalign.report import report_gathered

    write_run(tmp_path / "good", spec_of(seed=1))
    write_run(tmp_path / "odd", spec_of(name="odd"))
    facts = pages._facts

    def fail_on_odd(experiment):
        if experiment.name == "odd":
            raise OverflowError("int too large\x1b[2J")
        return facts(experiment)

    monkeypatch.setattr(pages, "_facts", fail_on_odd)
    gathered = gather([tmp_path])
    page = report_gathered(gathered, tmp_path / "r.html").read_text()
    (line,) = gathered.skipped
    assert str(line) == f"skipped {tmp_path / 'odd'}: it cannot be shown (OverflowError: int too large?[2J)"
    assert "Not in this report" in page
    assert [run.folder.name for run in gathered.runs] == ["good"]


def test_watching_numbers_that_no_axis_has_room_for(tmp_path):
    metrics = "".join(json.dumps(row) + "\n" for row in ODD_ROWS)
    write_run(tmp_path / "a", spec_of(rounds=10**90), metrics=metrics, summary=None)
    write_run(tmp_path / "b", metrics="[" * 100_000 + "\n", summary=None)
    look_at(tmp_path / "a", tmp_path / "page.html")
    watched = Watched(tmp_path)
    watched.poll()
    assert sorted(run.state for run in watched.runs) == ["stopped", "stopped"]


@pytest.mark.parametrize("text", ['algorithms = ["a"]\nseeds = [inf]', 'algorithms = "abc"\nseeds = 3', "seeds = ["])
def test_a_comparison_that_is_none_gets_a_sentence(tmp_path, text):
    (tmp_path / "compare.toml").write_text(text)
    with pytest.raises(ga.GradalignError, match=r"compare\.toml|is not a comparison") as caught:
        watch_once(tmp_path, Console(file=io.StringIO()))
    one_sentence(caught.value)


def test_settings_that_command_a_terminal_are_only_told(tmp_path):
    train(tmp_path / "run", rounds=1)
    spec = tmp_path / "run/spec.toml"
    spec.write_text('"\\u001b[2J" = "\\u001b]0;owned\\u0007"\n' + spec.read_text())
    with pytest.raises(ga.GradalignError, match=r"other settings: \?\[2J") as caught:
        train(tmp_path / "run", rounds=1)
    one_sentence(caught.value)


def test_json_for_programs_has_no_bare_control_characters(capsys):
    print_json({"a\x1b": "\x9b31m\u202e\udc80\U0001f600", "b": [1, "ä\n"]})
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert json.loads(out) == {"a\x1b": "\x9b31m\u202e\udc80\U0001f600", "b": [1, "ä\n"]}


@pytest.mark.parametrize("words", [("a." * 1200 + "b=1",), ("seed=" + "1" * 5000,), ("seed=" + "[" * 5000,)])
def test_settings_on_the_command_line_get_a_sentence(words):
    from gradalign.recipes import load_recipe

    with pytest.raises(ga.GradalignError) as caught:
        load_recipe("digits", words).spec()
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", [*ODD_SPECS.values(), "a = 'x"])
def test_recipes_that_no_reader_can_walk_get_a_sentence(tmp_path, text):
    from gradalign.recipes import load_recipe

    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ga.GradalignError) as caught:
        load_recipe(str(tmp_path / "r.toml")).spec()
    one_sentence(caught.value)
