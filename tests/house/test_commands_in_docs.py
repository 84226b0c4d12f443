"""Commands in code blocks of README and docs are valid: their options and make targets exist.

Python examples run completely, in test_docs.py. Commands would take hours, so only their arguments are parsed.
"""

import re
import shlex
from unittest.mock import MagicMock

import pytest
import yaml
from places import ROOT

from gradfree.benchmarks.bench import commands
from gradfree.benchmarks.fit import commands as fit_commands
from gradfree.benchmarks.sweeps.sweep import TASKS
from gradfree.cli import main

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TARGETS = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PYTHON = {"python", "{eval-rst}", "{toctree}"}


def blocks(page):
    """Return the language and the text of each code block of a page."""
    return re.findall(r"^```([\w{}-]*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def lines(program):
    """Yield the arguments of ``program`` in each line of code blocks that starts with it, or with variables and it."""
    for page in PAGES:
        for language, text in blocks(page):
            if language not in PYTHON:
                for line in text.replace("\\\n", " ").splitlines():
                    if found := re.match(rf"(?:\w+=\S+ )*{program} (.*)", line):
                        yield pytest.param(found[1], id=f"{page.name}: {found[1][:60]}")


@pytest.mark.parametrize("line", list(lines("gradfree")))
def test_commands_are_parsed(line, monkeypatch, capsys, tmp_path):
    calls = MagicMock()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text("tasks: digits\n", encoding="utf-8")
    monkeypatch.setattr(commands, "_extra", lambda *_: calls)
    monkeypatch.setattr(fit_commands, "_run", calls)
    main(shlex.split(line, comments=True))
    assert calls.mock_calls or capsys.readouterr().out


def test_the_guide_lists_the_tasks_that_exist():
    text = (ROOT / "docs/guides/command-line.md").read_text(encoding="utf-8")
    paragraph = re.search(r"^Tasks that need no data.*?\n(?=[A-Z])", text, re.DOTALL | re.MULTILINE)[0]
    assert set(re.findall(r"`([a-z][\w-]*)`", paragraph)) == set(TASKS)


@pytest.mark.parametrize("line", list(lines("make")))
def test_make_targets_exist(line):
    words = [word for word in shlex.split(line, comments=True) if "=" not in word]
    assert set(words) <= TARGETS


def test_config_files_of_sweeps_are_parsed(tmp_path, monkeypatch):
    calls = MagicMock()
    monkeypatch.setattr(commands, "_extra", lambda *_: calls)
    found = [text for page in PAGES for language, text in blocks(page) if language == "yaml" and "engines:" in text]
    assert found
    for text in found:
        assert yaml.safe_load(text)
        (tmp_path / "sweep.yaml").write_text(text, encoding="utf-8")
        main(["bench", "run", "--config", str(tmp_path / "sweep.yaml")])
    assert len(calls.run.mock_calls) == len(found)
