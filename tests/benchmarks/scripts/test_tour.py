"""The tour of one step lists the files that a step enters."""

import tour


def test_the_tour_is_short():
    blocks, layer, function = (table.count("\n| ") - 1 for table in tour.tables(tour.PAGE.read_text(encoding="utf-8")))
    # A step that runs through more files has hops, which a reader follows in vain.
    assert blocks <= 20
    assert layer <= 22
    assert function <= 24
