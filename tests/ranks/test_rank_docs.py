"""The example of docs/guides/ranks.md runs on two ranks, and refusals come before the model is changed."""

import re

import pytest
from places import DOCS
from rank_processes import run_ranks

import gradfree
from gradfree.errors import ChainError
from gradfree.ranks.placement import balanced, place
from gradfree.testing.cases.models import plain_model


@pytest.mark.processes
def test_the_example_of_the_page_runs(tmp_path):
    code, *_ = re.findall(r"```py\n(.*?)```", (DOCS / "guides/ranks.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    run_ranks(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("costs", "count", "lengths"),
    [
        ([1] * 7, 3, [3, 2, 2]),
        ([1] * 64, 4, [16] * 4),
        ([9, 1, 1, 1, 1, 5, 5], 3, [1, 5, 1]),
        ([1, 1, 5, 5], 3, [2, 1, 1]),
        ([1, 1, 1, 100], 3, [2, 1, 1]),
        ([2.5], 1, [1]),
    ],
)
def test_runs_are_balanced(costs, count, lengths):
    runs = balanced(costs, count)
    assert [len(run) for run in runs] == lengths
    assert [i for run in runs for i in run] == list(range(len(costs)))


def test_weights_that_blocks_of_several_ranks_share_are_refused():
    model = plain_model()
    model.blocks[4].linear.weight = model.blocks[0].linear.weight
    (site,) = gradfree.create_engine("highway_bp").validate(model, chains=["blocks"]).chains.values()
    with pytest.raises(ChainError, match=r"blocks\.0\.linear\.weight and blocks\.4\.linear\.weight are one weight"):
        place(model, site, 2, None)
    assert place(model, site, 1, None).home["blocks.4.linear.weight"] == 0


def test_without_a_process_group_it_is_refused():
    with pytest.raises(ChainError, match="init_process_group"):
        gradfree.layer_parallel(plain_model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "truncated"}, "'backprop', 'highway_bp' and 'fixed_point' can"),
        ({"engine": "foton"}, r"(?s)ranks with FOTON.* use DistributedDataParallel, or .* '<engine>_ddp'"),
        ({"tolerance": 0.1}, "give iterations"),
        ({"segments": 3}, "leave segments out"),
        ({"chains": ["heads"]}, "heads"),
        ({"costs": [1, 2]}, "costs must be 5 positive numbers"),
        ({"taps": ["blocks.1"]}, "taps"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_refused_call_does_not_change_the_model(options, message):
    model = plain_model()
    before = list(model.state_dict())
    with pytest.raises((ChainError, TypeError), match=message):
        gradfree.layer_parallel(model, **options)
    assert list(model.state_dict()) == before
    assert "forward" not in vars(model)
