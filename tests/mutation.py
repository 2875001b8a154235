"""Mutation testing: small wrong changes, one at a time, each of which some test must notice.

    python -m tests.mutation --sample 200 --seed 0          # a seeded sample over all guarded modules
    python -m tests.mutation algorithms/rules server/rounds        # every mutant of two modules

The changes are cosmic-ray's (a sign, a comparison, a number, a boolean, a loop left out), with one of our own: an
operand left out, so that a weight or a factor goes missing. cosmic-ray itself starts Python anew for every mutant; here
torch is imported once and every mutant is tried in a fork, on a copy of the sources, with the tests that guard its
module. A mutant that survives is either a hole in the tests or no mistake at all; those of the second kind are listed,
with the reason, in ``mutation-equivalents.toml``, and not reported again.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import importlib
import json
import os
import py_compile
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENTS = Path(__file__).with_name("mutation-equivalents.toml")

# The tests that guard each module, the quickest first.
ROUNDS = ("combinations", "sums", "algorithms", "reference")
TOGETHER = ("products", "fast_limits", "together", "lockstep", "fast", "reference")
OPTIM = ("bounds", "optim_loops", "optim", "weights", "optim_derived", "optim_ranks", "distributed", "trainers")
TASKS = ("bounds", "partition", "holdout", "groups", "tasks", "streams", "constants", "evaluation")
THEORY = ("checks", "theory", "probe")
GUARDS: dict[str, tuple[str, ...]] = {
    "algorithms/__init__": ("combinations", "algorithms", "constants", "bounds", "reference"),
    "algorithms/alignment": ("alignment", "constants", "combinations", "reference"),
    "algorithms/auto": ("alignment", "constants"),
    "algorithms/plan": (*ROUNDS, "alignment"),
    "algorithms/rules": ("server", "constants", "bounds", "own_algorithm", "reference"),
    "algorithms/schedule": ("schedule", "shares", "bounds", "constants", "algorithms", "optim_loops"),
    "algorithms/view": (*ROUNDS, "alignment"),
    "reproduce/verdicts": ("verdicts", "reproduce"),
    "client/__init__": ("constants", "bounds", "local", "local_optimizers", "reference"),
    "client/exchange": (*ROUNDS, "streams", "measuring", "evaluation", "metrics", "resume_bits"),
    "client/step": ("algorithms", "local_optimizers", "reference", "fast_limits", "decay"),
    "client/trainer": (
        "algorithms",
        "local",
        "local_optimizers",
        "evaluation",
        "streams",
        "measuring",
        "reference",
        "fast_limits",
    ),
    "fast/__init__": ("together", "lockstep", "fast", "evaluation", "reference", "resume_bits", "streams"),
    "fast/batches": TOGETHER,
    "fast/cohort": TOGETHER,
    "fast/eligible": ("together", "fast_limits", "lockstep", "same_function"),
    "fast/linear": ("fast_limits", "fast", "lockstep", "same_function", "reference"),
    "fast/lockstep": ("fast_limits", "lockstep", "reference"),
    "fast/spectrum": ("spectrum",),
    "fast/stacks": ("same_function", "fast"),
    "optim/closures": OPTIM,
    "optim/gradients": OPTIM,
    "optim/pending": OPTIM,
    "optim/ranks": OPTIM,
    "optim/two_pass_steps": OPTIM,
    "optim/two_passes": OPTIM,
    "optim/wrapper": OPTIM,
    "seeding": ("many_clients", "streams", "local", "holdout"),
    "server/clients": ("client_results", "metrics"),
    "server/measure": (
        "bounds",
        "constants",
        "evaluation",
        "measuring",
        "weights",
        "cadence",
        "client_results",
        "engines",
        "runs",
    ),
    "server/monitor": ("callbacks",),
    "server/rounds": (
        *ROUNDS,
        "alignment",
        "own_algorithm",
        "evaluation",
        "streams",
        "measuring",
        "local",
        "together",
        "lockstep",
    ),
    "server/state": ("alignment", "resume_bits", "damage"),
    "tasks/batches": (*TASKS, "batches"),
    "tasks/divide": TASKS,
    "tasks/encode": ("tables",),
    "tasks/holdout": TASKS,
    "tasks/partition": TASKS,
    "theory/check": THEORY,
    "theory/claims": THEORY,
    "theory/descent": THEORY,
    "theory/probe": ("probe", "bounds", "measuring", "weights", "evaluation"),
    "theory/problems": THEORY,
    "theory/rounds": THEORY,
}

# Replacements that a tired person might write; most others of cosmic-ray's fail at once for want of a meaning.
_PAIRS = {
    "Binary": "Add_Sub Sub_Add Mul_Div Mul_Add Div_Mul FloorDiv_Div Mod_Mul Pow_Mul BitOr_BitAnd BitAnd_BitOr",
    "Comparison": "Eq_NotEq NotEq_Eq Lt_LtE Lt_Gt LtE_Lt Gt_GtE Gt_Lt GtE_Gt Is_IsNot IsNot_Is",
    "Unary": "Delete_USub Delete_Not Delete_Invert",
}
_OTHERS = (
    "NumberReplacer ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd "
    "ZeroIterationForLoop ReplaceBreakWithContinue ReplaceContinueWithBreak"
)
CORE = [f"core/Replace{kind}Operator_{pair}" for kind, pairs in _PAIRS.items() for pair in pairs.split()]
CORE += [f"core/{name}" for name in _OTHERS.split()]


class LeaveOut(Operator):
    """Leaves one operand of a sum or a product out: a·b becomes b or a."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yield a place for every operand that can go; what is left must not begin with a division."""
        if node.type in ("term", "arith_expr"):
            for place, operand in enumerate(node.children[::2]):
                if place or node.children[1].value in "*+":
                    yield operand.start_pos, operand.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Return the node without the operand and the operator beside it."""
        places = [p for p in range(0, len(node.children), 2) if p or node.children[1].value in "*+"]
        place = places[index]
        gone = {place, place - 1 if place else 1}
        left = [child for at, child in enumerate(node.children) if at not in gone]
        left[0].get_first_leaf().prefix = node.get_first_leaf().prefix
        return left[0] if len(left) == 1 else parso.python.tree.PythonNode(node.type, left)

    @classmethod
    def examples(cls) -> tuple[()]:
        """Part of cosmic-ray's interface."""
        return ()


