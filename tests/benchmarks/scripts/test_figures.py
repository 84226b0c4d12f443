"""Figures of README and docs come from records, and a check finds those that do not."""

import shutil

import pytest
from figures import CHARTS, ROOT, FigureError, Figures, changes, declarations, written

DECLARED = declarations()
LAYERS = {"suite": "long-sequences", "section": "recurrent layers, 256", "setting": "GRU (1, 16384, 64)"}
TIME = {"metric": "time of forward and backward", "unit": "× plain"}


@pytest.fixture(scope="module")
def figures():
    return Figures(DECLARED)


def test_pages_and_charts_say_what_the_records_say(figures):
    assert [path for path, _ in changes(figures)] == []


@pytest.mark.parametrize("name", DECLARED["figure"])
def test_every_declared_figure_is_in_the_records(figures, name):
    assert "–" not in figures.of("figure", name)


@pytest.mark.parametrize("name", DECLARED["table"])
def test_no_row_or_column_of_a_table_is_without_any_record(figures, name):
    _, _, _, *rows, _ = figures.of("table", name).split("\n")
    cells = [row.strip("| ").split(" | ")[1:] for row in rows]
    assert not [line for line in (*cells, *zip(*cells, strict=True)) if {*line} == {"–"}]


def test_a_chart_is_drawn_anew_only_when_what_it_shows_has_changed(figures, tmp_path):
    shutil.copytree(ROOT / CHARTS, tmp_path / CHARTS)
    (tmp_path / "README.md").write_text("<!-- chart: long-sequences --><!-- end -->")
    ((page, new),) = changes(figures, tmp_path)
    assert page.name == "README.md"
    assert "39× faster" in new
    assert "(docs/figures/long-sequences.svg)" in new
    page.write_text(new)
    chart = declarations()["chart"]["long-sequences"] | {"baseline": "another"}
    ((drawn, _),) = changes(Figures(DECLARED | {"chart": {"long-sequences": chart}}), tmp_path)
    assert drawn.name == "long-sequences.svg"


def test_charts_have_a_title_and_follow_the_readers_screen(figures):
    for name in figures.charts:
        svg = figures.picture(name).svg()
        assert f"<title>{figures.filled(DECLARED['chart'][name]['title'])}</title>" in svg
        assert "prefers-color-scheme:dark" in svg
        assert "currentColor" in svg


def test_a_figure_that_was_changed_by_hand_is_made_anew():
    figures = Figures({"figure": {"x": {**LAYERS, **TIME, "row": "shooting"}}})
    text = "It is <!-- figure: x -->99× faster<!-- end -->."
    assert written(text, figures, "page") == "It is <!-- figure: x -->39× faster<!-- end -->."


@pytest.mark.parametrize(
    ("row", "more", "shown"),
    [
        ("shooting", {}, "39× faster"),
        ("plain", {}, "baseline"),
        ("plain", {"unit": "s", "show": "{value:.0f} ms", "scale": 1e3}, "2832 ms"),
        ("shooting", {"metric": "peak memory", "show": "times"}, "0.9×"),
        ("backprop", {"setting": "LSTM (1, 4096, 64)"}, "3.7× slower"),
        ("dsf linspace", {"setting": "LSTM (1, 4096, 64)"}, "no difference seen"),
    ],
)
def test_ratios_are_shown_as_factors(row, more, shown):
    assert Figures({"figure": {"x": {**LAYERS, **TIME, "row": row, **more}}}).of("figure", "x") == shown


def test_programs_of_others_have_a_table_the_largest_gain_first(tmp_path):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients/records.csv").write_text(
        "client,version,case,line,span,plain_s,line_s,gain,gain_low,gain_high,plain_mib,line_mib,digits,rounds,threads\n"
        "slow,1.0,LSTM,x=1,whole run,1,1.25,0.8,0.7,0.9,400,500,5,5,1\n"
        "quick,2.0,GRU,x=2,whole run,14,1,14,12,15,400,200,6,5,1\n"
    )
    asked = {"suite": "clients", "head": ["program", "speed", "memory"]}
    asked |= {"each": ["{client} {version}: {case}, `{line}`", "{speed}", "{memory}"]}
    figure = {"suite": "clients", "task": "quick", "metric": "time"}
    figures = Figures({"table": {"x": asked}, "figure": {"quick": figure}}, tmp_path)
    assert figures.of("figure", "quick") == "14× faster"
    assert figures.of("table", "x").splitlines()[3:] == [
        "| quick 2.0: GRU, `x=2` | 14× faster | 0.5× |",
        "| slow 1.0: LSTM, `x=1` | 1.2× slower | 1.2× |",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- figure: nothing -->1<!-- end -->",
        "<!-- figure: vague -->1<!-- end -->",
        "<!-- figure: long-gru -->1",
        "<!-- figure: long-gru -->1 <!-- figure: long-gru -->1<!-- end -->",
        "<!-- table: long-gru -->1<!-- end -->",
    ],
)
def test_markers_that_name_no_single_fact_are_refused(text):
    figures = Figures({"figure": {"vague": {**LAYERS, **TIME}, "long-gru": DECLARED["figure"]["long-gru"]}})
    with pytest.raises(FigureError, match="page"):
        written(text, figures, "page")
