"""The docs site: every public name has a docstring and a place in the reference, every page one in the navigation."""

import ast
import importlib
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import fcoptim

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGES = ["fcoptim", "fcoptim.cast", "fcoptim.checkpoint", "fcoptim.distributed", "fcoptim.muon", "fcoptim.sync"]
CLASSES = ["fcoptim.lag", "fcoptim.integrations.transformers", "fcoptim.integrations.trl"]
DATA = {"fcoptim.cast.DEFAULT", "fcoptim.cast.RULES", "fcoptim.cast.Rounding"}  # constants and a type have no docstring


def public_names() -> list[str]:
    """What ``__all__`` of the packages names, and the public classes of modules that have none or say less."""
    names = {f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__}
    for module in CLASSES:
        members = vars(importlib.import_module(module)).items()
        names |= {
            f"{module}.{name}"
            for name, value in members
            if inspect.isclass(value) and value.__module__ == module and not name.startswith("_")
        }
    return sorted(names - DATA)


def find(path: str) -> object:
    """The object at a dotted path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return importlib.import_module(path)


def entries() -> dict[str, Path]:
    """The paths that the reference pages ask mkdocstrings for, and the page of each."""
    found = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE):
            assert path not in found, f"{path} is on {found[path].name} and {page.name}"
            found[path] = page
    return found


@pytest.mark.parametrize("path", public_names())
def test_public_names_are_documented(path):
    """A public name has a docstring of its own and is in the reference, under this path or another."""
    value = find(path)
    if isinstance(value, ModuleType):
        assert any(entry.startswith(f"{path}.") for entry in entries()), f"{path} has no reference page"
        return
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own and len(own.split()) > 2, f"{path} has no docstring"
    assert any(find(entry) is value for entry in entries()), f"{path} is on no page of docs/reference"


@pytest.mark.parametrize("path", sorted(entries()))
def test_reference_entries_exist(path):
    value = find(path)
    assert inspect.isclass(value) or callable(value), path
    if inspect.isclass(value):
        public = [n for n, m in vars(value).items() if not n.startswith("_") and inspect.isfunction(m)]
        assert [n for n in public if not inspect.getdoc(getattr(value, n))] == [], "methods without a docstring"


def test_data_is_named():
    """What mkdocstrings can't show is named on its page."""
    text = (DOCS / "reference" / "cast.md").read_text()
    assert "RULES" in text
    for rule in fcoptim.cast.RULES:
        assert f'"{rule}"' in text


def config() -> dict:
    return yaml.safe_load((ROOT / ".mkdocs.yml").read_text())


def nav_pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in nav_pages(part)]


def test_every_page_is_in_the_navigation():
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    listed = nav_pages(config()["nav"])
    assert sorted(listed) == sorted(pages)


def test_every_command_is_on_its_page():
    from typer.main import get_command

    from fcoptim.cli import app

    text = (DOCS / "commands.md").read_text()
    for name, command in get_command(app).commands.items():
        for words in [f"fcoptim {name}"] if name != "bench" else [f"fcoptim bench {sub}" for sub in command.commands]:
            assert f"| `{words}` |" in text, words


def test_links_of_the_reference_lead_somewhere():
    for page in (DOCS / "reference").glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


def test_links_by_reference_are_defined():
    """Links of the form ``[text][key]``, which mkdocs leaves as text if there is no such key."""
    for page in DOCS.glob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        used = set(re.findall(r"\]\[([a-z0-9-]+)\]", text))
        assert used == set(re.findall(r"^\[([a-z0-9-]+)\]: \S+$", text, re.MULTILINE)), page.name


def literals() -> list[str]:
    """Every string literal in the package, with ``…`` where an f-string has a value."""
    found = []
    for path in (ROOT / "fcoptim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_troubleshooting_quotes_what_the_code_says():
    """Each message in the first column of its tables is in the source; ``…`` stands for what varies."""
    text = (DOCS / "troubleshooting.md").read_text()
    cells = [row.split(" | ")[0] for row in re.findall(r"^\| (`.*)$", text, re.MULTILINE)]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 60
    said = literals()
    gone = [m for m in messages if not any(re.search(".*".join(map(re.escape, m.split("…"))), s) for s in said)]
    assert not gone, gone


def test_the_figure_shows_what_the_code_computes():
    """docs/rounding.svg is what its script draws from casts done now."""
    drawn = runpy.run_path(str(DOCS / "tools" / "rounding_figure.py"))["figure"]()
    assert drawn == (DOCS / "rounding.svg").read_text(), "run python docs/tools/rounding_figure.py"


def test_the_site_builds_strictly(tmp_path):
    """As in CI; without the network, so nothing in a page may be loaded from elsewhere."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-f", str(ROOT / ".mkdocs.yml")]
    built = subprocess.run([*command, "-d", str(tmp_path / "site")], capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]*?(?:src|href)="?(https?:)?//', page.read_text())
        assert not loaded, page.name
