"""What strangers send: recipes, data files, names, and run folders whose task is theirs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from random import Random

from .bench import ALGORITHMS, HERE, RECIPE, Bench
from .folders import CHANGES, DEEP
from .law import broken


def _recipe_bytes(rng: Random) -> bytes:
    text = RECIPE.replace("ALGORITHM", rng.choice(list(ALGORITHMS.values())))
    kind = rng.randrange(9)
    if kind < 5:
        return CHANGES[rng.choice(list(CHANGES))](text.encode(), rng)
    line = rng.choice(
        [
            "x." * 1200 + "x = 1",
            "local.lr = " + "9" * 5000,
            "local.lr = nan",
            "rounds = -9223372036854775808",
            "compare = 3",
            "compare.seeds = 99999999999999999999",
            "compare.settings = [[[]]]",
            'name = "\\u001b]0;x\\u0007"',
            'name = "../../x"',
            f'name = "{"n" * 5000}"',
            "algorithm = " + "[" * DEEP,
            'task.name = "os:nothing"',
            'task.name = "\\u0000:x"',
            'task.name = ":"',
            "sweep.lr = []",
            "measure.target_accuracy = nan",
            "clients.per_round = 1_000_000_000_000",
            "local.batch_size = 1_000_000_000_000",
            "algorithm.beta = {kind = 'steps', value = 1.0, at_rounds = {x = 1.0}}",
        ]
    )
    lines = [old for old in text.splitlines() if old.split("=")[0].strip() != line.split("=")[0].strip()]
    return "\n".join([line, *lines]).encode()


def recipes(bench: Bench, rng: Random) -> list[str]:
    """A recipe that is none, or not a sensible one."""
    trial = bench.begin()
    recipe = trial / "recipe.toml"
    place = rng.choice(["file"] * 9 + ["fifo", "zero", "folder"])
    if place == "fifo":
        os.mkfifo(recipe)
    elif place == "zero":
        recipe.symlink_to("/dev/zero")
    elif place == "folder":
        recipe.mkdir()
    else:
        recipe.write_bytes(_recipe_bytes(rng))
        shutil.copy(recipe, bench.root / "last-recipe.toml")
    command = rng.choice(["run", "run", "compare"])
    extra = ("--algorithms", "fedavg", "--seeds", 1) if command == "compare" else ()
    bench.log.append(f"the recipe is a {place}; a copy of the last file: {bench.root / 'last-recipe.toml'}")
    outcome = bench.run(
        command, recipe, *extra, "--set", "rounds=2", "--set", "local.steps=2", "--workers", 0, "--out", trial / "out"
    )
    return broken(outcome, (0, 2))


def data_files(bench: Bench, rng: Random) -> list[str]:
    """A data file that is not what its name says."""
    trial = bench.begin()

    def make() -> Path:
        sys.path.insert(0, str(HERE.parent))
        from small_files import write_all

        write_all(bench.root / "small")
        return bench.root / "small"

    data = trial / "data"
    shutil.copytree(bench.once("small data", make), data)
    path = rng.choice(sorted(path for path in data.rglob("*") if path.is_file()))
    kind = rng.choice([*CHANGES, "fifo", "folder", "zero"])
    if kind in CHANGES:
        path.write_bytes(CHANGES[kind](path.read_bytes(), rng))
    else:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
    task = next(name for start, name in _TASKS.items() if start in str(path.relative_to(data)))
    words = rng.choice(
        [("data", "show", task, "--out", trial / "x.png"), ("diagnose", task, "--clients", 3), ("data",)]
    )
    bench.log.append(f"{path.relative_to(data)}: {kind}")
    environment = {"GRADALIGN_DATA": str(data), "GRADALIGN_CACHE": str(trial / "cache")}
    return broken(bench.run(*words, environment=environment), (0, 2))


_TASKS = {"EMNIST": "emnist", "cifar-100": "cifar100", "cifar-10": "cifar10", "shakespeare": "shakespeare"}
_NAMES = (
    "..",
    ".",
    "../x",
    "/x",
    "a/../../x",
    "",
    " ",
    "-",
    "--",
    ".lock",
    "....",
    "..\\x",
    "x\u202e",
    "n" * 300,
    "~",
    "*",
)


def names(bench: Bench, rng: Random) -> list[str]:
    """An entry of a comparison, or a recipe, whose name leads elsewhere: nothing is written beside the folder."""
    trial = bench.begin()
    first, second = rng.sample(_NAMES, 2)
    quoted = [name.replace("\\", "\\\\") for name in (first, second)]
    table = "".join(f'[compare.settings."{name}"]\nalgorithm.name = "fedavg"\n' for name in quoted)
    text = RECIPE.replace("ALGORITHM", ALGORITHMS["fedavg"]).replace('name = "tiny"', f'name = "{quoted[0]}"')
    listed = ", ".join(f'"{name}"' for name in quoted)
    recipe = trial / "recipe.toml"
    recipe.write_text(text + f"[compare]\nseeds = 1\nalgorithms = [{listed}]\n" + table)
    out = trial / "deep" / "down" / "out"
    before = _everything(bench.root, out)
    bench.log.append(f"entries {first!r} and {second!r}")
    outcome = bench.run("compare", recipe, "--set", "rounds=2", "--workers", 0, "--out", out)
    found = broken(outcome, (0, 2))
    beside = _everything(bench.root, out) - before - {out.parent, out.parent.parent}
    if beside:
        found.append(f"written outside --out: {sorted(map(str, beside))[:3]}")
    return found


def _everything(root: Path, but: Path) -> set[Path]:
    found = {path for path in root.rglob("*") if but != path and but not in path.parents}
    return {path for path in found if "__pycache__" not in path.parts and path.name not in ("stdout", "stderr")}


_TRAP = "from pathlib import Path\nPath({trace!r}).touch()\n\ndef make():\n    raise SystemExit(0)\n"


def traps(bench: Bench, rng: Random) -> list[str]:
    """A run folder whose task is a stranger's: nothing imports it unasked."""
    trial = bench.begin()
    folder, trace = trial / "run", trial / "imported"
    shutil.copytree(bench.stopped("fedavg"), folder)
    module = f"trap{rng.randrange(10**9)}"
    (bench.home / f"{module}.py").write_text(_TRAP.format(trace=str(trace)))
    text = RECIPE.replace("ALGORITHM", ALGORITHMS["fedavg"])
    hidden = f'[compare]\nalgorithms = ["a"]\nseeds = 1\n[compare.settings.a]\ntask.name = "{module}:make"\n'
    hidden += 'algorithm.name = "fedavg"\n'
    spec = folder / rng.choice(["spec.toml", "best.toml", "recipe.toml"])
    command = rng.choice(["run", "compare", "sweep", "show", "watch", "report"])
    if command == "compare" and rng.random() < 0.5:
        spec.write_text(text.replace("tiny_task:tiny", "digits") + hidden)
    else:
        spec.write_text(text.replace("tiny_task:tiny", f"{module}:make"))
    reading: dict[str, tuple[object, ...]] = {
        "show": ("show", folder),
        "watch": ("watch", folder, "--once"),
        "report": ("report", folder, "-o", trial / "page.html", "--unfinished"),
    }
    out = rng.choice([folder, trial / "out"])
    words = reading.get(command, (command, spec, "--out", out, "--resume", "--workers", 0))
    outcome = bench.run(*words)
    (bench.home / f"{module}.py").unlink()
    found = broken(outcome, (0, 2) if command in reading else (2,))
    return [*found, "a stranger's module was imported"] if trace.exists() else found
