"""A release is consistent: versions, papers and the public CI."""

import re
from datetime import date

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
    version, day = next(heading for heading in headings if heading[0] != "[Unreleased]")
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
