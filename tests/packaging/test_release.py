"""A release is consistent: versions, papers, the public CI, and the distribution's description."""

import re
import subprocess
import sys
from datetime import date

import pytest
import yaml
from places import ROOT

import gradfree
from gradfree.checkout import tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands(job):
    return [step["run"] for step in CI["jobs"][job]["steps"] if "run" in step]


def test_versions_agree_everywhere():
    assert gradfree.__version__ == PROJECT["version"] == CITATION["version"]
    headings = re.findall(r"^## (\S+)(?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    version, day = next(heading for heading in headings if heading[0] != "Unreleased")
    assert version == f"[{PROJECT['version']}]"
    assert date.fromisoformat(day) == CITATION["date-released"]


def test_papers_of_engines_are_cited_with_existing_engines():
    pages = [ROOT / "README.md", *(ROOT / "docs" / "engines").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    papers = {reference["url"]: reference for reference in CITATION["references"]}
    assert set(re.findall(r"https://arxiv\.org/abs/[\d.]+", text)) <= papers.keys()
    for paper in papers.values():
        assert paper["title"]
        assert all(author["family-names"] and author["given-names"] for author in paper["authors"])
        assert set(paper["notes"].split(", ")) <= set(gradfree.list_engines())


def test_the_public_ci_runs_all_targets_of_the_local_ci():
    targets = set(re.findall(r"^([\w-]+):.*##", MAKEFILE, re.MULTILINE))
    made = [command.split()[1] for command in commands("checks")]
    assert set(made) <= targets
    here = re.findall(r"^ *make ([\w-]+)(?: .*)?$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert [target for target in made if target in here] == here


def test_the_public_ci_tries_all_systems_and_pythons_and_the_oldest_packages():
    matrix = CI["jobs"]["newest"]["strategy"]["matrix"]
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert matrix["python"] == [oldest, "3.11", "3.12", "3.13"]
    said = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lightning"]]
    least = dict(re.match(r"([\w-]+)>=([\d.]+)", package).groups() for package in said)
    tried = dict(re.findall(r"(\w+)==([\d.]+)", commands("oldest")[-2]))
    assert tried == {name: least[name] for name in ("torch", "lightning", "torchmetrics")}


@pytest.mark.slow
def test_the_distribution_passes_twine(tmp_path):
    pytest.importorskip("twine")
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    files = sorted(map(str, tmp_path.iterdir()))
    assert [name.rpartition(".")[2] for name in files] == ["whl", "gz"] or len(files) == 2
    done = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
