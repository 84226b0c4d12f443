"""Every registered engine passes ``gradfree.testing``, and the committed table has the results."""

import re
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from features_page import CHAINS, default_engines, markdown, shown
from pairwise import cover
from places import DOCS

import gradfree
from gradfree.engines.engine import Engine
from gradfree.testing import FEATURES, EngineConformance
from gradfree.testing.cases.cases import CASES, RECURRENT, RESIDUAL, STANDING_FOR, Specimen

PAGE = (DOCS / "reference/support.md").read_text(encoding="utf-8")
ENGINES = default_engines()
BASIC = "forward and backward pass"


def cells(title):
    """Return the page's table under ``title``, by row and engine."""
    part = PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]
    engines = re.findall(r"`(\w+)`", re.search(r"^Engines: .*$", part, re.MULTILINE)[0])
    works = "".join(re.findall(r"^With all of them: (.*)\.$", part, re.MULTILINE)).split("; ")
    rows = dict.fromkeys(filter(None, works), "") | dict(re.findall(r"^\| (.+?) \| (.*)\|$", part, re.MULTILINE))
    return {
        (row, name): "refused" if refusing.strip() == "all" or f"`{name}`" in refusing else "works"
        for row, refusing in rows.items()
        for name in engines
    }


CHAIN_CELLS = cells(CHAINS)
FEATURE_CELLS = {case.name: cells(f"On {family}") for family, case in STANDING_FOR.items()}


def assert_is_said(cell, refusal, device):
    # On another device more may work: recurrent layers that run by torch's kernel support everything.
    if device == "cpu":
        assert cell == ("works" if refusal is None else "refused")
        assert refusal is None or shown(refusal) in PAGE
    else:
        assert refusal is None or cell == "refused"


def named(cells):
    """Return cells by engine, chain and feature."""
    return {(str(engine), case.name, feature.name): (engine, case, feature) for engine, case, feature in cells}


def kind_of(engine):
    """Return a key that is equal for engines that solve a chain by the same code."""
    base = type(engine).__mro__[1]
    return type(engine) if base is Engine else base, getattr(engine, "feedback", None) == "learned"


def taking_turns(found):
    """Return one key of those that differ only in engines of one kind, with another engine for each feature."""
    alike = {}
    for key, (engine, case, feature) in found.items():
        alike.setdefault((kind_of(engine), case.name, feature.name), []).append(key)
    turns = {name: n for n, name in enumerate(FEATURES)}
    return [keys[turns[feature] % len(keys)] for (_, _, feature), keys in alike.items()]


def repeated(found):
    """Return the keys of engines that attach nothing, but the last for each feature: autograd runs under all."""
    idle = [key for key, (engine, case, _) in found.items() if not attached(engine, case)]
    return {*idle} - {*{key[1:]: key for key in idle}.values()}


@cache
def attached(engine, case):
    return engine.validate(Specimen(case).model, [case.chain]).chains


class Covering(EngineConformance):
    """Quick features on one chain of each family; of the rest every pair of engine, chain and feature.

    For slow features engines of one kind take turns.
    """

    features = tuple(FEATURES.values())

    def cells(self, device):
        found = named(super().cells(device))
        standing = {case.name for case in STANDING_FOR.values()}
        slow = {key: cell for key, cell in found.items() if cell[2].slow}
        others = [key for key in found if key[1] not in standing and key not in slow]
        left_out = {*slow, *others} - {*cover(taking_turns(slow)), *cover(others)}
        return [cell for key, cell in found.items() if key not in left_out]


class Registered(Covering):
    """The cells for registered engines that cover every pair of settings, or all other cells.

    Without those of the first feature: ``test_the_table_has_every_chain`` has them all.
    """

    engines = tuple(ENGINES.values())
    features = tuple(feature for name, feature in FEATURES.items() if name != BASIC)
    pairs = True

    def cells(self, device):
        found, chosen = registered(device)
        return [cell for key, cell in found.items() if (key in chosen) is self.pairs]

    def test_a_feature_works_or_is_refused(self, engine, case, feature):
        """The result is that of the committed table, which ``features_page.py`` makes."""
        name = next(name for name in ENGINES if ENGINES[name] == engine)
        cell = FEATURE_CELLS.get(case.name, {}).get((feature.name, name))
        if cell is None:
            super().test_a_feature_works_or_is_refused(engine, case, feature)
        else:
            assert_is_said(cell, feature.refusal(engine, case), case.device)


@cache
def registered(device):
    """Return all cells for registered engines, and those that cover every pair; two classes share the result."""
    found = named(Covering.cells(Registered(), device))
    left_out = repeated(found)
    found = {key: cell for key, cell in found.items() if key not in left_out}
    return found, set(cover(found))


class TestRegisteredEngines(Registered):
    """Every pair of engine, chain and feature."""


@pytest.mark.slow
class TestTheOtherCells(Registered):
    pairs = False
    test_engines_are_values = test_some_chain_is_taken = None


@pytest.mark.slow
class TestOptions(Covering):
    """Options that change how an engine gets its gradients."""

    features = tuple(feature for feature in FEATURES.values() if feature.everywhere)
    engines = (
        gradfree.create_engine("backprop", plain=False),
        gradfree.create_engine("highway_bp", iterations=9, gamma=0.3),
        gradfree.create_engine("highway_bp", tolerance=1e-3),
        gradfree.create_engine("fixed_point", tolerance=1e-6),
        gradfree.create_engine("dsf", feedback=0.7, iterations=1),
        gradfree.create_engine("truncated", window=3),
        gradfree.create_engine("foton", streaming=True, perturbation="tangent"),
        gradfree.create_engine("shooting", segments=2, burn=1),
        gradfree.create_engine("newton", jacobian="gate", max_sweeps=9),
    )


