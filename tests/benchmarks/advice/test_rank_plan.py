"""``gradfree plan-ranks`` prints the model of a step's time, says up to where ours take less, and draws it."""

import pytest

from gradfree.cli import main


def test_it_prints_and_draws(capsys, tmp_path):
    main(["plan-ranks", "--ranks", "[4,64]", "--microbatches", "[1,4]", "--out", str(tmp_path / "plan.png")])
    rows = [line.split()[-2:] for line in capsys.readouterr().out.splitlines() if "layer_parallel, k=1" in line]
    shares, _, pipeline, zero_bubble = rows
    assert shares == ["0.583", "0.349"]
    # While m < 2 (n - 1) / k, and while m < (n + 2) / 4.
    assert pipeline == ["5", "125"]
    assert zero_bubble == ["1", "16"]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "wrong", "least"),
    [("--forward", "0", "more than 0"), ("--ranks", "[2,0]", "more than 0"), ("--latency", "-1", "0 or more")],
)
def test_what_cannot_be_is_refused_by_its_name(option, wrong, least, capsys):
    with pytest.raises(SystemExit):
        main(["plan-ranks", option, wrong])
    assert f"error: {option} must be {least}, not {wrong.strip('[2,]')}." in capsys.readouterr().err
