"""The README says what is there: its generated blocks are current, its command table is the command line."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from tessellm.commands.app import app
from tessellm.commands.plugins import LAB, plugin_names
from tessellm.recipe import Recipe, read_recipe
from test_imports import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(str(page.relative_to(ROOT)) for place in ("docs", "lab/docs") for page in (ROOT / place).glob("*.md"))


def test_generated_blocks_are_current():
    check = subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout


def test_the_command_table_is_the_command_line():
    shown = set(re.findall(r"^\| `tessellm (\w+)", README, re.MULTILINE))
    assert shown == {command.callback.__name__ for command in app.registered_commands} | set(LAB)


def test_the_commands_are_listed_in_whole_sentences(cli):
    listed = cli("--help").out.split("Commands:")[1]
    assert len(listed.strip().splitlines()) == len(app.registered_commands) + len(plugin_names())
    assert "..." not in listed


def test_every_command_shows_an_example(cli):
    for command in app.registered_commands:
        assert "Example" in cli(command.callback.__name__, "--help").out, command


def test_the_results_are_few():
    (block,) = re.findall(r"<!-- results -->\n(.*?)<!-- end results -->", README, re.DOTALL)
    assert len(re.findall(r"^\|", block, re.MULTILINE)) <= 2 + 10  # the heading, and ten rows


def test_the_architecture_page_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("[!.]*/**/*.py")}
    for name in re.findall(r"`([\w/-]+\.py)`", page):
        assert any(f"/{file}".endswith(f"/{name}") for file in files), name
    assert " ".join(LIBRARY) in " ".join(page.split()), "the order of the folders is another"


def test_contributing_names_files_that_are_there():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md))`", page):
        if "NAME" not in name and "FORMAT" not in name:
            assert any((ROOT / folder / name).exists() for folder in ("", "src/tessellm", "lab/src/tessellm_lab")), name


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "README.md"])
def test_links_between_pages_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "README.md"])
def test_commands_shown_are_commands(page):
    """Every `$ tessellm …` line parses: the command exists, and it takes what it is given."""
    group = typer.main.get_command(app)
    text = (ROOT / page).read_text(encoding="utf-8")
    for line in re.findall(r"^\$ tessellm ((?!reproduce|probe).*)$", text, re.MULTILINE):
        name, *given = shlex.split(line, comments=True)
        assert group.get_command(None, name).make_context(name, given), line


def test_the_recipe_shown_is_a_recipe():
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert set(Recipe.model_validate(yaml.safe_load(block)).experts) == {"math", "coding"}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_ready_recipes_are_valid(path):
    assert read_recipe(path).experts


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for folder, start in (("docs", ""), ("lab/docs", "lab/")):
        for page in (ROOT / folder).glob("*.md"):
            assert f" {start}{page.name}" in navigation, page.name
