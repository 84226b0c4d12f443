"""What a report's rows depend on is in the report: model, optimizer, rate, batches, sizes, engines' defaults."""

from report_records import section_of, told
from tiny_suite import PLAIN, TASK, fake, training

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.training.comparison import Comparison

DEFAULT = Row("highway_bp", "highway_bp", {})


def test_a_record_has_sizes_and_defaults_and_the_section_tells_them():
    """With the two sweeps that a row without options has."""
    case = training(DEFAULT)
    results = case.run()
    assert results["sizes"] == {"parameters": 1249, "train": 16, "validation": 16, "test": 16}
    assert results["defaults"] == "iterations=2, gamma=0.0"
    section = section_of(Comparison(TASK, (PLAIN, DEFAULT)), dict([fake(case, results)]))
    assert section.setup == (
        "Trained: residual_mlp(in_features=4, num_classes=1, depth=4, width=8), 1,249 parameters, by AdamW(betas=(0.9, "
        "0.999), weight_decay=0.01) at 0.01, warmed up for a tenth of the steps, then annealed; 8 of 16 examples a "
        "batch; validated on 16, tested on 16. Options that rows do not name: highway_bp(iterations=2, gamma=0.0)."
    )
    assert told(section, metric="parameters")[0] == 1249
    assert told(section, metric="batch size")[0] == 8
