"""Figures on pages are those of benchmarks/results, with the card and the commit."""

from __future__ import annotations

import csv

import pages

OPERATE, README = pages.read("docs/engines/operate.md"), pages.read("README.md")
RESULTS = pages.ROOT / "benchmarks" / "results"


def measured(file: str) -> tuple[str, dict[tuple[str, str, str], list[dict[str, str]]]]:
    """The commit of a file of results, and its rows by case, by whom and number of bytes or blocks."""
    head, *lines = (RESULTS / file).read_text("utf-8").splitlines()
    found: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in csv.DictReader(lines):
        for size in {row["n"], row["total_bytes"]}:
            found.setdefault((row["case"], row["by"], size), []).append(row)
    return head.split()[2].rstrip(","), found


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    table = text[text.index(f"\n{head}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def near(cell: str, value: float) -> bool:
    """Whether a cell is a figure of three digits."""
    return cell == f"{value:.3g}"


def test_what_offloading_costs() -> None:
    commit, found = measured("offload_h200.csv")
    assert f"One H200, commit {commit}, [offload_h200.csv]" in OPERATE
    table = rows(OPERATE, "| choice | load, 8 blocks")
    assert len(table) == 4
    for [_, *cells], by in zip(table, ("kvbm (", "kvbm, no digests", "kvbm, universal", "vLLM"), strict=True):
        wanted = [(way, n) for way in ("load", "store") for n in ("8", "64")]
        for cell, (way, n) in zip(cells, wanted, strict=True):
            [row] = [
                row for (case, who, size), [row, *_] in found.items()
                if case == f"{way}: llama-3.1-8b, tp 1, LBHNC, 16 tokens" and who.startswith(by) and size == n
            ]  # fmt: skip
            assert near(cell, float(row["ratio"])), (by, way, n, cell, row["ratio"])


def test_what_a_cast_costs() -> None:
    commit, found = measured("cast_h100.csv")
    assert f"One H100, commit {commit}, [cast_h100.csv]" in OPERATE
    [plain, *table] = rows(OPERATE, "| `host_values` | ms")
    for name, ms, times in table:
        [row] = found[f"reload of 8192 tokens, {name.strip('`')}", "load", "512"]
        assert near(ms, float(row["median_ms"])) and near(times, float(row["ratio"]))
        assert near(plain[1], float(row["beside_ms"]))
    assert len(table) == 3


def test_what_a_message_costs() -> None:
    commit, found = measured("link_direct_h200.csv")
    assert f"Two H200s, commit {commit}, [link_direct_h200.csv]" in OPERATE
    table = rows(OPERATE, "| | 8.4 MB | 67 MB")
    for [_, *cells], by in zip(table, ("memcpy", "link, direct", "link by NIXL"), strict=True):
        for cell, size in zip(cells, (8388608, 67108864, 335544320, 2684354560), strict=True):
            [row] = found["a message", by, str(size)]
            assert near(cell, float(row["median_ms"])), (by, size, cell, row["median_ms"])


# ---- README ----------------------------------------------------------------------------------------------------------------


def test_the_figures_of_the_readme() -> None:
    """Each with its card; those of 16 cores are ranges of three pairs, which docs/explanation/measurements.md has, too."""
    table = {row[0]: row[1:] for row in rows(README, "| | card | of a memcpy |")}

    def check(start: str, card: str, *ratios: float) -> None:
        [(name, told)] = [(name, told) for name, told in table.items() if name.startswith(start)]
        assert told[0] == card
        figures = told[1].split(", ")
        assert all(near(*pair) for pair in zip(figures, ratios, strict=True)), (name, figures, ratios)
        del table[name]

    def copies(file: str, pair: str, backend: str) -> float:
        head, *lines = (RESULTS / file).read_text("utf-8").splitlines()
        assert "NVIDIA H200," in head
        wanted = {"pattern": pair, "backend": backend, "num_blocks": "64"}
        [found] = [row for row in csv.DictReader(lines) if wanted.items() <= row.items()]
        return float(found["ratio"])

    check("vllm/LBHNC → universal, universal → vllm/LBHNC, in one GPU", "H200",
          *(copies("d2d.csv", pair, "direct") for pair in ("vllm/LBHNC:universal", "universal:vllm/LBHNC")))  # fmt: skip
    check("vllm/LBHNC (GPU) → universal", "H200", copies("d2h.csv", "vllm/LBHNC:universal", "auto"))
    _, casts = measured("cast_h100.csv")
    layouts = "record/per_token_head_fp8_planes", "record/nvfp4_universal"
    ways = ("bfloat16 (GPU) →", "quantise", "nhd → {}, pinned"), ("fp8, NVFP4 (pinned", "dequantise", "{} → nhd, pinned")
    for start, by, pair in ways:
        check(start, "H100", *(float(casts[pair.format(layout), by, "64"][0]["ratio"]) for layout in layouts))
    _, links = measured("link_direct_h200.csv")
    sizes = 335544320, 2684354560
    check("a message between two engines", "two H200",
          *(float(links["a message", "link, direct", str(size)][0]["ratio"]) for size in sizes))  # fmt: skip
    [(name, told)] = table.items()
    assert name.startswith("16 CPU cores") and told[1] in pages.read("docs/explanation/measurements.md")
