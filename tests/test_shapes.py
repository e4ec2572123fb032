"""Block shapes of real models, and what a tensor-parallel rank holds of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

import kvbm
from kvbm.shapes import data_dir, heads_of_rank

#: Layers, K and V or one latent, KV heads, elements of a head: read in each model's config.json, and typed in again here.
MODELS = {
    "deepseek-v3": (61, 1, 1, 576), "gemma-2-27b": (46, 2, 16, 128), "gemma-2-9b": (42, 2, 8, 256),
    "gemma-3-12b": (48, 2, 8, 256), "gemma-3-27b": (62, 2, 16, 128), "glm-4-9b": (40, 2, 2, 128),
    "glm-4.5": (92, 2, 8, 128), "glm-4.5-air": (46, 2, 8, 128), "gpt-oss-120b": (36, 2, 8, 64),
    "gpt-oss-20b": (24, 2, 8, 64), "kimi-k2": (61, 1, 1, 576), "llama-3.1-405b": (126, 2, 8, 128),
    "llama-3.1-70b": (80, 2, 8, 128), "llama-3.1-8b": (32, 2, 8, 128), "llama-3.2-1b": (16, 2, 8, 64),
    "llama-4-scout": (48, 2, 8, 128), "mistral-7b": (32, 2, 8, 128), "mistral-small-24b": (40, 2, 8, 128),
    "mixtral-8x22b": (56, 2, 8, 128), "mixtral-8x7b": (32, 2, 8, 128), "phi-3.5-mini": (32, 2, 32, 96),
    "phi-4": (40, 2, 10, 128), "qwen2.5-72b": (80, 2, 8, 128), "qwen2.5-7b": (28, 2, 4, 128),
    "qwen3-235b-a22b": (94, 2, 4, 128), "qwen3-30b-a3b": (48, 2, 4, 128), "qwen3-32b": (64, 2, 8, 128),
    "qwen3-8b": (36, 2, 8, 128),
}  # fmt: skip

#: Bytes a token of all layers in 16-bit elements, as published (DeepSeek, "Insights into DeepSeek-V3", table 1).
PUBLISHED = {"deepseek-v3": 70_272, "qwen2.5-72b": 327_680, "llama-3.1-405b": 516_096}


def test_every_file_is_here() -> None:
    files = {path.stem for path in (data_dir() / "shapes").glob("*.yaml")}
    assert files == set(MODELS)
    assert {name for name in kvbm.shape_names() if "/" not in name} == files


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model(name: str) -> None:
    shape = kvbm.load_shape(name)
    assert (shape.nl, shape.no, shape.nh, shape.hd) == MODELS[name]
    assert shape.dtype == "bfloat16"
    assert shape.nt == (64 if shape.no == 1 else 16)
    said = yaml.load((data_dir() / "shapes" / f"{name}.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert said["title"] and said["read_from"].startswith("config.json of ")
    assert said["tp"][0] == "1"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_bytes_a_token(name: str) -> None:
    shape = kvbm.load_shape(name)
    assert shape.nbytes == PUBLISHED[name] * shape.nt


@pytest.mark.parametrize("name", [name for name in kvbm.shape_names() if "/" in name])
def test_ranks(name: str) -> None:
    """What a rank holds is the model's shape with its share of the heads, and one head where there are too few."""
    model, _, degree = name.rpartition("/tp")
    whole, rank = kvbm.load_shape(model), kvbm.load_shape(name)
    assert rank.nh == max(1, -(-whole.nh // int(degree)))
    assert {**rank.sizes, "h": whole.nh} == whole.sizes and rank.dtype == whole.dtype
    if int(degree) <= whole.nh:
        assert rank.nh * int(degree) == whole.nh


@pytest.mark.parametrize(
    ("heads", "degree"), [(8, 1), (8, 4), (8, 8), (10, 5), (1, 16), (2, 8), (4, 8), (3, 12), (6, 3)]
)
def test_heads_of_ranks(heads: int, degree: int) -> None:
    """Every head is held, by equally many neighbouring ranks, in order; each rank holds equally many."""
    held = [list(heads_of_rank(heads, degree, rank)) for rank in range(degree)]
    assert len({len(mine) for mine in held}) == 1
    flat = [head for mine in held for head in mine]
    assert flat == sorted(flat)
    assert [flat.count(head) for head in range(heads)] == [max(1, degree // heads)] * heads
    for rank, mine in enumerate(held):
        assert mine[0] == rank * heads // degree


@pytest.mark.parametrize(
    ("heads", "degree", "rank", "match"),
    [
        (8, 3, 0, r"8 KV heads.*3 ranks"),
        (10, 4, 0, r"10 KV heads.*4 ranks"),
        (8, 12, 0, r"8 KV heads.*12 ranks"),
        (8, 0, 0, r"0 ranks"),
        (8, -2, 0, r"-2 ranks"),
        (8, 4, 4, r"rank 4: expected 0 to 3"),
        (8, 4, -1, r"rank -1"),
    ],
)
def test_heads_that_cannot_be_shared(heads: int, degree: int, rank: int, match: str) -> None:
    with pytest.raises(kvbm.SpecError, match=match):
        heads_of_rank(heads, degree, rank)


@pytest.mark.parametrize(
    ("text", "heads"),
    [("llama-3.1-8b/tp16", 1), ("qwen3-32b/tp2,nt=64", 4), ("phi-4/tp10", 1), ("deepseek-v3/tp32", 1)],
)
def test_any_degree_that_is_possible(text: str, heads: int) -> None:
    assert kvbm.load_shape(text).nh == heads


@pytest.mark.parametrize("text", ["phi-4/tp4", "llama-3.1-8b/tp12", "llama-3.1-8b/tp0"])
def test_a_degree_that_is_not(text: str) -> None:
    with pytest.raises(kvbm.SpecError, match=re.escape(f"shape '{text}'")):
        kvbm.load_shape(text)


def test_a_file_with_a_wrong_key(tmp_path: object) -> None:
    from pathlib import Path

    from kvbm import shapes

    path = Path(str(tmp_path)) / "mine.yaml"
    good = "title: x\nnl: 1\nno: 2\nnh: 4\nnt: 16\nhd: 8\ndtype: int8\ntp: [1, 2]\n"
    path.write_text(good + "notes: more\n", encoding="utf-8")
    assert shapes._preset(path)["nh"] == 4
    for index, bad in enumerate((good + "heads: 4\n", good.replace("nl: 1\n", ""), good.replace("[1, 2]", "[1, 3]"))):
        other = path.with_name(f"bad{index}.yaml")
        other.write_text(bad, encoding="utf-8")
        with pytest.raises(kvbm.SpecError):
            shapes._preset(other)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("nl=1,nl=2,no=2,nh=4,nt=16,hd=8", "nl: expected once, got twice"),
        ("llama-3.1-8b,nt=32,nt=32", "nt: expected once, got twice"),
        ("nl=" + "9" * 5000 + ",no=2,nh=4,nt=16,hd=8", r"nl: expected a positive integer below 2\^63"),
        ("x" * 5000, "expected a preset"),
        ("llama\0", "expected a preset"),
        (None, "shape: expected a text such as 'llama-3.1-8b'.*got None"),
        (7, "shape: expected a text"),
    ],
)
def test_texts_that_are_no_shape(text: Any, match: str) -> None:
    with pytest.raises(kvbm.SpecError, match=match) as info:
        kvbm.load_shape(text)
    assert len(str(info.value)) < 2000


def test_an_override_of_a_preset_is_given_once() -> None:
    assert kvbm.load_shape("llama-3.1-8b,nt=32").nt == 32


@pytest.mark.parametrize("dtype", [[], {}, None, 7, "float33", "x" * 5000])
def test_dtypes_that_are_none(dtype: Any) -> None:
    with pytest.raises(kvbm.DTypeError, match="shape: dtype: expected one of") as info:
        kvbm.BlockShape(1, 2, 3, 4, 5, dtype)
    assert len(str(info.value)) < 600


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".yaml", "nhd\0", "nhd\0.yaml", "\udc80"])
def test_names_that_no_file_has(name: str) -> None:
    with pytest.raises(kvbm.SpecError, match=r"no such file|expected one of") as info:
        kvbm.load(name)
    assert len(str(info.value)) < 4000