@dataclass(frozen=True)
class Mutant:
    """One wrong change of one module."""

    module: str
    operator: str
    occurrence: int
    before: str
    """The changed lines, stripped, as they are."""
    after: str

    @property
    def name(self) -> str:
        """What it is called in results and in the list of equivalents: it survives changes elsewhere in the file."""
        return f"{self.module}: {self.before}  ->  {self.after}"


def operator_of(name: str) -> Operator:
    return LeaveOut() if name == "LeaveOut" else cosmic_ray.plugins.get_operator(name)()


def _bare(source: str) -> str:
    """Return the code without what nobody runs: annotations, the ``*`` of signatures, classes' decorators."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            node.args.args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            node.args.defaults += [default for default in node.args.kw_defaults if default is not None]
            node.args.posonlyargs = node.args.kwonlyargs = node.args.kw_defaults = []
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
        elif isinstance(node, ast.ClassDef):
            node.decorator_list = []
        elif isinstance(node, ast.Call):  # zip's strict is a promise that lengths agree, not arithmetic
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
    return ast.dump(tree)


Place = tuple[str, str, int]
"""Module, operator and the how-manieth of its places there."""


def source_of(module: str) -> str:
    return (ROOT / "src/gradalign" / f"{module}.py").read_text(encoding="utf-8")


def places_of(module: str) -> list[Place]:
    """Return every place where a module can be changed."""
    nodes = list(ast_nodes(get_ast(source_of(module))))
    found: list[Place] = []
    for name in [*CORE, "LeaveOut"]:
        operator = operator_of(name)
        count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
        found += [(module, name, occurrence) for occurrence in range(count)]
    return found


def mutant_at(place: Place) -> Mutant | None:
    """Return the mutant; None when it is not valid Python or changes nothing that is run."""
    module, name, occurrence = place
    source = source_of(module)
    changed = mutate_code(source, operator_of(name), occurrence) or source
    try:
        if _bare(changed) == _bare(source):
            return None
    except SyntaxError:
        return None
    pairs = [(a, b) for a, b in zip(source.splitlines(), changed.splitlines(), strict=False) if a != b]
    before, after = (
        " / ".join(re.sub(r"\s+", " ", part.strip()) for part in side) for side in zip(*pairs, strict=True)
    )
    return Mutant(module, name, occurrence, before, after)


def chosen_from(modules: list[str], size: int | None, seed: int) -> Iterator[Mutant]:
    """Yield all mutants, or a seeded sample: every module in turn, so that large ones do not crowd out the others."""
    draw = random.Random(seed)
    queues = {module: places_of(module) for module in modules}
    for queue in queues.values():
        draw.shuffle(queue)
    found: set[str] = set()
    while any(queues.values()):
        for queue in queues.values():
            while queue and (size is None or len(found) < size):
                mutant = mutant_at(queue.pop())
                if mutant is not None and mutant.name not in found:
                    found.add(mutant.name)
                    yield mutant
                    break
            else:
                queue.clear()


class Bench:
    """A copy of the sources that a mutant is written into, and the forks that test it."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src", folder / "src", ignore=ignored, symlinks=True)
        # Valid by content, not by date: a mutant is compiled anew, everything else is not.
        hashed = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "src", quiet=1, invalidation_mode=hashed)

    def tests_of(self, module: str) -> list[str]:
        named = [ROOT / "tests" / f"test_{name}.py" for name in dict.fromkeys(GUARDS[module])]
        return [str(path) for path in named if path.exists()]

    def try_out(self, mutant: Mutant) -> tuple[str, str]:
        """Return killed, survived or timeout, and the test that noticed."""
        path = self.folder / "src/gradalign" / f"{mutant.module}.py"
        source = path.read_text(encoding="utf-8")
        changed = mutate_code(source, operator_of(mutant.operator), mutant.occurrence)
        try:
            path.write_text(changed or source, encoding="utf-8")
            code = self.fork(self.tests_of(mutant.module))
        finally:
            path.write_text(source, encoding="utf-8")
        failed = re.findall(
            r"^(?:FAILED|ERROR) (\S+)", (self.folder / "log.txt").read_text(errors="replace"), re.MULTILINE
        )
        return {0: "survived", None: "timeout"}.get(code, "killed"), failed[0] if failed else ""

    def require_passing(self, modules: set[str]) -> None:
        """Raise unless the tests pass on the code as it is: else every mutant would be called killed."""
        tests = sorted({test for module in modules for test in self.tests_of(module)})
        if self.fork(tests, patience=20) != 0:
            raise SystemExit((self.folder / "log.txt").read_text(errors="replace")[-2000:])

    def fork(self, tests: list[str], patience: float = 1.0) -> int | None:
        """Run the tests in a child of its own group; return its exit code, None when it took too long."""
        child = os.fork()
        if not child:
            self._be_tested(tests)
        end, code = time.monotonic() + patience * self.limit, None
        try:
            while code is None and time.monotonic() < end:
                time.sleep(0.05)
                done, status = os.waitpid(child, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # also what a dead child has left behind
            if code is None:
                os.waitpid(child, 0)
        return code

    def _be_tested(self, tests: list[str]) -> None:
        import pytest
        import torch

        code = 70
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            log = os.open(self.folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            sys.path.insert(0, str(self.folder / "src"))
            os.environ["PYTHONPATH"] = str(self.folder / "src")
            os.environ["PYTHONDONTWRITEBYTECODE"] = os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
            sys.dont_write_bytecode = True
            os.chdir(ROOT)
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests]))
        finally:
            os._exit(code)


