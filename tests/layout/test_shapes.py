"""Block shapes of real models, and the share of a tensor-parallel rank."""

from __future__ import annotations

import contextlib
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbm
from coordinates import in_case
from kvbm.layout.shapes import data_dir, heads_of_rank

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
    # Layers that keep a state per sequence are not counted, nor those that read the cache of another.
    "deepseek-v3.2": (61, 1, 1, 576), "deepseek-v3.2-indexer": (61, 1, 1, 128), "deepseek-v4-flash": (43, 1, 1, 512),
    "gemma-3n-e4b": (20, 2, 2, 256), "gemma-4-31b": (50, 2, 16, 256), "gemma-4-31b-full": (10, 2, 4, 512),
    "glm-5": (78, 1, 1, 576), "glm-5-indexer": (78, 1, 1, 128), "kimi-linear-48b": (7, 1, 1, 576),
    "mimo-v2-flash": (9, 1, 4, 192), "mimo-v2-flash-swa": (39, 1, 8, 192), "minimax-m2": (62, 2, 8, 128),
    "minimax-m3": (60, 2, 4, 128), "nemotron-3-nano": (6, 2, 2, 128), "qwen3-next-80b": (12, 2, 2, 256),
    "qwen3.5-35b-a3b": (10, 2, 2, 256), "qwen3.5-397b-a17b": (15, 2, 2, 256),
}  # fmt: skip

#: Of which `hd` is the size of K, and V of a token and head lies behind it.
SIDE_BY_SIDE = ("mimo-v2-flash", "mimo-v2-flash-swa")

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
    assert shape.dtype == ("uint8" if name.endswith("-indexer") else "bfloat16")
    assert shape.nt == (64 if shape.no == 1 and name not in SIDE_BY_SIDE else 16)
    said = yaml.load((data_dir() / "shapes" / f"{name}.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert said["title"] and said["read_from"].startswith("config.json of ")
    assert said["tp"][0] == "1"


def test_bytes_a_token() -> None:
    for name in sorted(PUBLISHED):
        with in_case(name):
            _check_bytes_a_token(name)


def _check_bytes_a_token(name: str) -> None:
    shape = kvbm.load_shape(name)
    assert shape.nbytes == PUBLISHED[name] * shape.nt


def test_ranks() -> None:
    """A rank holds the model's shape with its share of the heads, or one head if there are fewer heads than ranks."""
    for name in [name for name in kvbm.shape_names() if "/" in name]:
        with in_case(name):
            _check_ranks(name)


def _check_ranks(name: str) -> None:
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
    """Every head is held by equally many neighbouring ranks, in order; each rank holds equally many heads."""
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

    from kvbm.layout import shapes

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
    "text",
    [None, 7, "", "n" * 5000, "a\0b", "\ud800", "nl=" + "9" * 5000, "llama-3.1-8b,nt=" + "9" * 19, "llama-3.1-8b/tp" + "9" * 5000,
     "nl=999999999,no=999999999,nh=999999999,nt=1,hd=1", "llama-3.1-8b," + "n" * 5000 + "=1",
     "llama-3.1-8b,nt=\u0663\u0662"],
    ids=lambda text: str(text)[:30].encode("unicode_escape").decode(),
)  # fmt: skip
def test_what_is_no_shape(text: object) -> None:
    with pytest.raises(kvbm.SpecError) as error:
        kvbm.load_shape(text)  # type: ignore[arg-type]
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None, 1 << 62, -(10**5000), 10**5000], ids=type)
def test_what_is_no_size(size: object) -> None:
    with pytest.raises(kvbm.SpecError):
        kvbm.BlockShape(size, 2, 2, 2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [[], {}, None, 7, "float7", "n" * 5000])
def test_what_is_no_dtype(dtype: object) -> None:
    with pytest.raises(kvbm.DTypeError) as error:
        kvbm.BlockShape(1, 2, 2, 2, 2, dtype)  # type: ignore[arg-type]
    assert len(str(error.value)) < 500


@given(
    st.lists(
        st.sampled_from(
            [*"=,/", "nl", "no", "nh", "nt", "hd", "dtype", "tp", "llama-3.1-8b", "8", "0", "-1", "int4", "²"]
        )
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_any_text(text: str) -> None:
    with contextlib.suppress(kvbm.SpecError, kvbm.DTypeError):
        assert kvbm.load_shape(text).nbytes > 0
