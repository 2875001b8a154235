"""What the pages say holds: code runs, recipes are valid, commands parse, the site builds, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import flwr.clientapp
import flwr.serverapp.strategy
import pytest
import torch
import typer
import yaml

import gradalign as ga
import gradalign.flower
from gradalign.cli.app import app
from gradalign.recipes.build import build_federation
from gradalign.recipes.spec import CompareSpec, validate
from gradalign.recipes.tracking import TrackingSpec
from test_cli import call

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "examples/flower-fedga/README.md"]


def blocks(page: str, kind: str) -> list[str]:
    """Return the code blocks of a kind on a page."""
    found = re.findall(r"```(\w+)\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return [text for name, text in found if name == kind]


def commands(text: str) -> list[list[str]]:
    """Return the gradalign commands of a shell block, as words."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and line[0] == "gradalign"]


def test_the_readmes_three_doors_open(capsys):
    names: dict[str, object] = {}
    torch.manual_seed(0)  # its data and model are random
    for code in blocks("README.md", "python"):
        exec(compile(code, "README.md", "exec"), names)
    assert float(names["loss"]) < 0.5
    assert float(capsys.readouterr().out.splitlines()[0]) > 0.8
    assert isinstance(names["app"], flwr.clientapp.ClientApp)
    assert isinstance(names["strategy"], flwr.serverapp.strategy.Strategy)


def test_the_readmes_commands_follow_each_other(tmp_path, monkeypatch):
    """In a new folder with nothing but the README's recipe, no line contradicts the one before; only shorter."""
    monkeypatch.chdir(tmp_path)
    (recipe,) = blocks("README.md", "toml")
    Path("my.toml").write_text(recipe)
    shells = blocks("README.md", "sh")
    assert [len(commands(text)) for text in shells] == [0, 0, 5]  # two set-ups, then the commands
    for words in commands(shells[-1]):
        call(*words, *(("--set", "rounds=2", "--workers", 0) if words[0] in ("run", "compare") else ()))
    assert Path("report.html").is_file()


def test_the_readme_is_for_the_first_minute():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    order = ["![", "## Two commands", "## What you get", "## Which door is yours?", "CITATION.cff"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_the_pages_python_examples_train(capsys):
    (code,) = blocks("docs/python.md", "python")
    exec(compile(code, "docs/python.md", "exec"), {})
    assert float(capsys.readouterr().out.splitlines()[0]) > 0.8


def test_the_recipes_of_the_recipes_page_are_valid():
    whole, compare = blocks("docs/recipes.md", "toml")
    federation = build_federation(validate(tomllib.loads(whole), "docs/recipes.md"))
    assert federation.algorithm.label == "fedga+fedadam"
    assert CompareSpec.model_validate(tomllib.loads(compare)["compare"]).equal == CompareSpec().equal


def test_the_tracking_pages_example_and_recipe(capsys):
    (code,), (recipe,) = blocks("docs/tracking.md", "python"), blocks("docs/tracking.md", "toml")
    exec(compile(code, "docs/tracking.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("halves-fedga-seed0: ")
    assert said[-1] == "done"
    spec = TrackingSpec.model_validate(tomllib.loads(recipe))
    assert spec.tensorboard
    assert spec.wandb.tags == ["heterogeneous"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_commands_have_arguments_that_exist(page):
    """Every command is parsed, and not run: options and their values are the command line's own."""
    for text in blocks(str(page.relative_to(ROOT)), "sh"):
        for words in commands(text):
            command = typer.main.get_command(app)
            while hasattr(command, "commands") and words and not words[0].startswith("-"):
                command, words = command.commands[words[0]], words[1:]
            command.make_context("gradalign", list(words), resilient_parsing=False)


def test_the_reference_has_all_that_is_public():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    names = {f"gradalign.{name}" for name in ga.__all__ if name != "__version__"}
    names |= {f"gradalign.flower.{name}" for name in gradalign.flower.__all__ if name not in ga.__all__}
    there = re.findall(r"^::: (\S+)", page, flags=re.MULTILINE)
    others = ("gradalign.lightning.", "gradalign.accelerate.", "gradalign.transformers.")  # slow to import
    assert sorted(name for name in there if not name.startswith(others)) == sorted(names)


def test_the_citation_is_of_this_version_and_of_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == ga.__version__
    assert [cited["references"][0][key] for key in ("year", "doi")] == [2022, "10.1609/aaai.v36i6.20597"]


# The site


class Page(HTMLParser):
    """A built page: where it links to, and the names of its places."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [given[key] for key in ("href", "src") if given.get(key)]
        self.places |= {given[key] for key in ("id", "name") if given.get(key)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """Build the site from a copy; warnings are errors. Return its pages by path."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "zensical.toml", folder)
    for part in ("docs", "examples", "src"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    return {path: Page(path) for path in sorted((folder / "site").rglob("*.html"))}


def test_every_link_of_the_site_leads_somewhere(site):
    root = next(path.parent for path in site if path.name == "404.html")
    dead = []
    for path, page in site.items():
        for link in page.links:
            to = urlsplit(link)
            if to.scheme or to.netloc or path.name == "404.html":  # which has links from the server's root
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            target = target / "index.html" if target.is_dir() else target
            inside = target.is_relative_to(root) and target.is_file()
            if not inside or (to.fragment and target in site and unquote(to.fragment) not in site[target].places):
                dead.append(f"{path.relative_to(root)}: {link}")
    assert not dead


def test_every_page_is_in_the_navigation(site):
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    named = set(re.findall(r'= "([\w-]+\.md)"', text))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_repositorys_pages_lead_somewhere(page, site):
    """As a reader of the repository sees them; places on a page are those of the built one."""
    root = next(path.parent for path in site if path.name == "404.html")
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        to = urlsplit(link)
        if to.scheme:
            continue
        target = (page.parent / to.path).resolve() if to.path else page
        assert target.exists(), link
        if to.fragment and target.parent == ROOT / "docs":
            built = root / ("index.html" if target.stem == "index" else f"{target.stem}/index.html")
            assert to.fragment in site[built].places, link


def test_the_examples_of_the_page_on_results(capsys):
    page = (ROOT / "docs/results-and-metrics.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", page, flags=re.DOTALL))
    exec(compile(blocks["python"], "docs/results-and-metrics.md", "exec"), {})
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("<Result: fedavg, ")
    assert all(0.0 <= float(number) <= 1.0 for number in (said[1] + " " + said[2]).split())
    spec = validate(tomllib.loads(blocks["toml"]), "docs/results-and-metrics.md")
    assert list(build_federation(spec).task.metrics) == ["f1", "auc"]
    assert spec.measure.early_stopping.patience == 5
