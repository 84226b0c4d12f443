"""The report has the settings of its rows: model, optimizer, rate, batch size, sizes, engines' defaults."""

from report_records import fact_values, section_of
from tiny_suite import PLAIN, TASK, fake, training

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.training.comparison import Comparison

DEFAULT = Row("highway_bp", "highway_bp", {})


def test_records_and_section_have_sizes_and_defaults():
    """The defaults include the two iterations of a row without options."""
    case = training(DEFAULT)
    results = case.run()
    assert results["sizes"] == {"parameters": 1249, "train": 16, "validation": 16, "test": 16}
    assert results["defaults"] == "iterations=2, gamma=0.0"
    section = section_of(Comparison(TASK, (PLAIN, DEFAULT)), dict([fake(case, results)]))
    assert section.setup == (
        "Trained: residual_mlp(in_features=4, num_classes=1, depth=4, width=8), 1,249 parameters, by AdamW(betas=(0.9, "
        "0.999), weight_decay=0.01) at 0.01, warmed up for a tenth of the steps, then annealed; 8 of 16 examples a "
        "batch; validated on 16, tested on 16. Default options: highway_bp(iterations=2, gamma=0.0)."
    )
    assert fact_values(section, metric="parameters")[0] == 1249
    assert fact_values(section, metric="batch size")[0] == 8
