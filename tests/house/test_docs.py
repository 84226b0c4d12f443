"""Every Python example in the README and the docs runs as it stands."""

import re
import sys
from types import ModuleType

import pytest
import torch
from places import RESULTS, ROOT

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.suites.index import SUITES
from gradfree.chains import kinds
from gradfree.layers import roles

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Leave no kind of chains or layers to other tests."""
    monkeypatch.setattr(kinds, "_registered", {})
    monkeypatch.setattr(roles, "_KNOWN", dict(roles._KNOWN))


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def made_by_the_demo(folder):
    """Write the numbers that ``make demo`` leaves, from the committed records."""
    folder.mkdir(parents=True)
    records = RecordFile(RESULTS / "quick" / "records.jsonl").read()
    SuiteReport.of("quick", SUITES["quick"], records).facts.write_parquet(folder / "report.parquet")


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: p.name)
def test_the_examples_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made_by_the_demo(tmp_path / "results" / "quick")
    torch.set_default_dtype(torch.float32)
    package = ModuleType("my_package")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for code in examples(page):
        exec(compile(code, str(page), "exec"), vars(package))


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


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_page_of_benchmarks_tells_of_every_suite():
    from gradfree.benchmarks.suites.index import SUITES

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert not [name for name in SUITES if f"`{name}`" not in page]
