"""Python examples of README and docs run, and pages have their required contents."""

import ast
import re
import runpy
import shlex
import sys
from dataclasses import fields, replace
from timeit import timeit
from types import ModuleType

import polars as pl
import pytest
import torch
from places import ROOT
from report_records import committed

import gradfree
import gradfree.extending
from gradfree.benchmarks.records.records import attempt
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.sweeps.sweep import TASKS
from gradfree.benchmarks.tasks import catalogue
from gradfree.benchmarks.timing.side_by_side import interleaved
from gradfree.chains import kinds
from gradfree.cli import main
from gradfree.depth import ports
from gradfree.layers import roles
from gradfree.registry import engine_class

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Undo registrations of chain kinds, layers and ports after each test."""
    monkeypatch.setattr(kinds, "_registered", {})
    monkeypatch.setattr(ports, "_ports", dict(ports._ports))
    monkeypatch.setattr(roles, "_KNOWN", dict(roles._KNOWN))


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def run_alone(code, folder, filed):
    """Run an example in a new namespace; if it begins with a file name, append it to that file."""
    if named := re.match(r"# (\w+)\.py\n", code):
        code = filed[named[1]] = filed.get(named[1], "") + code
        (folder / f"{named[1]}.py").write_text(code, encoding="utf-8")
        sys.modules.pop(named[1], None)
    package = ModuleType("example")
    sys.modules[package.__name__] = package
    exec(compile(code, "example", "exec"), vars(package))


def strings(node):
    """Yield the strings in a tree of code, with a star for each value that a string is formatted with."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def test_the_code_has_each_message_that_troubleshooting_quotes():
    page = (ROOT / "docs/start/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| ", page, flags=re.MULTILINE)
    quoted = {quote for row in rows for quote in re.findall("`(.*?)`", row)}
    quoted -= {"CellLayer", "Tensor.item() or .tolist()"}  # A class, and an error of torch.
    files = [file for room in ("gradfree", "algorithms", "benchmarks") for file in (ROOT / room).rglob("*.py")]
    known = "\n".join(string for file in files for string in strings(ast.parse(file.read_text(encoding="utf-8"))))
    assert {quote for quote in quoted if quote not in known} == set()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_each_example_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in re.findall(r"results/(\w+)/report.parquet", "".join(examples(page))):
        (tmp_path / "results" / name).mkdir(parents=True, exist_ok=True)
        # The result of ``make demo``.
        committed("quick").facts.write_parquet(f"results/{name}/report.parquet")
    torch.set_default_dtype(torch.float32)
    filed = {}
    try:
        for code in examples(page):
            run_alone(code, tmp_path, filed)
    finally:
        for name in ("example", *filed):
            sys.modules.pop(name, None)


def files_of(page):
    """Return the names of the modules that a page shows as files."""
    return {named[1] for code in examples(page) if (named := re.match(r"# (\w+)\.py\n", code))}


def commands_on_files():
    """Yield each page with a command of `gradfree bench` or `advise` on a file that it shows; `fit` has other tests."""
    for page in PAGES:
        named, text = "|".join(files_of(page)), page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines() if named and language != "python" else ():
                if re.match(rf"gradfree (bench|advise) .*\b({named})\b", line):
                    yield pytest.param(page, shlex.split(line, comments=True), id=f"{page.stem}: {line[:60]}")


def in_this_process(cases):
    return (attempt(case) for case in cases)


@pytest.fixture
def short(monkeypatch):
    """Make training runs two steps long, in this process, timings two rounds without memory, advice short."""
    for name, task in TASKS.items():
        monkeypatch.setitem(TASKS, name, replace(task, steps=2))
    monkeypatch.setattr(catalogue, "DIGITS", replace(catalogue.DIGITS, steps=2))
    monkeypatch.setattr("gradfree.benchmarks.tasks.loaded._STEPS", 2)
    monkeypatch.setattr("gradfree.benchmarks.bench.session.executor", lambda *_: in_this_process)
    monkeypatch.setattr("gradfree.benchmarks.advice.advising.compiled_cost", lambda *_: "not compiled")
    monkeypatch.setattr("gradfree.benchmarks.timing.timed.interleaved", lambda turns, *_: interleaved(turns, 2, 1))
    monkeypatch.setattr("gradfree.benchmarks.timing.timed.mean_seconds", lambda step, _: timeit(step, number=1))
    monkeypatch.setattr("gradfree.benchmarks.timing.timed.process_peak", lambda: None)
    monkeypatch.setattr("gradfree.benchmarks.timing.side_by_side.peak_memory", lambda *_: 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "words"), list(commands_on_files()))
