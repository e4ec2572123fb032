"""Structures of public models in vLLM on the CPU: blocks leave for host memory and come back, or the engine's reason why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_vllm_disaggregated import OURS, Models, are_right, disaggregated

from conftest import result, run

#: Name of a structure in `programs/structures.py` → how `Pool.from_vllm` binds its groups: kinds of groups and layouts.
ATTENTION = ("FullAttentionSpec", "vllm/cpu_")
WINDOW = ("SlidingWindowSpec", "vllm/cpu_")
STATE = ("MambaSpec", "")
RUN: dict[str, list[tuple[str, str]]] = {
    "gpt-oss": [WINDOW, ATTENTION],
    "gemma-4": [WINDOW, WINDOW, ATTENTION],
    "gemma-4-shared": [WINDOW, WINDOW, ATTENTION],
    "gemma-3n": [*[WINDOW] * 4, ATTENTION],
    "kimi-k2": [("MLAAttentionSpec", "vllm/mla")],
    "minimax-m2": [ATTENTION],
    "qwen3-next": [STATE, STATE, STATE, ATTENTION],
}

#: What vLLM 0.32 does not build or run on the CPU, and its reason.
NOT_RUN = {
    "deepseek-v3.2": "Sparse Attention is not supported on CPU",
    "deepseek-v4": "object has no attribute 'convert_weight_packed'",
    "glm-5": "Sparse Attention is not supported on CPU",
    "kimi-linear": "No module named 'cutlass'",
    "mimo-v2": "module 'triton' has no attribute 'next_power_of_2'",
    "nemotron-h": "is out of bounds for dimension 0",
    "qwen3.5": "failed to be inspected",
    "qwen3.5-moe": "failed to be inspected",
}

#: The structures that each run of the tests has; the others are `long`.
SHORT = ("gemma-4", "qwen3-next")

Found = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What `programs/structures.py` finds: short ones in one process, others alone, as imports of one change another's reason."""
    known: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in known:
            names = list(SHORT) if name in SHORT else [name]
            transfer = {
                "kv_connector": "KvbmOffloadingConnector", "kv_connector_module_path": "kvbm.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20, "without_prefix_caching": True},
            }  # fmt: skip
            settings = {"folder": str(tmp_path_factory.mktemp("structures")), "names": names, "new": 8}
            settings["llm"] = {"kv_transfer_config": transfer}
            known.update(result(run("structures", json.dumps(settings), limit=280)))
        return known[name]

    return of


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in RUN])
def test_blocks_leave_and_come_back(found: Found, name: str) -> None:
    """The same tokens from what was loaded, and from what has changed in host memory; without a check, the control, others."""
    told = found(name)
    assert "reason" not in told, told
    first, loaded, damaged, healed, unchecked = told["runs"]
    tokens = [one["tokens"] for one in first]
    for run_ in (loaded, damaged, healed):
        assert [one["tokens"] for one in run_] == tokens
    assert all(one["cached"] >= 128 for one in (*loaded, *healed)) and not any(one["cached"] for one in first)
    assert [one["tokens"] for one in unchecked] != tokens or unchecked[0]["logprobs"] != first[0]["logprobs"]
    counters = told["counters"]
    assert counters["vllm:kvbm_offload_loaded_blocks"] > 0 and counters["vllm:kvbm_offload_failed_blocks"] > 0
    assert len(told["groups"]) == len(RUN[name])
    for group, (kind, layout) in zip(told["groups"], RUN[name], strict=True):
        assert group["kinds"] == [kind]
        if layout:
            assert all(one.startswith(layout) for one in group["layouts"])
        else:
            assert "it has no layout here; pass group= with one of" in group["refused"]


@pytest.mark.long
@pytest.mark.parametrize("name", NOT_RUN)
def test_what_the_engine_does_not_run(found: Found, name: str) -> None:
    """Red if a newer vLLM runs it: then it belongs to `RUN`."""
    assert NOT_RUN[name] in found(name)["reason"]


#: Structures that one engine prefills and another one with blocks twice as large decodes.
APART = ("gemma-4", "gemma-3n", "gpt-oss", "minimax-m2")


@pytest.mark.long
@pytest.mark.parametrize("name", APART)
def test_prefill_and_decode(models: Models, tmp_path: Path, name: str) -> None:
    """By `KvbmConnector`: the tokens and log probabilities of one engine alone."""
    steps = [{"length": length} for length in (200, 257, 319)]
    random = {"load_format": "kvbm_random"}
    found = disaggregated(
        models(name), tmp_path, OURS, steps, (32, 64), prefill_llm=random, decode_llm=random, model="tiny"
    )
    print([[one["tokens"], one["cached"]] for one in found])
    assert are_right(found) == [True] * len(steps)
    assert all(one["cached"] == step["length"] - 1 for one, step in zip(found, steps, strict=True))
