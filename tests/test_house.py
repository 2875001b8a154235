"""The plan of the house, held: how large it may grow, and that nothing stands twice."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import gradalign as ga

SOURCE = Path(ga.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
MOST_MODULES, MOST_LINES, LONGEST = 148, 27_610, 300
PASSAGE = 6


def significant_lines(path: Path) -> list[tuple[int, str]]:
    """Return a module's lines with their numbers, without blank ones and imports: those may be alike."""
    text = path.read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    left_out = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return [(number, line.strip()) for number, line in lines if line.strip() and number not in left_out]


def test_the_house_stays_small():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert len(MODULES) <= MOST_MODULES
    assert sum(lengths.values()) <= MOST_LINES
    assert not {str(path.relative_to(SOURCE)): length for path, length in lengths.items() if length > LONGEST}


def test_no_passage_of_six_lines_stands_twice():
    places = defaultdict(list)
    for path in MODULES:
        lines = significant_lines(path)
        for start in range(len(lines) - PASSAGE + 1):
            passage = tuple(text for _, text in lines[start : start + PASSAGE])
            places[passage].append(f"{path.relative_to(SOURCE)}:{lines[start][0]}")
    assert not [where for where in places.values() if len(where) > 1]


def test_every_name_in_the_picture_of_a_round_exists():
    page = (Path(__file__).parent.parent / "docs/architecture.md").read_text(encoding="utf-8")
    picture = page.split("```mermaid")[1].split("```")[0]
    names = re.findall(r'<br/>([\w.]+)"\]', picture)
    assert len(names) == 11
    for name in names:
        assert find(f"gradalign.{name}") is not None


def find(name: str) -> Any:
    """Return what a dotted name stands for: a module, or something in one."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        outer, _, inner = name.rpartition(".")
        return getattr(find(outer), inner)


def test_the_mutation_tester_knows_the_modules_and_the_tests_that_guard_them():
    guards = import_module("mutation").GUARDS
    assert all((SOURCE / f"{module}.py").is_file() for module in guards)
    assert all(Path(__file__).with_name(f"test_{name}.py").is_file() for names in guards.values() for name in names)
