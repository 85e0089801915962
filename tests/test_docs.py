"""README and docs: every Python snippet runs, every command shown exists, every public name is documented."""

import re
import shlex
from pathlib import Path

import pytest

import fcoptim

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "python")], ids=relative)
def test_python_snippets_run(page, tmp_path, monkeypatch):
    """The snippets of one page run in order, in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "snippet"}
    for number, source in enumerate(snippets(page, "python")):
        exec(compile(source, f"{relative(page)}[{number}]", "exec"), namespace)


def commands() -> list[str]:
    lines = [line for page in PAGES for body in snippets(page, "bash", "console", "sh") for line in body.splitlines()]
    parts = [part.strip() for line in lines for part in re.split(r"&&|\|", line.split("#")[0].removeprefix("$ "))]
    return sorted({part for part in parts if part.startswith("fcoptim ")})


@pytest.mark.parametrize("command", commands())
def test_commands_exist(command):
    """Each ``fcoptim`` command in the docs names a command that exists and only options that it has."""
    from typer.testing import CliRunner

    from fcoptim.cli import app

    words = shlex.split(command)[1:]
    path = []
    for word in words:
        if not re.fullmatch(r"[a-z]+", word):
            break
        path.append(word)
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    for option in (word.split("=")[0] for word in words if word.startswith("--")):
        assert option in result.output, f"{command}: no {option}"


def test_public_names_are_documented():
    text = "\n".join(page.read_text() for page in PAGES)
    for name in fcoptim.__all__:
        assert getattr(fcoptim, name).__doc__, f"{name} has no docstring"
        assert re.search(rf"\b{name}\b", text), f"{name} is on no page"


def test_links_lead_somewhere():
    """Relative links and pictures of every page point to files that exist."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{relative(page)}: {target}"
