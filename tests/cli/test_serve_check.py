"""`kvbm serve-check`: numbers for small config.json files against values computed by hand; errors and exit codes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click import Context
from click.testing import CliRunner, Result

from kvbm import BindError, SpecError
from kvbm.cli.app import main
from kvbm.copy import cost_model, strategies
from kvbm.integrations.vllm import models, serving
from processes import FakeDriver

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
LLAMA, DEEPSEEK, GEMMA = (str(MODELS / f"{name}.json") for name in ("llama-3.1-8b", "deepseek-v3", "gemma-3-4b"))


@pytest.fixture(autouse=True)
def no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as on a machine without a tuning table."""
    monkeypatch.setattr(serving, "_table", lambda _: None)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["serve-check", "--vllm", *words], env={"COLUMNS": "100"})


def told(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- figures -----------------------------------------------------------------------------------------------------------


def test_llama() -> None:
    """32 layers, 8 heads of 128 elements of 2 bytes, K and V: 131,072 bytes per token; half of them on each of two ranks."""
    found = told(LLAMA, "--tp", "2", "--block-size", "32", "--host-gib", "64")
    model, engine, offloading = found["model"], found["engine"], found["offloading"]
    assert (model["layers"], model["kv"], model["heads"], model["head_size"]) == (32, 2, 8, 128)
    assert model["dtype"] == "bfloat16" and model["token_bytes"] == 131_072 and len(model["groups"]) == 1
    assert [(one["heads"], one["token_bytes"]) for one in engine["ranks"]] == [
        ([0, 1, 2, 3], 65_536),
        ([4, 5, 6, 7], 65_536),
    ]
    [pages] = engine["pages"]
    assert (pages["layout"], pages["order"], pages["page_bytes"]) == ("vllm/LBHNC", "l b h t o d", 65_536)
    host = offloading["host"]
    assert (host["bytes_a_block"], host["blocks"], host["tokens"]) == (4 << 20, 16_384, 524_288)
    store, load = offloading["copies"]
    assert (store["way"], load["way"]) == ("store", "load")
    for one in (store, load):
        assert one["bytes"] == 64 * 32 * 65_536 == 128 << 20
        assert one["vllm_descriptors"] == 64 * 32
        assert one["gbps"] is one["measured"] is None
    assert offloading["kv_transfer_config"]["kv_connector_extra_config"] == {"cpu_bytes_to_use": 64 << 30}
    assert found["disaggregation"] is None and found["refused"] == []


def test_a_latent_lies_once_on_the_host() -> None:
    """61 layers, 512 and 64 elements of 2 bytes: 70,272 bytes per token, on each of 8 ranks, and once in host memory."""
    found = told(DEEPSEEK, "--tp", "8", "--block-size", "64", "--host-gib", "1")
    assert found["model"]["token_bytes"] == 61 * 576 * 2 == 70_272 and found["model"]["kv"] == 1
    assert [one["token_bytes"] for one in found["engine"]["ranks"]] == [70_272] * 8
    assert found["engine"]["pages"][0]["layout"] == "vllm/mla"
    host = found["offloading"]["host"]
    # 70,272 × 64 = 4,497,408 = 1,098 × 4,096
    assert (host["copies"], host["bytes_a_block"], host["blocks"], host["tokens"]) == (1, 4_497_408, 238, 238 * 64)


def test_a_sliding_window_makes_groups() -> None:
    """34 layers, every sixth with full attention: 29 and 5, in seven groups of at most 5 in the same memory."""
    found = told(GEMMA, "--block-size", "16", "--host-gib", "1")
    groups = found["model"]["groups"]
    assert [len(one["layers"]) for one in groups] == [5, 5, 5, 5, 5, 4, 5]
    assert groups[0]["layers"] == [0, 7, 14, 21, 28] and groups[6]["layers"] == [5, 11, 17, 23, 29]
    assert [one["sliding_window"] for one in groups] == [1024] * 6 + [None]
    assert found["model"]["token_bytes"] == 34 * 2 * 4 * 256 * 2 == 139_264
    host = found["offloading"]["host"]
    # A block of 5 layers: 5 × 16 × 4,096 = 327,680 = 80 × 4,096
    assert (host["bytes_a_block"], host["blocks"], host["tokens"]) == (327_680, 3_276, 3_276 // 7 * 16)
    assert "7 groups" in host["notes"][0]


def test_stages_and_few_heads() -> None:
    """As vLLM does: of 34 layers on 4 stages the middle ones have 9; 4 heads on 8 ranks are held twice."""
    engine = serving.Engine(models.read(GEMMA), tp=8, pp=4)
    assert [engine.placement.shape(stage * 8).nl for stage in range(4)] == [8, 9, 9, 8]
    assert [list(engine.placement.strips(rank).h) for rank in range(8)] == [[0], [0], [1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "token"),
    [
        ("auto", "bfloat16", 131_072), ("fp8", "float8_e4m3fn", 65_536), ("fp8_e5m2", "float8_e5m2", 65_536),
        ("float16", "float16", 131_072),
    ],
)  # fmt: skip
def test_dtypes(cache_dtype: str, dtype: str, token: int) -> None:
    found = told(LLAMA, "--kv-cache-dtype", cache_dtype)
    assert (found["model"]["dtype"], found["model"]["token_bytes"]) == (dtype, token)
    assert dtype in found["engine"]["pages"][0]["shape"]


def test_ranges_of_vllm_where_layers_lie_side_by_side() -> None:
    found = told(LLAMA, "--layout", "BLHNC", "--num-blocks", "8")
    assert {one["vllm_descriptors"] for one in found["offloading"]["copies"]} == {8}
    assert found["engine"]["pages"][0]["order"] == "b l h t o d"


def test_between_engines() -> None:
    """Two ranks send half of 8,192 × 131,072 bytes each."""
    found = told(
        LLAMA, "--tp", "2", "--block-size", "32", "--to", "tp=1,block-size=64,layout=LBNHC", "--tokens", "8192"
    )
    to = found["disaggregation"]
    assert to["bytes"] == 8192 * 131_072 == 1 << 30
    assert [(one["from"], one["to"], one["bytes"]) for one in to["messages"]] == [(0, 0, 1 << 29), (1, 0, 1 << 29)]
    assert to["chunks"] == sum(one["chunks"] for one in to["messages"]) == 2 * (1 << 29) // (16 << 20)
    assert [len(one["messages"]) for one in to["plans"]] == [2] and to["plans"][0]["messages"][0]["unit"] == 32
    assert to["decode"]["engine"]["block_size"] == 64 and to["decode"]["engine"]["pages"][0]["layout"] == "vllm/LBNHC"
    assert to["prefill"]["kv_transfer_config"]["kv_connector"] == "KvbmConnector"


def test_between_engines_of_other_formats() -> None:
    """fp8 is sent: half as many bytes, in as large chunks.  Both engines have the same `cast`."""
    words = LLAMA, "--tp", "2", "--to", "tp=1,block-size=64,kv-cache-dtype=fp8", "--tokens", "8192"
    to = told(*words, "--cast", "0.5")["disaggregation"]
    assert to["bytes"] == 8192 * 131_072 // 2 and to["chunks"] == (1 << 29) // (16 << 20)
    assert to["casts"] == ["Values change from bfloat16 to float8_e4m3fn, with the scale 0.5 of the caller"]
    assert to["plans"][0]["cast"]["scale"] == 0.5
    many = {"k": [0.5] * 31 + [2.0], "v": 0.25}
    to = told(*words, "--cast", json.dumps(many))["disaggregation"]
    assert "with 64 scales of the caller, 0.25 to 2" in to["casts"][0]
    for side in ("prefill", "decode"):
        assert to[side]["kv_transfer_config"]["kv_connector_extra_config"] == {"host": "127.0.0.1", "cast": many}
    assert "  values change from bfloat16 to float8_e4m3fn" in run(*words, "--cast", "0.5").stdout
    same = told(LLAMA, "--to", "tp=1", "--cast", "0.5")["disaggregation"]
    assert same["casts"] == [] and same["bytes"] == 8192 * 131_072


def test_between_engines_a_window_is_sent_and_no_more() -> None:
    """Of 2,000 tokens in blocks of 16, those from 976 on: 1,024 before the next token, rounded down to a block."""
    found = told(GEMMA, "--to", "tp=1", "--tokens", "2000")["disaggregation"]
    layer = 2 * 4 * 256 * 2
    first = (2000 - 1024 + 1) // 16 * 16
    assert [one["bytes"] for one in found["messages"]] == [layer * n * (2000 - first) for n in (5, 5, 5, 5, 5, 4)] + [
        layer * 5 * 2000
    ]


def test_measured_speeds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from the table: 64 blocks at 50 GB/s are 50 GB/s."""
    rows = [
        cost_model.Row(direction, name, run, block, total, total / 50e9)
        for direction in ("d2h", "h2d") for name in strategies.STRATEGIES for run in (1 << 14, 1 << 20)
        for block in (1 << 20,) for total in (1 << 20, 16 << 20, 256 << 20)
    ]  # fmt: skip
    table = cost_model.Table("a GPU", "1", "2026-01-01", "0", tuple(rows))
    monkeypatch.setattr(serving, "_table", lambda _: table)
    for one in told(LLAMA)["offloading"]["copies"]:
        assert one["gbps"] == pytest.approx(50, rel=0.01) and one["measured"] == table.title
    assert "50 GB/s (a GPU, driver 1, 2026-01-01)" in run(LLAMA).output


# ---- what a transfer says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order", "tp", "host_layout"),
    [
        ("llama-3.1-8b", "LBHNC", 4, "pages"), ("llama-3.1-8b", "LBNHC", 4, "universal"), ("llama-3.1-8b", "BLHNC", 2, "pages"),
        ("gemma-3-4b", "LBHNC", 1, "pages"), ("gemma-3-4b", "LBHNC", 2, "universal"), ("deepseek-v3", "LBHNC", 1, "pages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_measured", [False, True])
def test_copies_are_those_of_a_transfer(
    fake_gpu: FakeDriver, name: str, order: str, tp: int, host_layout: str, is_measured: bool
) -> None:
    fake_gpu("serving.strategies", name, order, tp, host_layout, is_measured)


@pytest.mark.parametrize(
    ("name", "order", "tp", "host_values"),
    [("llama-3.1-8b", "LBHNC", 4, "fp8"), ("gemma-3-4b", "LBNHC", 1, "mxfp8"), ("deepseek-v3", "LBHNC", 2, "nvfp4")],
)
def test_copies_that_quantise_are_those_of_a_transfer(
    fake_gpu: FakeDriver, name: str, order: str, tp: int, host_values: str
) -> None:
    fake_gpu("serving.strategies", name, order, tp, "pages", True, host_values)


@pytest.mark.parametrize(
    ("path", "words", "values", "chunk", "copied"),
    [
        # 32 layers, 2, 8 heads, 16 tokens: 128 bytes and a scale of 4; 128 and 4 of 1; 64 and 8 of 1
        (LLAMA, ("fp8",), "fp8 e4m3, one float32 per token and head, from bfloat16", 8192 * 132, 8192 * 132),
        (LLAMA, ("mxfp8",), "fp8 e4m3, one e8m0 per 32 elements, from bfloat16", 8192 * 132, 8192 * 132),
        (LLAMA, ("nvfp4",), "fp4 e2m1, one e4m3 per 16 elements, from bfloat16", 8192 * 72, 8192 * 72),
        # 61 layers, 16 tokens: 512 bytes, 4 scales of 4, and 64 elements of 2 that are kept: 640,256 = 156.3 × 4,096
        (DEEPSEEK, ("fp8", "--tp", "8"), "fp8 e4m3, one float32 per 128 elements, from bfloat16; the last 64", 643_072, 640_256),
    ],
)  # fmt: skip
def test_quantised_values_in_host_memory(path: str, words: tuple[str, ...], values: str, chunk: int, copied: int) -> None:
    """How many blocks fit, and what a copy moves, from the sizes alone."""
    found = told(path, "--host-gib", "1", "--host-values", *words)["offloading"]
    host = found["host"]
    assert host["values"].startswith(values)
    assert (host["bytes_a_block"], host["blocks"]) == (chunk, (1 << 30) // chunk)
    assert [one["bytes"] for one in found["copies"]] == [64 * copied] * 2
    assert found["kv_transfer_config"]["kv_connector_extra_config"] == {"cpu_bytes_to_use": 1 << 30, "host_values": words[0]}
    assert values in " ".join(run(path, "--host-values", *words).output.split())


def test_files_behind_host_memory() -> None:
    """The settings are in the printed configuration; what a folder cannot hold is refused."""
    files = ("--folder", "/kv", "--folder-bytes", "2TiB")
    extra = told(LLAMA, *files)["offloading"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {
        "cpu_bytes_to_use": 64 << 30, "folder": "/kv", "folder_bytes": 2 << 40, "host_layout": "universal"
    }  # fmt: skip
    quantised = told(LLAMA, *files, "--host-values", "fp8")["offloading"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert "host_layout" not in quantised and quantised["folder"] == "/kv"
    for words, says in (
        (("--pp", "2"), "folder: pipeline_parallel_size: expected 1, got 2; blocks of other ranks' layers or tokens are not"),
        (("--tp", "16", "--dcp", "2"), "folder: decode_context_parallel_size: expected 1, got 2"),
        (("--block-size", "17"), "folder: unit_tokens: expected a number that divides the blocks of 17 tokens, got 16"),
        (("--host-layout", "pages"), "host_layout: expected a layout, as folder is set"),
    ):
        done = run(LLAMA, *files, *words)
        assert done.exit_code == BindError.exit_code and says in done.stderr, done.stderr


def test_stages_that_lack_a_group(tmp_path: Path) -> None:
    """A rank knows only the layers of its own stage: sending to another engine is a named error, not a traceback."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    path = config(tmp_path, num_hidden_layers=4, layer_types=kinds, sliding_window=64)
    done = run(path, "--pp", "3", "--to", "tp=1")
    assert done.exit_code == SpecError.exit_code
    assert "prefill: pp: expected 1 for layers of 4 groups, got 3 stages" in done.stderr


def test_groups_of_nearly_equal_kinds(tmp_path: Path) -> None:
    """5 and 4 layers of two kinds are one group each; with 6 and 4 the smaller number is the size of the groups."""
    for count, sizes in ((9, [5, 4]), (10, [4, 3, 3])):
        kinds = ["full_attention"] * 4 + ["sliding_attention"] * (count - 4)
        held = models.read(config(tmp_path, num_hidden_layers=count, layer_types=kinds[::-1], sliding_window=64))
        assert sorted((len(one.layers) for one in held.groups), reverse=True) == sizes


def test_layers_that_read_the_caches_of_others(tmp_path: Path) -> None:
    """Gemma 3n E4B: of 35 layers 20 have caches, each fifth of which sees all tokens; vLLM makes groups of 4."""
    path = str(MODELS / "gemma-3n-e4b.json")
    found = told(path)["model"]
    assert (found["layers"], found["readers"], found["heads"], found["head_size"]) == (20, 15, 2, 256)
    assert [one["sliding_window"] for one in found["groups"]] == [512] * 4 + [None]
    assert found["groups"][4]["layers"] == [4, 9, 14, 19] and found["token_bytes"] == 20 * 2 * 2 * 256 * 2
    assert "15 more layers keep no cache" in " ".join(run(path).output.split())
    done = run(path, "--pp", "2")
    assert done.exit_code == SpecError.exit_code and "pp: expected 1, as 15 layers read the caches" in done.stderr
    short = config(tmp_path, model_type="gemma3n_text", num_hidden_layers=35, num_kv_shared_layers=...)
    assert [len(one.layers) for one in models.read(short).groups] == [4] * 5


# ---- refusals ------------------------------------------------------------------------------------------------------------


def config(tmp_path: Path, **more: Any) -> str:
    held = {**json.loads(Path(LLAMA).read_text(encoding="utf-8")), **more}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not ...}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_type": "mamba2"}, "model_type: expected one whose cache is known here .* got 'mamba2'"),
        ({"model_type": ...}, "model_type: .* got None"),
        ({"index_topk": 2048}, "index_topk: the keys of an indexer.* KvbmConnector read the sizes when the engine starts"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: layers that share a cache.* when the engine starts"),
        ({"mamba_d_state": 16}, "mamba_d_state: Mamba states: .* as bytes: leave host_layout, .* KvbmConnector refuses them"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 32}, "num_kv_shared_layers: expected a number from 1 on"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: expected .* states of an encoder are not copied"),
        ({"num_hidden_layers": ...}, "num_hidden_layers: expected a number from 1 on, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a number"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: expected a number"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads: expected a number"),
        ({"num_key_value_heads": True}, "num_key_value_heads: expected a number"),
        ({"hidden_size": 100}, "head_dim: expected it"),
        ({"torch_dtype": ...}, "torch_dtype: expected float16 or bfloat16, got 'None'"),
        ({"torch_dtype": "float32"}, "pass --dtype"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "pass --kv-cache-dtype"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: expected"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types: expected"),
        ({"layer_types": [["full_attention"]] * 32}, "layer_types: expected"),
        ({"sliding_window": 512}, "sliding_window: expected layer_types"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank: expected"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "qk_rope_head_dim: expected"),
    ],
    ids=str,
)  # fmt: skip
def test_configs_that_do_not_say_it(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        models.read(config(tmp_path, **more))


#: Models with states, which a connector for prefill and decode cannot place.
WITH_STATES = {
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "minimax", "nemotron_h",
    "deepseek_v4",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(models._SIZED_BY_VLLM))
def test_models_that_vllm_sizes(tmp_path: Path, kind: str) -> None:
    """The way out is tested with the engine: tests/engines/test_vllm_models.py, and the refusals in test_vllm_connector.py."""
    bytes_alone = "KvbmOffloadingConnector copies them as bytes: leave host_layout, host_values and folder out. KvbmConnector ref"
    both = "KvbmOffloadingConnector and KvbmConnector read the sizes when the engine starts"
    says = bytes_alone if kind in WITH_STATES else both
    with pytest.raises(SpecError, match=rf"model_type: {kind}: .*{says}.*docs/engines/models\.md"):
        models.read(config(tmp_path, model_type=kind))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nothing is downloaded"):
        models.read(str(tmp_path / "none"))
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(SpecError, match=r"got no JSON|expected an object"):
            models.read(str(tmp_path))


def test_a_model_in_the_cache_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--a--b" / "snapshots" / "1"
    with pytest.raises(SpecError, match="nothing is downloaded"):
        models.read("a/b")
    folder.mkdir(parents=True)
    config(folder)
    assert models.read("a/b").shape.nl == 32
    with pytest.raises(SpecError, match="nothing is downloaded"):
        models.read("../b")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--tp", "3"), 11, "tp: expected a divisor of the 32 attention heads, got 3"),
        (("--pp", "64"), 11, "pp: expected at most 32 stages"),
        (("--tp", "4", "--dcp", "3"), 11, "dcp: expected a divisor of tp 4, got 3"),
        (("--tp", "4", "--dcp", "2"), 11, "expected the ranks of a group to hold one head"),
        (("--layout", "HND"), 11, "layout: expected one of LBHNC"),
        (("--kv-cache-dtype", "nvfp4"), 11, "kv-cache-dtype: expected one of auto"),
        (("--to", "tp"), 11, "--to: expected tpN, ppN, dcpN, ntN, block-size=N, layout=…, kv-cache-dtype=…, backend=…, got 'tp'"),
        (("--to", "sp=2"), 11, "--to: expected tpN, .*, got 'sp=2'"),
        (("--to", "tp=0"), 11, "--to: tp: expected a number"),
        (("--to", "tp=1,tp=2"), 11, "--to: tp: expected once"),
        (("--host-layout", "none"), 11, "none"),
        # told beside the rest
        (("--host-gib", "0.001"), 14, "refused: KvbmOffloadingConnector: host-gib: expected at least 2097152 bytes"),
        (("--layout", "LHBNC"), 14, "refused: KvbmOffloadingConnector: .*heads of a page lie apart"),
        (("--host-values", "fp9"), 14, "refused: KvbmOffloadingConnector: .*host_values: expected one of fp8, .* got 'fp9'"),
        (("--host-values", "fp8", "--host-layout", "nhd"), 14, "host_layout: expected none beside host_values, .* got 'nhd'"),
        (("--host-values", "fp8", "--kv-cache-dtype", "fp8"), 14, "expected a cache of bfloat16, .* got float8_e4m3fn"),
        (("--backend", "CPU_ATTN"), 14, "refused: Pool.from_vllm: backend: CPU_ATTN orders K and V by .* here: FLASH"),
        (("--backend", "ROCM_ATTN"), 14, "refused: Pool.from_vllm: .*kvbm does not know"),
        (("--tp", "16", "--dcp", "2", "--to", "tp=1,dcp=1"), 14, "refused: KvbmConnector: prefill: dcp: expected 1, got 2"),
        (("--to", "tp=16,dcp=2"), 14, "refused: KvbmConnector: decode: dcp: expected 1, got 2"),
        (("--to", "kv-cache-dtype=fp8"), 13, "refused: KvbmConnector: "),
        (("--to", "kv-cache-dtype=fp8", "--cast", "amax"), 13, "refused: KvbmConnector: .*no plane of scales takes part"),
        (("--to", "kv-cache-dtype=fp8", "--cast", "[1, 2]"), 13, "refused: KvbmConnector: .*for each of the 32 layers of the mod"),
        (("--to", "backend=CPU_ATTN"), 14, "refused: KvbmConnector: decode: .*CPU_ATTN"),
        (("--tp", "16", "--dcp", "2", "--to", "tp1"), 11, "--to: dcp: expected a divisor of tp 1, got 2"),
        (("--cast", "1.0"), 2, "--cast goes with --to"),
        (("--block-size", "17"), 14, "refused: vLLM: block-size: expected a multiple of 16 for FLASH_ATTN, got 17"),
        (("--tokens-per-block", "32"), 2, "No such option.*--tokens-per-block.*--block-size"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(words: tuple[str, ...], code: int, message: str) -> None:
    done = run(LLAMA, *words)
    assert done.exit_code == code, done.output
    assert re.search(message, done.stderr.replace("\n", " ")), done.stderr


def test_block_sizes_that_vllm_takes() -> None:
    """Those of the kernels of each backend, as vLLM's `supports_block_size` has them; a backend that is not known has no limit."""
    for name, size, taken in (("FLASHMLA", 64, True), ("FLASHMLA", 32, False), ("TRITON_MLA", 32, True), ("CPU_MLA", 17, True)):
        engine = serving.Engine(models.read(DEEPSEEK), nt=size, backend=name)
        if taken:
            engine.require_block_size()
        else:
            with pytest.raises(BindError, match="--to: block-size: expected a multiple of 64 for FLASHMLA, got 32"):
                engine.require_block_size("--to: ")


def test_other_refusals() -> None:
    """Groups of a hybrid model on several stages; several kinds of blocks in a layout with several arrays per block."""
    done = run(GEMMA, "--pp", "2", "--to", "tp=1")
    assert done.exit_code == 11 and "KvbmConnector" in done.stderr and "2 stages" in done.stderr
    assert "Offloading:" in done.stdout and "Prefill and decode" not in done.stdout
    with pytest.raises(BindError, match="expected a layout with one array a block"):
        list(serving._pairs(serving.Engine(models.read(DEEPSEEK), tp=2), 0, "vllm/mla"))


# ---- what is printed -----------------------------------------------------------------------------------------------------


def test_each_command_is_printed() -> None:
    """Red: those of both connectors in one engine were in the JSON alone."""
    found = json.loads(run(LLAMA, "--to", "block-size=32", "--json").stdout)
    lines = run(LLAMA, "--to", "block-size=32").stdout.splitlines()
    for name in ("disaggregation", "together"):
        for side in ("prefill", "decode"):
            assert found[name][side]["command"] in lines, (name, side)
    assert found["offloading"]["command"] in lines


SCHEMA = {
    "type": "object", "additionalProperties": False,
    "required": ["model", "engine", "offloading", "disaggregation", "together", "refused"],
    "properties": {
        "model": {
            "type": "object",
            "required": ["name", "type", "layers", "kv", "heads", "head_size", "dtype", "token_bytes", "groups"],
        },
        "engine": {
            "type": ["object", "null"],
            "required": ["tp", "pp", "dcp", "block_size", "layout", "kv_cache_dtype", "ranks", "pages"],
        },
        "offloading": {
            "type": ["object", "null"], "required": ["host", "copies", "kv_transfer_config", "command"],
            "properties": {"copies": {"items": {
                "required": ["way", "stage", "groups", "blocks", "bytes", "kernels", "strategy", "launches", "descriptors",
                             "vllm_descriptors", "gbps", "measured"],
                "properties": {"gbps": {"type": ["number", "null"]}, "strategy": {"enum": list(strategies.STRATEGIES)}},
            }}},
        },
        "disaggregation": {
            "type": ["object", "null"],
            "required": ["prefill", "decode", "tokens", "bytes", "chunks", "messages", "plans", "proofs", "casts"],
            "properties": {"messages": {"items": {"required": ["group", "from", "to", "bytes", "chunks"]}}},
        },
        "together": {
            "type": ["object", "null"], "required": ["prefill", "decode"],
            "additionalProperties": {"required": ["kv_transfer_config", "command"]},
        },
        "refused": {"type": "array", "items": {"required": ["what", "why", "error"]}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [(LLAMA,), (DEEPSEEK, "--tp", "4", "--to", "tp=2"), (GEMMA, "--pp", "2", "--to", "tp=1"), (LLAMA, "--host-gib", "0.001")],
)  # fmt: skip
def test_json_has_its_schema(words: tuple[str, ...]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(run(*words, "--json").stdout), SCHEMA)


def test_commands_are_lines_for_a_shell() -> None:
    """Each command is one line, and its JSON is that of the output."""
    words = (DEEPSEEK, "--tp", "2", "--to", "tp=1")
    found = told(*words)
    lines = run(*words).stdout.splitlines()
    for one in (found["offloading"], found["disaggregation"]["prefill"], found["disaggregation"]["decode"]):
        assert one["command"] in lines
        split = shlex.split(one["command"])
        assert split[:4] == ["VLLM_KV_CACHE_LAYOUT=LBHNC", "vllm", "serve", "MODEL"]  # a file of any name is no model of vLLM
        assert json.loads(split[split.index("--kv-transfer-config") + 1]) == one["kv_transfer_config"]


def test_the_model_of_a_command_is_one_that_vllm_takes(tmp_path: Path) -> None:
    """The folder of a config.json, whether the file or the folder was given."""
    (tmp_path / "config.json").write_bytes(Path(LLAMA).read_bytes())
    for given in (tmp_path, tmp_path / "config.json"):
        assert shlex.split(told(str(given))["offloading"]["command"])[3] == str(tmp_path)


def test_without_a_table_no_speed_is_told() -> None:
    printed = run(LLAMA).stdout
    assert printed.count("speed not measured on this machine (kvbm tune)") == 2 and "GB/s" not in printed


# ---- the docs ------------------------------------------------------------------------------------------------------------

TEXT = (MODELS.parents[2] / "docs" / "engines" / "serve-check.md").read_text(encoding="utf-8")


def test_the_docs_show_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODELS.parents[2])
    (block,) = re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    command, *expected, last = block.splitlines()
    words = shlex.split(command)
    assert words[:4] == ["$", "kvbm", "serve-check", "--vllm"] and last == "…"
    said = " ".join(" ".join(expected).split())  # a terminal wraps lines
    assert len(said) > 400 and " ".join(run(*words[4:]).stdout.split()).startswith(said)


def test_the_docs_name_every_option_and_dtype() -> None:
    command = main.get_command(Context(main), "serve-check")
    assert command is not None
    options = {name for option in command.params for name in option.opts}
    assert options == set(re.findall(r"`(--[\w-]+)`", TEXT)) - {"--kv-transfer-config"}
    row = next(line for line in TEXT.splitlines() if line.startswith("| `--kv-cache-dtype`"))
    assert set(models.CACHE_DTYPES) <= set(re.findall(r"`(\w+)`", row))