def test_each_command_on_a_file_of_a_page_runs(page, words, short, tmp_path, monkeypatch):
    """As pasted: the files are those of the page, and nothing fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    torch.set_default_dtype(torch.float32)
    for code in examples(page):
        if named := re.match(r"# (\w+)\.py\n", code):
            with (tmp_path / f"{named[1]}.py").open("a", encoding="utf-8") as file:
                file.write(code)
    _, *args = words
    shorter = ["--budget", "4s"] if args[0] == "advise" else ["--seeds", "1"]
    try:
        main([*args, *shorter])
    finally:
        for name in files_of(page):
            sys.modules.pop(name, None)


def test_every_page_of_an_engine_is_of_one_that_exists():
    pages = {page.stem for page in (ROOT / "docs" / "engines").glob("*.md")} - {"index"}
    assert pages <= set(gradfree.list_engines()), "remove the page, or add the entry point in pyproject.toml"


@pytest.mark.parametrize("name", gradfree.list_engines())
def test_every_engine_has_a_page_with_its_options_and_a_row_of_the_index(name):
    page = ROOT / "docs" / "engines" / f"{name}.md"
    assert page.exists(), f"write {page.relative_to(ROOT)}, after the page of another engine"
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    missing = [row for row in ("formula", "exact when", "options", "wins", "loses") if f"| {row} | " not in text]
    assert not missing, f"the table of {page.name} lacks these rows"
    missing = [option.name for option in fields(engine_class(name)) if f"`{option.name}`" not in text]
    assert not missing, f"{page.name} does not name these options"
    index = page.with_name("index.md").read_text(encoding="utf-8")
    assert f"[`{name}`]({name}.md)" in index, "add a row to one of the tables of docs/engines/index.md"


def test_the_files_to_change_exist_and_define_what_the_table_says():
    page = (ROOT / "docs/develop/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| .* \| (.*) \| (.*) \|$", page.partition("## Where to change what")[2].partition("\n## ")[0], re.M
    )
    linked = [(match[1], named) for place, named in rows if (match := re.match(r"\[`.*?`\]\((.*?)\)", place))]
    assert len(linked) > 20
    for link, named in linked:
        file = (ROOT / "docs/develop" / link).resolve()
        assert file.exists(), f"{link} of docs/develop/architecture.md has moved"
        text = file.read_text(encoding="utf-8")
        names = re.findall(r"`(\w+)`", named)
        assert not [name for name in names if not re.search(rf"^\s*(class |def )?{name}\b", text, re.M)], link


def test_the_api_page_has_all_public_names():
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    public = [f"gradfree.{name}" for name in gradfree.__all__]
    public += [f"gradfree.extending.{name}" for name in gradfree.extending.__all__]
    public += [f"gradfree.lightning.{name}" for name in gradfree.lightning.__all__]
    missing = [name for name in public if f"| `{name}` |" not in page]
    assert not missing, "add a row for each to docs/reference/api.md"


def test_pages_import_only_public_modules():
    """Other packages import what pages show: modules whose names stay, and those of the benchmarks."""
    public = r"gradfree(\.(extending|lightning|huggingface|testing|algorithms|models|benchmarks[\w.]*))?"
    shown = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    taken = [match[1] for line in shown if (match := re.match(r"\s*(?:from|import) (gradfree[\w.]*)", line))]
    assert len(taken) > 50
    assert not [name for name in taken if not re.fullmatch(public, name)]


def test_the_pictures_equal_those_of_the_script():
    drawings = runpy.run_path(str(ROOT / "docs" / "images" / "draw.py"))["DRAWINGS"]
    for name, drawing in drawings.items():
        same = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8") == drawing.svg()
        assert same, f"{name}: python docs/images/draw.py"


def test_the_example_chain_kind_has_exact_gradients():
    """Its chain is found and exact at k = L - 1; without the kind there is no chain."""
    import gradfree
    from gradfree.testing.cases.models import assert_equal_gradients, gradients

    names = {"__name__": "example"}
    model_code, kind_code, *_ = examples(ROOT / "docs/develop/adding-a-chain-kind.md")
    exec(model_code, names)
    model, x = names["Encoder"](6, depth=5), torch.randn(4, 8)
    expected = gradients(model, lambda: model(x))
    assert not gradfree.create_engine("highway_bp").validate(model).ok
    exec(kind_code, names)
    with gradfree.create_engine("highway_bp", iterations=4).attach(model) as handle:
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
    assert list(handle.chains[""].blocks) == ["b1", "b2", "b3", "b4", "b5"]
    with gradfree.create_engine("truncated").attach(model), pytest.raises(AssertionError):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_example_suite_makes_a_report_with_its_section(short, tmp_path, monkeypatch, capfd):
    """The page's suite runs by its name, and the report has its section; other functions are refused."""
    (tmp_path / "my_suite.py").write_text("\n".join(examples(ROOT / "docs/develop/benchmarks.md")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        main(["bench", "run", "--suite", "my_suite:suite", "--seeds", "1"])
        with pytest.raises(SystemExit):
            main(["bench", "report", "--suite", "my_suite:halves"])
    finally:
        sys.modules.pop("my_suite", None)
    assert "my_suite:halves returns no suite" in capfd.readouterr().err
    folder = tmp_path / "results" / "my_suite-suite"
    facts = pl.read_parquet(folder / "report.parquet")
    title = "first steps: halves, device: cpu, threads: 1"
    ratios = facts.filter(pl.col("section") == title).filter(metric="step time", unit="× backprop")
    assert ratios["row"].to_list() == ["backprop", "highway_bp k=0", "highway_bp k=1", "highway_bp k=2"]
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert re.search(r"- highway_bp k=1: (no difference|[\d.]+× (slower|faster))", page.partition(title)[2])
    # The example stays short.
    assert len(examples(ROOT / "docs/develop/benchmarks.md")[1].strip().splitlines()) <= 40


def test_prose_check_finds_odd_words_and_dead_links(tmp_path):
    prose = runpy.run_path(str(ROOT / ".ci" / "prose.py"))
    page, odd = tmp_path / "page.md", "told"
    page.write_text(f"# One\n\nIt is {odd} to `all`. It works:\n\n- [here](#two)\n- [there](none.md), [good](#one).\n")
    text = page.read_text()
    assert prose["sentences"](text) == ["One.", f"It is {odd} to code.", "It works:", "here", "there, good."]
    assert len(list(prose["odd_words"](prose["prose"](text)))) == 1
    assert prose["dead_links"](page, text) == ["#two", "none.md"]


def test_the_results_page_lists_every_suite():
    page = (ROOT / "docs/results/index.md").read_text(encoding="utf-8")
    assert not [name for name in SUITES if f"`{name}`" not in page], "add a row for each to docs/results/index.md"


def test_the_gallery_shows_each_short_example_with_its_picture():
    folder = ROOT / "docs" / "gallery"
    page = (folder / "index.md").read_text(encoding="utf-8")
    scripts = [path for path in folder.glob("*.py") if path.stem != "drawing"]
    lengths = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in scripts}
    assert len(lengths) >= 8
    assert {name: length for name, length in lengths.items() if length > 60} == {}
    shown = {name for name in lengths if f"]({name}.py)" in page and f"]({name}.svg)" in page}
    assert shown == {path.stem for path in folder.glob("*.svg")} == set(lengths)