def is_equivalent(mutant: Mutant, listed: list[dict[str, str]]) -> bool:
    """Return whether a mutant is listed: by its line, for any change of it, or by line and change."""
    return any(
        entry["module"] == mutant.module
        and entry["line"] == mutant.before
        and entry.get("change", mutant.after) == mutant.after
        for entry in listed
    )


def equivalents() -> list[dict[str, str]]:
    """Return the list of changes that are no mistakes."""
    found: list[dict[str, str]] = tomllib.loads(EQUIVALENTS.read_text(encoding="utf-8"))["equivalent"]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Try mutants and print those that survive; exit code 1 when more than 3 % do."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"one of {', '.join(GUARDS)}; all by default")
    parser.add_argument("--sample", type=int, help="try this many, every module in turn; all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one mutant; longer is killed")
    parser.add_argument("--seconds", type=float, help="stop after about this long; go on with the same --results")
    parser.add_argument(
        "--results", type=Path, help="a file of results, one JSON object a line; known ones are skipped"
    )
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that forks and files are cleared away
    unknown = set(given.modules) - set(GUARDS)
    if unknown:
        parser.error(f"no module {sorted(unknown)[0]}; choose from {', '.join(GUARDS)}")
    listed = equivalents()
    chosen = list(chosen_from(given.modules or list(GUARDS), given.sample, given.seed))
    tried = [mutant for mutant in chosen if not is_equivalent(mutant, listed)]
    print(f"{len(chosen)} mutants, {len(chosen) - len(tried)} of them listed as equivalent")
    results = _known(given.results)
    _import_the_heavy()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        bench = Bench(Path(folder), given.timeout)
        if "unchanged" not in results:
            print("the tests on the unchanged code", flush=True)
            bench.require_passing({mutant.module for mutant in tried})
            _note(given.results, {"name": "unchanged", "outcome": "passed"})
        for mutant in tried:
            if mutant.name in results:
                continue
            if given.seconds and time.monotonic() - began > given.seconds:
                break
            start = time.monotonic()
            outcome, test = bench.try_out(mutant)
            results[mutant.name] = outcome
            print(f"{outcome:9} {time.monotonic() - start:6.1f} s  {mutant.name}", flush=True)
            _note(given.results, {"name": mutant.name, "outcome": outcome, "test": test})
    return _conclude([mutant.name for mutant in tried], results)


def _note(path: Path | None, entry: dict[str, str]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _known(path: Path | None) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    return {entry["name"]: entry["outcome"] for entry in map(json.loads, lines)}


def _import_the_heavy() -> None:
    """Import once what every fork needs; not gradalign, of which every fork takes the changed copy."""
    for name in (
        "hypothesis",
        "matplotlib.figure",
        "pydantic",
        "pytest",
        "sklearn.datasets",
        "torch.nn.parallel",
        "typer.testing",
    ):
        importlib.import_module(name)
    if any(name.partition(".")[0] == "gradalign" for name in sys.modules):
        raise RuntimeError("gradalign was imported before the forks")


def _conclude(names: list[str], results: dict[str, str]) -> int:
    outcomes = [results.get(name, "not tried") for name in names]
    counts = Counter(outcomes)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    for name, outcome in zip(names, outcomes, strict=True):
        if outcome == "survived":
            print(f"  survived: {name}")
    done = len(outcomes) - counts["not tried"]
    return int(counts["survived"] > 0.03 * done)


if __name__ == "__main__":
    raise SystemExit(main())
