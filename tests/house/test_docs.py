"""Every Python example in the README and the docs runs as it stands."""

import re
import sys
from types import ModuleType

import polars as pl
import pytest
import torch
from places import ROOT
from report_records import committed

import gradfree
from gradfree.benchmarks.suites.index import SUITES
from gradfree.chains import kinds
from gradfree.cli import main
from gradfree.depth import ports
from gradfree.layers import roles
from gradfree.registry import engine_class

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Leave no kind of chains or layers, and no port, to other tests."""
    monkeypatch.setattr(kinds, "_registered", {})
    monkeypatch.setattr(ports, "_ports", dict(ports._ports))
    monkeypatch.setattr(roles, "_KNOWN", dict(roles._KNOWN))


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: p.name)
def test_the_examples_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "results/quick" in "".join(examples(page)):
        (tmp_path / "results" / "quick").mkdir(parents=True)
        # What ``make demo`` leaves.
        committed("quick").facts.write_parquet("results/quick/report.parquet")
    torch.set_default_dtype(torch.float32)
    package = ModuleType("my_package")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for code in examples(page):
        exec(compile(code, str(page), "exec"), vars(package))


def test_every_engine_has_a_page():
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "engines").glob("*.md")}
    assert pages.keys() == set(gradfree.list_engines())
    for name, text in pages.items():
        assert text.startswith(f"# {name}\n")
        assert f".. autoclass:: gradfree.algorithms.{engine_class(name).__name__}\n" in text
        assert all(f"| {row} | " in text for row in ("formula", "exact when", "options", "wins", "loses"))


def test_the_example_engine_is_right():
    """Damped with enough sweeps is exact, so its scan and its pull are."""
    from gradfree.testing.cases.models import assert_equal_gradients, gradients, plain_model

    names = {"__name__": "example"}
    exec(examples(ROOT / "docs" / "adding-an-engine.md")[0], names)
    model, x = plain_model(), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with names["Damped"](iterations=4).attach(model):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
    with pytest.raises(TypeError, match="its options are: damping, iterations"):
        names["Damped"](iteration=4)
    with pytest.raises(ValueError, match="iterations must be at least 0"):
        names["Damped"](iterations=-1)


def test_the_example_layer_engine_is_right():
    """With weights that are their own signs it is backpropagation."""
    from gradfree.testing.cases.models import assert_equal_gradients, gradients, layered_model

    names = {"__name__": "example"}
    for code in examples(ROOT / "docs" / "adding-an-engine.md")[:2]:
        exec(code, names)
    model, x = layered_model(), torch.randn(4, 6)
    for layer in (model.blocks[2], model.blocks[4]):
        layer.weight.data.sign_()
    expected = gradients(model, lambda: model(x))
    with names["SignSymmetry"]().attach(model):
        actual = gradients(model, lambda: model(x))
    for of_the_stem in ("stem.weight", "stem.bias"):
        del actual[of_the_stem], expected[of_the_stem]
    assert_equal_gradients(actual, expected)


def test_the_example_chain_kind_is_right():
    """Its chain is found and exact at k = L - 1; without the kind there is none."""
    import gradfree
    from gradfree.testing.cases.models import assert_equal_gradients, gradients

    names = {"__name__": "example"}
    model_code, kind_code, *_ = examples(ROOT / "docs" / "adding-a-chain-kind.md")
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


def test_the_example_port_is_right():
    """Without it the state is taken for what it is not, and refused; with it the gradients are exact."""
    import gradfree

    names = {"__name__": "example"}
    *_, code = examples(ROOT / "docs" / "how-it-works.md")
    definitions, registration = code.rsplit("\n\n", 1)
    exec(definitions, names)

    class Model(torch.nn.ModuleList):
        def forward(self, x):
            for block in self:
                _, x = block(x)
            return x

    model, batch = Model(names["MyBlock"](6) for _ in range(3)), (torch.randn(4, 6), torch.randn(4, 6))
    engine = gradfree.create_engine("highway_bp", iterations=3)
    with pytest.raises(gradfree.ChainError, match="register_port"):
        gradfree.gradient_fidelity(engine, model, torch.nn.functional.mse_loss, batch)
    exec(registration, names)
    fidelity = gradfree.gradient_fidelity(engine, model, torch.nn.functional.mse_loss, batch)
    assert fidelity.total.relative_error < 1e-5


@pytest.mark.processes
@pytest.mark.slow
def test_the_example_suite_makes_a_report_with_its_section(tmp_path, monkeypatch, capfd):
    """The page's file runs by its name, and its own section is in the report; other functions are refused."""
    (tmp_path / "my_suite.py").write_text("\n".join(examples(ROOT / "docs" / "benchmarks.md")), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        main(["bench", "run", "--suite", "my_suite:suite", "--seeds", "2", "--jobs", "2"])
        with pytest.raises(SystemExit):
            main(["bench", "report", "--suite", "my_suite:halves"])
        with pytest.raises(SystemExit):
            main(["bench", "report", "--suite", "my_suite:sweet"])
    finally:
        sys.modules.pop("my_suite", None)
    refused = capfd.readouterr().err
    assert "my_suite:halves returns no suite" in refused
    assert "no function of my_suite is called 'sweet'" in refused
    folder = tmp_path / "results" / "my_suite-suite"
    facts = pl.read_parquet(folder / "report.parquet")
    title = "first steps: halves, device: cpu, threads: 1"
    own = facts.filter(pl.col("section") == title)
    ratios = own.filter(metric="step time", unit="× backprop")
    assert ratios["row"].to_list() == ["backprop", "highway_bp k=0", "highway_bp k=1", "highway_bp k=2"]
    assert ratios["value"][0] == 1.0
    assert own.filter(metric="parameters")["value"].min() > 0
    page = (folder / "report.md").read_text(encoding="utf-8")
    assert title in page
    assert re.search(r"- highway_bp k=1: (no difference|[\d.]+× (slower|faster))", page.partition(title)[2])
    charts = re.search(r'id="charts">(.*?)</script>', (folder / "report.html").read_text(encoding="utf-8"), re.DOTALL)[
        1
    ]
    assert f'"{title}"' in charts
    # The example is as short as the page promises.
    assert len(examples(ROOT / "docs" / "benchmarks.md")[1].strip().splitlines()) <= 40


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_examples_of_the_readme_run_alone(tmp_path, monkeypatch):
    """Each as if it were the only one."""
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)

    for code in examples(ROOT / "README.md"):
        exec(compile(code, "README.md", "exec"), {"__name__": "my_package"})


def test_no_page_has_a_merge_that_nobody_finished():
    for page in PAGES:
        assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(encoding="utf-8"), re.MULTILINE), page.name


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_of_benchmarks_tells_of_every_suite():

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert not [name for name in SUITES if f"`{name}`" not in page]
