"""Plots of measurements: they show the values of the files, their labels are legible, and bad files are refused."""

from __future__ import annotations

import csv
import itertools
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from benchmarks.plot import STUDIES
from benchmarks.plot import plot as plot_studies
from kvbm.bench import plot
from kvbm.bench.table import read
from kvbm.errors import KvbmError, SpecError

matplotlib = pytest.importorskip("matplotlib")

DATA = Path(__file__).parents[1] / "data" / "bench"

#: File and the pictures that can be made of it.
SAMPLES = {
    "sweep_d2d": ["roofline", "bars"],
    "sweep_few": ["roofline", "bars"],
    "sweep_pcie": ["roofline", "bars"],
    "sweep_cpu": ["bars"],
    "interference": ["interference"],
    "overhead": ["overhead"],
    "scale": ["scale"],
}


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a sample, read without `table.read`."""
    lines = (DATA / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def drawn(name: str, kind: str, **rest):  # type: ignore[no-untyped-def]
    return plot.draw(read(DATA / f"{name}.csv"), [kind], known=STUDIES, **rest)[kind]


def line(axes, label):  # type: ignore[no-untyped-def]
    found = [each for each in axes.lines if each.get_label().partition("  ")[0] == label]
    assert len(found) == 1, [each.get_label() for each in axes.lines]
    return list(zip(found[0].get_xdata(), found[0].get_ydata(), strict=True))


def by(found, *columns: str):  # type: ignore[no-untyped-def]
    groups = defaultdict(list)
    for row in found:
        groups[tuple(row[column] for column in columns)].append(row)
    return groups


def texts(figure) -> list[str]:  # type: ignore[no-untyped-def]
    from matplotlib.text import Text

    return [each.get_text() for each in figure.findobj(Text) if each.get_text() and each.get_visible()]


def bars(axes):  # type: ignore[no-untyped-def]
    """The labels of the bars on the axis, and their begins and ends."""
    names = {
        round(tick, 6): label.get_text() for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    }
    return [
        (names[round(bar.get_y() + bar.get_height() / 2, 6)], bar.get_x(), bar.get_x() + bar.get_width())
        for bar in axes.patches
    ]


# ---- what is drawn is what was measured ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kinds"), SAMPLES.items())
@pytest.mark.slow
def test_a_files_columns_and_rows_decide_which_pictures_are_made(name, kinds) -> None:
    notes: list[str] = []
    assert list(plot.draw(read(DATA / f"{name}.csv"), note=notes.append, known=STUDIES)) == kinds
    assert [note.partition(":")[0] for note in notes] == (["roofline"] if name == "sweep_cpu" else [])


@pytest.mark.slow  # 0.6 s
def test_files_of_several_kinds_make_all_their_pictures() -> None:
    tables = [table for name in ("sweep_few", "interference", "scale") for table in read(DATA / f"{name}.csv")]
    assert list(plot.draw(tables, known=STUDIES)) == ["roofline", "bars", "interference", "scale"]


@pytest.mark.slow  # half a second
@pytest.mark.parametrize("name", ["sweep_few", "sweep_d2d"])
def test_roofline_draws_a_line_a_pair_through_the_measured_points(name) -> None:
    """Any number of pairs: each has a line, all lines look different, and each is in the legend with its share."""
    axes = drawn(name, "roofline").axes[0]
    groups = by([row for row in rows(name) if row["backend"] == "direct"], "pattern")
    assert len(groups) == {"sweep_few": 5, "sweep_d2d": 12}[name]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    for (pair,), held in groups.items():
        want = sorted((float(row["total_bytes"]), float(row["ratio"])) for row in held)
        assert line(axes, pair.replace(":", " → ")) == want
        last = max(held, key=lambda row: float(row["total_bytes"]))
        assert f"{pair.replace(':', ' → ')}  {float(last['ratio']):.2f}" in named
    assert len(named) == len(groups) + 1 == len({(each.get_color(), each.get_marker()) for each in axes.lines})
    assert (axes.get_xscale(), axes.get_ylabel()) == ("log", "share of a memcpy")
    assert axes.get_ylim()[0] == min(0.8, *(float(row["ratio"]) - 0.02 for held in groups.values() for row in held))


@pytest.mark.parametrize("name", ["sweep_few", "sweep_pcie"])
def test_rooflines_roof_is_the_fastest_memcpy_of_each_size(name) -> None:
    figure = drawn(name, "roofline")
    want = defaultdict(dict)
    for row in rows(name):
        nbytes = float(row["total_bytes"])
        gbps = nbytes / float(row["memcpy_ms"]) / 1e6
        want[row["direction"]][nbytes] = max(gbps, want[row["direction"]].get(nbytes, 0))
    panels = [axes for axes in figure.axes if axes.get_ylabel() in ("GB/s", "share of a memcpy")]
    assert len(panels) == len(want)
    for axes, direction in zip(panels, [way for way in ("d2d", "d2h", "h2d") if way in want], strict=True):
        roof = dict.fromkeys(want[direction], 1.0) if direction == "d2d" else want[direction]
        assert line(axes, "memcpy") == sorted(roof.items())
        assert any(f"({direction})" in text for text in texts(axes))


def test_rooflines_of_transfers_show_what_auto_reached() -> None:
    axes = drawn("sweep_pcie", "roofline").axes[0]
    held = [
        row
        for row in rows("sweep_pcie")
        if (row["direction"], row["backend"], row["pattern"]) == ("d2h", "auto", "nhd:universal")
    ]
    assert line(axes, "nhd → universal") == [(float(r["total_bytes"]), float(r["bandwidth_gbps"])) for r in held]


def test_bars_are_as_long_as_the_rows_of_64_blocks_say() -> None:
    figure = drawn("sweep_d2d", "bars", pairs=["nhd:universal", "nhd:vllm/paged_attn_v0"])
    held = [row for row in rows("sweep_d2d") if row["num_blocks"] == "64"]
    want = [("memcpy", max(float(row["total_bytes"]) / float(row["memcpy_ms"]) / 1e6 for row in held))]
    for pair in ("nhd:universal", "nhd:vllm/paged_attn_v0"):
        mine = [row for row in held if row["pattern"] == pair]
        mine.sort(key=lambda row: (row["backend"] != "direct", -float(row["bandwidth_gbps"])))
        want += [(row["backend"].replace("direct", "kvbm direct"), float(row["bandwidth_gbps"])) for row in mine]
        for row in mine:
            assert f"{float(row['bandwidth_gbps']):,.0f} GB/s  {float(row['ratio']):.2f}×" in texts(figure)
    assert [name for name, *_ in bars(figure.axes[0])] == [name for name, _ in want]
    assert [end for _, _, end in bars(figure.axes[0])] == pytest.approx([end for _, end in want])
    assert {start for _, start, _ in bars(figure.axes[0])} == {0}
    assert any("64 blocks, 336 MB" in text for text in texts(figure))


def test_bars_mark_the_memcpy_that_each_row_is_compared_with() -> None:
    axes = drawn("sweep_cpu", "bars").axes[0]
    held = [row for row in rows("sweep_cpu") if row["backend"] != "memcpy"]
    (roofs,) = (each for each in axes.collections if each.get_gid() == "roof")
    marks = [segment[0][0] for segment in roofs.get_segments()]
    assert marks == pytest.approx([float(row["total_bytes"]) / float(row["memcpy_ms"]) / 1e6 for row in held])


def test_bars_of_many_pairs_say_how_many_are_left_out_and_take_those_with_peers() -> None:
    figure = drawn("sweep_d2d", "bars")
    assert any("8 more pairs were measured" in text for text in " ".join(texts(figure)).replace("\n", " ").split("."))
    assert {"nhd → universal", "nhd → vllm/paged_attn_v0"} <= set(texts(figure))


def test_interference_draws_slowdowns_from_one_and_marks_the_memcpys() -> None:
    figure = drawn("interference", "interference")
    panels = dict(zip(figure.axes, ["d2d", "d2h", "h2d"], strict=True))
    for axes, direction in panels.items():
        held = [row for row in rows("interference") if row["direction"] == direction]
        ours = sorted((row for row in held if row["backend"] != "memcpy"), key=lambda row: float(row["slowdown"]))
        names = [row["backend"] + (f", {row['max_sms']} SMs" if row["max_sms"] else "") for row in ours]
        assert [name for name, *_ in bars(axes)] == names
        assert [end for *_, end in bars(axes)] == pytest.approx([float(row["slowdown"]) for row in ours])
        assert {start for _, start, _ in bars(axes)} == {1}
        marks = {each.get_gid(): each.get_xdata()[0] for each in axes.lines}
        assert marks["alone"] == 1
        assert marks["memcpy"] == float(held[0]["memcpy_slowdown"])
        for row in ours:
            rate = float(row["copy_gbps"])
            said = f"{rate:,.0f} GB/s" if rate >= 100 else f"{rate:.3g} GB/s"
            assert f"{float(row['slowdown']):.2f}×  {said}" in texts(axes)


@pytest.mark.slow  # half a second
def test_overhead_draws_a_line_a_kind_of_ids_and_a_line_a_function() -> None:
    figure = drawn("overhead", "overhead")
    for (call, ids), held in by(rows("overhead"), "call", "ids").items():
        axes = figure.axes[call.startswith("kernels.")]
        label = call.removeprefix("kernels.") if call.startswith("kernels.") else ids
        assert line(axes, label) == [(float(row["count"]), float(row["median_us"])) for row in held]
        assert label in [text.get_text() for text in axes.get_legend().get_texts()]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_scale_draws_times_in_microseconds_and_growth_in_mebibytes() -> None:
    figure = drawn("scale", "scale")
    panels = {"blocks": 0, "layers": 1, "ids_host": 2, "ids_gpu": 2, "soak_host": 3, "soak_gpu": 3, "pools": 4}
    labels = {"ids_host": "host", "ids_gpu": "GPU"}
    labels |= {"soak_host": "host: 389 KiB after 1M copies", "soak_gpu": "GPU: 0 KiB after 1M copies"}  # less than a MiB: no slope
    assert figure.axes[3].get_ylim()[1] == 1.0
    groups = by(rows("scale"), "what")
    assert {what for (what,) in groups} == set(panels)
    for (what,), held in groups.items():
        found = line(figure.axes[panels[what]], labels.get(what, "time"))
        assert [x for x, _ in found] == [float(row["n"]) for row in held]
        is_soak = what.startswith("soak")
        want = [float(row["grown_mib"]) if is_soak else 1e3 * float(row["median_ms"]) for row in held]
        assert [y for _, y in found] == pytest.approx(want)


# ---- how it looks --------------------------------------------------------------------------------------------------

PICTURES = [(name, kind) for name, kinds in SAMPLES.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), PICTURES)
def test_nothing_is_cut_off_and_no_panel_lies_over_another(name, kind) -> None:
    figure = drawn(name, kind)
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    whole, (width, height) = figure.get_tightbbox(renderer), figure.get_size_inches()
    assert whole.x0 >= 0 and whole.y0 >= 0 and whole.x1 <= width and whole.y1 <= height
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes if axes.axison]
    boxes += [text.get_window_extent(renderer) for text in (figure._suptitle, figure._supxlabel)]
    for a, b in itertools.combinations(boxes, 2):
        assert a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1


@pytest.mark.parametrize(("name", "kind"), PICTURES)
@pytest.mark.slow  # 0.6 s
def test_an_svgs_text_is_text_and_its_footer_names_machine_and_commit(name, kind, tmp_path) -> None:
    (path,) = plot.save({kind: drawn(name, kind)}, tmp_path, ["svg"])
    found = ["".join(each.itertext()).strip() for each in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    comment = (DATA / f"{name}.csv").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    assert comment in found
    wanted = {
        "roofline": {"share of a memcpy" if "pcie" not in name else "GB/s", "1 block", "64 blocks", "336 MB"},
        "bars": {"memcpy", "nhd → universal"},
        "interference": {"staged", "direct, 8 SMs"},
        "overhead": {"list", "numpy int32", "torch CUDA int64", "block_to_universal", "ids per call", "tensors per call"},
        "scale": {"blocks", "layers", "ids", "copies", "GiB", "host", "GPU", "1.05M"},
    }
    assert wanted[kind] <= set(found)


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes_whatever_the_callers_settings(tmp_path) -> None:
    def made(folder: str) -> list[bytes]:
        figures = plot.draw(read(DATA / "sweep_few.csv"))
        return [path.read_bytes() for path in plot.save(figures, tmp_path / folder)]

    before = made("one")
    theirs = {"font.size": 31, "xtick.major.size": 19, "axes.facecolor": "red", "svg.fonttype": "path"}
    with matplotlib.rc_context(theirs):
        settings = dict(matplotlib.rcParams)
        assert made("two") == before
        assert dict(matplotlib.rcParams) == settings
    assert b"<dc:date>" not in before[1]


@pytest.mark.slow  # draws and saves two pictures
def test_dark_pictures_are_dark_and_png_are_at_twice_the_size(tmp_path) -> None:
    from matplotlib.image import imread

    corners = {}
    for dark in (False, True):
        figures = plot.draw(read(DATA / "overhead.csv"), dark=dark, known=STUDIES)
        (path,) = plot.save(figures, tmp_path / str(dark), ["png"], dark=dark)
        pixels = imread(path)
        assert pixels.shape[1] == 1600
        corners[dark] = pixels[0, 0, :3].mean()
    assert corners[False] == 1 and corners[True] < 0.1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5242880, "5.24 MB"),
        (335544320, "336 MB"),
        (1342177280, "1.34 GB"),
        (1024, "1.02 kB"),
        (999_999, "1 MB"),
        (12, "12 B"),
    ],
)
def test_bytes_are_decimal_as_bandwidth_is(value, text) -> None:
    assert plot._bytes_text(value) == text


# ---- several shapes, timings, tables -------------------------------------------------------------------------------


def changed(tmp_path: Path, name: str, edit) -> Path:  # type: ignore[no-untyped-def]
    """A copy of a sample with lines changed by `edit`."""
    lines = (DATA / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    path = tmp_path / "changed.csv"
    path.write_text("".join(f"{each}\n" for each in edit(lines)), encoding="utf-8")
    return path


def test_every_shape_and_timing_has_a_picture_of_its_own(tmp_path) -> None:
    path = changed(
        tmp_path,
        "sweep_few",
        lambda lines: [
            *lines,
            *(each.replace("nt=16", "nt=32") for each in lines[3:]),
            *(each.replace(",events,", ",replay,") for each in lines[3:]),
        ],
    )
    figures = plot.draw(read(path), ["roofline"])
    first, second = "nl80-no2-nh8-nt16-hd128-bfloat16", "nl80-no2-nh8-nt32-hd128-bfloat16"
    assert list(figures) == [f"roofline-{first}-events", f"roofline-{second}-events", f"roofline-{first}-replay"]
    assert any("nt=32" in text for text in texts(figures[f"roofline-{second}-events"]))
    assert any("timed by graph replays" in text for text in texts(figures[f"roofline-{first}-replay"]))


def test_a_comment_line_begins_a_new_table(tmp_path) -> None:
    path = changed(tmp_path, "overhead", lambda lines: [*lines[:20], "# another run", lines[2], *lines[20:]])
    tables = read(path)
    assert [len(table.rows) for table in tables] == [17, len(rows("overhead")) - 17]
    assert tables[1].comments == ("another run",)
    assert tables[1].rows[0].where == f"{path}:23"


# ---- bad files -----------------------------------------------------------------------------------------------------


def refused(path: Path, *kinds: str) -> str:
    with pytest.raises(SpecError) as caught:
        plot.draw(read(path), kinds, known=STUDIES)
    return str(caught.value)


def test_a_missing_column_is_named(tmp_path) -> None:
    path = changed(tmp_path, "interference", lambda lines: [each.replace("slowdown", "slow", 1) for each in lines])
    message = refused(path)
    assert message.startswith(f"{path}: interference: ") and "column 'slowdown' missing" in message


@pytest.mark.parametrize("keep", [0, 2])
def test_a_file_without_rows_is_refused(keep, tmp_path) -> None:
    path = changed(tmp_path, "scale", lambda lines: lines[:keep])
    assert "expected a header line and rows" in refused(path) and str(path) in refused(path)
    path = changed(tmp_path, "scale", lambda lines: lines[:3])
    assert "a header and no rows" in refused(path)


def test_a_row_of_too_few_cells_is_refused_with_its_line(tmp_path) -> None:
    path = changed(tmp_path, "scale", lambda lines: [*lines[:5], lines[5].rpartition(",")[0], *lines[6:]])
    assert refused(path) == f"{path}:6: expected 12 cells, as the header has, got 11"


@pytest.mark.parametrize("text", ["fast", "nan", "0", "-3"])
def test_a_cell_that_is_no_positive_number_is_refused_with_its_line(text, tmp_path) -> None:
    def edit(lines):  # type: ignore[no-untyped-def]
        cells = lines[3].split(",")
        return [*lines[:3], ",".join([*cells[:3], text, *cells[4:]]), *lines[4:]]

    message = refused(changed(tmp_path, "overhead", edit))
    assert ":4: column 'median_us': expected a number" in message and repr(text) in message


def test_two_machines_in_one_picture_are_refused(tmp_path) -> None:
    path = changed(tmp_path, "scale", lambda lines: [*lines[:9], lines[9].replace("H200", "L4"), *lines[10:]])
    message = refused(path)
    assert "NVIDIA H200" in message and "NVIDIA L4" in message and f"{path}:10" in message


def test_the_same_measurement_twice_is_refused() -> None:
    tables = read(DATA / "overhead.csv") * 2
    with pytest.raises(SpecError, match=r"overhead\.csv:4: the same measurement stands at .*overhead\.csv:4 already"):
        plot.draw(tables, known=STUDIES)


def test_a_kind_without_rows_is_refused() -> None:
    message = refused(DATA / "scale.csv", "interference")
    assert "scale.csv: interference: expected the columns" in message and "'slowdown'" in message
    assert "at least two sizes" in refused(DATA / "sweep_cpu.csv", "roofline")


def test_nothing_but_yardsticks_is_refused(tmp_path) -> None:
    for name, kind in (("sweep_few", "roofline"), ("sweep_few", "bars"), ("interference", "interference")):
        path = changed(tmp_path, name, lambda lines: [*lines[:3], *(each for each in lines[3:] if "memcpy" in each)])
        assert "yardstick" in refused(path, kind)


def test_names_that_are_not_known_are_refused(tmp_path) -> None:
    assert "expected one of roofline" in refused(DATA / "scale.csv", "pie")
    with pytest.raises(SpecError, match="pair 'a:b': expected one of hnd:nhd"):
        drawn("sweep_d2d", "bars", pairs=["a:b"])
    path = changed(tmp_path, "sweep_few", lambda lines: [each.replace(",d2d,", ",up,") for each in lines])
    assert "column 'direction': expected one of d2d" in refused(path, "bars")
    path = changed(tmp_path, "scale", lambda lines: [each.replace("layers,", "floors,") for each in lines])
    assert "column 'what': expected one of blocks" in refused(path)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch) -> None:
    tables = read(DATA / "scale.csv")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KvbmError, match=r"pip install 'kvbm-layouts\[bench\]'"):
        plot.draw(tables, known=STUDIES)


# ---- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # draws and saves four pictures
def test_the_command_writes_pictures_and_prints_their_names(tmp_path) -> None:
    out = tmp_path / "new" / "folder"
    files = [str(DATA / f"{name}.csv") for name in ("sweep_cpu", "interference")]
    result = CliRunner().invoke(plot_studies, [*files, "--out", str(out)])
    assert result.exit_code == 0, result.output
    names = ["bars.png", "bars.svg", "interference.png", "interference.svg"]
    assert result.stdout.split() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == names
    assert "roofline: expected at least two sizes" in result.stderr


def test_the_command_takes_kinds_formats_and_pairs(tmp_path) -> None:
    arguments = [str(DATA / "sweep_d2d.csv"), "--out", str(tmp_path), "--kind", "bars", "--format", "svg", "--dark"]
    result = CliRunner().invoke(plot.plot, [*arguments, "--pair", "hnd:nhd"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "bars.svg").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["bars.svg"]
    assert "hnd → nhd" in text and "nhd → universal" not in text and "#0d1117" in text
    assert CliRunner().invoke(plot.plot, [*arguments, "--kind", "pie"]).exit_code == 2
