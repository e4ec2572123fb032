"""vLLM's native offloading with kvbm as the copier: with the engine itself, and piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import run

#: Prompts of 200 and 100 tokens; again after a reset; and the first after a part of it, which is not whole chunks.
BOTH = {"prompts": [[200, 200], [100, 100]]}
PART = {"prompts": [[200, 100]]}
ONE = {"prompts": [[200, 200]]}
STEPS = [BOTH, "reset", BOTH, "reset", "flip", BOTH, "reset", BOTH, "reset", PART, ONE]


def offload(
    model: Path, steps: list[Any], extra: dict[str, Any], *, stock: bool = False, policy: str = "", settings: Any = None, **llm: Any
) -> dict[str, Any]:
    """What `programs/offload.py` finds."""
    transfer = {
        "kv_connector": "KvbmOffloadingConnector", "kv_connector_module_path": "kvbm.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20, **extra},
    }  # fmt: skip
    if stock:  # vLLM's own connector, and the spec alone
        transfer |= {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
        transfer["kv_connector_extra_config"] |= {
            "spec_name": "KvbmOffloadingSpec",
            "spec_module_path": "kvbm.integrations.vllm",
        }
    if policy:  # one of several, which has that policy
        transfer = {
            "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": [transfer]},
        }  # fmt: skip
    settings = {"steps": steps, "new": 8, **(settings or {}), "llm": {"model": str(model), "kv_transfer_config": transfer, **llm}}
    many = llm.get("tensor_parallel_size", 1) > 1
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"} if many else {}
    printed = run("offload", json.dumps(settings), VLLM_ALLOW_INSECURE_SERIALIZATION="1", **variables)
    [line] = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


#: Name of the model, ``kv_connector_extra_config``, arguments of the engine; cached tokens of `BOTH`, which whole chunks hold, of
#: `PART`, and of `ONE` behind it: chunks are loaded from their middle on, if it is a chunk's worth.
CASES = {
    "llama": ("llama", {}, {}, [192, 96], 96, 192),
    "llama, bfloat16, blocks of 64, two a chunk, tp 2": (
        "llama", {"blocks_per_chunk": 2, "host_layout": "universal"},
        {"dtype": "bfloat16", "block_size": 64, "tensor_parallel_size": 2}, [128, 0], 0, 64,
    ),
    "sliding window, two a chunk, tokens outermost": (
        "sliding", {"blocks_per_chunk": 2, "host_layout": "operational_nhd"}, {}, [192, 64], 0, 192,
    ),
    "MLA, one copy of both ranks": ("mla", {"without_prefix_caching": True}, {"tensor_parallel_size": 2}, [192, 96], 96, 192),
}  # fmt: skip


@pytest.mark.parametrize("case", [name if name == "llama" else pytest.param(name, marks=pytest.mark.long) for name in CASES])
def test_reload(models: Callable[[str], Path], case: str) -> None:
    """What was computed comes back: the same tokens, as many cached as whole chunks of the prompt.  A flipped bit is a miss."""
    name, extra, llm, whole, some, more = CASES[case]
    found = offload(models(name), STEPS, extra, **llm)
    print(case, found["facts"], found["counters"], found["overhead"])
    tokens, cached = ([[each[what] for each in one] for one in found["runs"]] for what in ("tokens", "cached"))
    assert tokens[1:4] == [tokens[0]] * 3 and tokens[5] == tokens[0][:1]
    assert cached[2][0] < whole[0]
    assert [cached[0], cached[1], cached[3], cached[4], cached[5]] == [[0, 0], whole, whole, [some], [more]]
    counters, ranks = found["counters"], len(found["facts"])
    assert counters["vllm:kvbm_offload_failed_blocks"] >= 1
    writers = 1 if name == "mla" else ranks
    assert counters["vllm:kvbm_offload_loaded_blocks"] > counters["vllm:kvbm_offload_stored_blocks"] / writers > 0
    assert all(facts["shared"] == (name == "mla") for facts in found["facts"])
    assert {"groups": 3, "stores": 1}.items() <= found["facts"][0].items() if name == "sliding" else True


def test_a_flipped_bit_changes_tokens(models: Callable[[str], Path]) -> None:
    """Where nobody checks: the control of `test_reload`; with the spec alone, and vLLM's own connector."""
    found = offload(models("llama"), STEPS[:6], {"verify": False}, stock=True)
    first, second, flipped = found["runs"]
    assert [each["tokens"] for each in second] == [each["tokens"] for each in first]
    assert [each["cached"] for each in second] == [each["cached"] for each in flipped] == [192, 96]
    assert [each["tokens"] for each in flipped] != [each["tokens"] for each in first]


@pytest.mark.long
def test_the_spec_alone_stops(models: Callable[[str], Path]) -> None:
    """The engine stops, and says what helps: vLLM's own connector has no way out for a load that fails."""
    with pytest.raises(AssertionError, match=r"DigestError: vLLM offloading: chunks .*KvbmOffloadingConnector"):
        offload(models("llama"), STEPS[:6], {}, stock=True)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "ended"), [("recompute", "length"), ("fail", "error")])
def test_one_of_several_connectors(models: Callable[[str], Path], policy: str, ended: str) -> None:
    """There the policy is that of all: a miss, or a request that ends with an error.  Others go on, and no token is wrong."""
    found = offload(models("llama"), STEPS[:8], {}, policy=policy)
    first, second, flipped, last = found["runs"]
    assert {one["ended"] for one in (*first, *second, *last)} == {"length"}
    assert ended in {one["ended"] for one in flipped} <= {"length", ended}
    for one, wanted in zip([*second, *flipped, *last], first * 3, strict=True):
        assert one["tokens"] == wanted["tokens"] or one["ended"] == "error"
    assert found["counters"]["vllm:kvbm_offload_failed_blocks"] >= 1


@pytest.mark.parametrize(("name", "blocks"), [("llama", 26), pytest.param("sliding", 54, marks=pytest.mark.long)])
def test_preempted_requests(models: Callable[[str], Path], name: str, blocks: int) -> None:
    """An engine of fewer blocks than its requests need takes blocks away from some, while they are stored and loaded."""
    together, more = {"prompts": [[length, length] for length in (150, 170, 190, 210)]}, {"new": 150, "overhead": False}
    steps = [together, "reset", together, "reset", "flip", together]
    wide = offload(models(name), [together], {}, settings=more)
    tight = offload(models(name), steps, {}, settings=more, num_gpu_blocks_override=blocks, max_model_len=400)
    print(tight["counters"])
    assert wide["counters"]["vllm:num_preemptions"] == 0 and tight["counters"]["vllm:num_preemptions"] >= 2
    assert tight["counters"]["vllm:kvbm_offload_loaded_blocks"] > 0 and tight["counters"]["vllm:kvbm_offload_failed_blocks"] > 0
    for each in tight["runs"]:
        assert [one["tokens"] for one in each] == [one["tokens"] for one in wide["runs"][0]]