@pytest.mark.slow
class TestFeedback(EngineConformance):
    """Every kind of feedback of ``fa`` but the first, which is among the registered engines; they take turns."""

    features = tuple(feature for feature in FEATURES.values() if not feature.slow)
    engines = tuple(
        gradfree.create_engine("fa", feedback=feedback) for feedback in ("sign", "usf", "brsf", "frsf", "learned")
    )

    def cells(self, device):
        found = named(super().cells(device))
        return [found[key] for key in taking_turns(found)]


@pytest.mark.slow
class TestSweeps(EngineConformance):
    """Every quick feature in segments and in sweeps, which engines would not choose for so short a chain."""

    features = tuple(feature for feature in FEATURES.values() if not feature.slow)
    engines = (gradfree.create_engine("shooting", segments=3), gradfree.create_engine("newton", max_sweeps=9))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_table_has_every_chain(name, device):
    for case in (replace(case, device=device) for case in CASES):
        assert_is_said(CHAIN_CELLS[case.name, name], FEATURES[BASIC].refusal(ENGINES[name], case), device)


@pytest.mark.parametrize("name", ["backprop", "fixed_point", "truncated"])
def test_engines_that_refusals_propose_accept_all_chains_but_those_of_layers(name):
    families = {RESIDUAL, RECURRENT} if name != "backprop" else {RECURRENT}
    cases = [case.name for case in CASES if case.family in families and case.name != "LSTM with projections"]
    assert {CHAIN_CELLS[case, name] for case in cases} == {"works"}


def test_the_table_has_every_engine_and_feature_and_says_what_they_mean():
    again = "python benchmarks/scripts/features_page.py --out docs/reference/support.md"
    assert CHAIN_CELLS.keys() == {(case.name, name) for case in CASES for name in ENGINES}, again
    for case in STANDING_FOR.values():
        names = [name for name in ENGINES if CHAIN_CELLS[case.name, name] == "works"]
        asked = [feature.name for feature in FEATURES.values() if case in feature.cases]
        assert FEATURE_CELLS[case.name].keys() == {(feature, name) for feature in asked for name in names}, again
    assert PAGE.endswith(markdown([]).partition("## What the rows mean")[2])


@dataclass(frozen=True, kw_only=True)
class Wrong(Engine):
    """An engine that breaks one rule of the suite."""

    how: str = "sign"

    def gradients(self, chain, direct):
        exact = chain.backpropagate(direct)
        change = {
            "sign": torch.sign,
            "noise": lambda g: g + 0.1 * torch.randn_like(g),
            "sync": lambda g: g * (2.0 if g.sum().item() == 0.1 else 1.0),
            "comparison": lambda g: g if torch.allclose(g, g) else -g,
            "none": lambda g: None,
            "nan": lambda g: g / 0.0,
            "typo": lambda g: g.gradient,
            "float32": lambda g: g.float().to(g.dtype),
        }[self.how]
        return exact._replace(parameters=[g if g is None else change(g) for g in exact.parameters])


@pytest.mark.parametrize(
    ("how", "feature", "message"),
    [
        ("sign", "loss times 1e-4 and 65536", "is off by"),
        ("sign", "gradient accumulation", "is off by"),
        ("noise", "several passes, one backward", "is off by"),
        ("sync", "no wait for the device", "waits for the device"),
        ("comparison", "no wait for the device", "waits for the device"),
        ("none", BASIC, "lacks a gradient"),
        ("nan", BASIC, "is off by nan"),
        ("float32", "the same step again", None),
        ("float32", "gradient accumulation", "is off by"),
    ],
)
def test_a_wrong_engine_fails_the_suite(how, feature, message):
    for case in STANDING_FOR.values():
        if message is None:
            assert FEATURES[feature].refusal(Wrong(how=how), case) is None
        else:
            with pytest.raises(AssertionError, match=message):
                FEATURES[feature].refusal(Wrong(how=how), case)


def test_an_error_other_than_chain_error_fails_the_suite(monkeypatch):
    """Also if the library has added a note to it."""
    for engine in (Wrong(how="typo"), BrokenBlocks()):
        with pytest.raises((AttributeError, gradfree.ChainError)):
            FEATURES[BASIC].refusal(engine, CASES[0])


class BrokenBlocks(Wrong):
    def gradients(self, chain, direct):
        return chain.gradients([e if e is None else e[:, :2] for e in direct])


@pytest.mark.slow
def test_the_engines_of_the_docs_pass_in_a_package_of_their_own(pytester):
    """The page's code runs as a module and its tests, outside this checkout and without its configuration.

    A few features of every kind: what is asked in a package of one's own is asked here, and answered as here.
    """
    page = (DOCS / "develop/adding-an-engine.md").read_text(encoding="utf-8")
    *engines, tests = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    pytester.makepyfile(my_package="\n".join(engines), test_my_package=tests)
    assert len("".join(engines).splitlines()) <= 60
    asked = "values or option or taken or forward or create_graph or 65536 or frozen or autocast or pickle or hooks"
    pytester.syspathinsert()
    done = pytester.runpytest_inprocess("-q", "-rs", "--strict-markers", "-p", "no:cacheprovider", "-k", asked)
    assert done.ret == 0
    printed = done.stdout.str()
    assert re.search(r"refused: .*create_graph=True: an engine", printed, re.DOTALL)


def test_every_engine_class_is_in_gradfree_algorithms():
    engine = gradfree.create_engine("highway_bp", iterations=4)
    assert gradfree.algorithms.HighwayBP(iterations=4) == engine
    with pytest.raises(AttributeError, match="module 'gradfree' has no attribute 'algorithm'"):
        gradfree.algorithm  # noqa: B018
