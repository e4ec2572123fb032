"""Pools over the caches of a running vLLM: what its layers write is where the pools say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import run

# fmt: off
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str], list[list[Any]]]] = {
    "llama": ("llama", {}, {}, [[0, [0, 1, 2, 3], "vllm/cpu_vec", "nl=4,no=2,nh=4,nt=32,hd=64,dtype=float32"]]),
    "llama, HND, blocks of 64, half": (
        "llama", {"block_size": 64, "dtype": "float16"}, {"VLLM_KV_CACHE_LAYOUT": "HND"},
        [[0, [0, 1, 2, 3], "vllm/cpu_vec", "nl=4,no=2,nh=4,nt=64,hd=64,dtype=float16"]],
    ),
    "llama, two ranks": (
        "llama", {"tensor_parallel_size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        [[0, [0, 1, 2, 3], "vllm/cpu_vec", "nl=4,no=2,nh=2,nt=32,hd=64,dtype=float32"]],
    ),
    "mla, LBNHC": (
        "mla", {"block_size": 16}, {"VLLM_KV_CACHE_LAYOUT": "LBNHC"},
        [[0, [0, 1, 2], "vllm/mla", "nl=3,no=1,nh=1,nt=16,hd=576,dtype=float32"]],
    ),
    "mla, LHBNC": (
        "mla", {"block_size": 16}, {"VLLM_KV_CACHE_LAYOUT": "LHBNC"},
        [[0, [0, 1, 2], "vllm/mla", "nl=3,no=1,nh=1,nt=16,hd=576,dtype=float32"]],
    ),
    "sliding": (
        "sliding", {}, {},
        [[index, layers, "vllm/cpu_vec", "nl=2,no=2,nh=2,nt=32,hd=64,dtype=float32"]
         for index, layers in enumerate([[0, 3], [1, 4], [2, 5]])],
    ),
}
# fmt: on


@pytest.mark.parametrize("case", [name if name == "sliding" else pytest.param(name, marks=pytest.mark.long) for name in CASES])
def test_what_layers_write(models: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    model, llm, variables, want = CASES[case]
    connector = {
        "kv_connector": "RecordingConnector", "kv_connector_module_path": "recording", "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }  # fmt: skip
    settings = {
        "llm": {"model": str(models(model)), "kv_transfer_config": connector, **llm},
        "runs": [[200, 70]],
        "new": 6,
    }
    run("generate", json.dumps(settings), **variables)
    ranks = llm.get("tensor_parallel_size", 1)
    assert len(list(tmp_path.iterdir())) == ranks
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["groups"] == want
        assert found["layout"] == {"HND": "LBHNC"}.get((name := variables.get("VLLM_KV_CACHE_LAYOUT", "LBHNC")), name)
        assert all(good for good, _ in found["writes"]), found["writes"]
        layers = sum(len(group[1]) for group in want)
        assert found["tokens"] >= 280 * layers and not found["wrong"] and found["digests"] > 8
        for at, text, heads in found["placements"]:
            assert at == rank and f"tp{ranks}" in text
            assert heads == (
                "0"
                if model == "mla"
                else {("llama", 1): "0–3", ("llama", 2): ("0–1", "2–3")[rank]}.get((model, ranks), "0–1")
            )
        if model != "mla":  # LBHNC is what vLLM says
            assert found["refused"] and not any(good for good, _ in found["refused"])
            assert "expected at byte" in found["refused"][0][1]
