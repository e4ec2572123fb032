"""Loads that fail in vLLM, with few blocks: right tokens, no engine that stands still, and what kvbm says of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import result, run

Models = Callable[[str], Path]


def pressure(model: Path, lengths: list[int], blocks: int, extra: dict[str, Any], **settings: Any) -> tuple[Any, str]:
    """What `programs/pressure.py` finds, and what it prints."""
    transfer = {
        "kv_connector": "KvbmOffloadingConnector", "kv_connector_module_path": "kvbm.integrations.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20, **extra},
    }  # fmt: skip
    llm = {"model": str(model), "num_gpu_blocks_override": blocks, "max_model_len": 600, **settings.pop("llm", {})}
    if settings.get("damage") is not None:
        llm["kv_transfer_config"] = transfer
    wanted = {"lengths": lengths, "together": 6, "new": 4, "rounds": 3, **settings, "llm": llm}
    printed = run("pressure", json.dumps({"damage": "", **wanted}), limit=600)
    return result(printed), printed


#: Model, lengths of prompts, blocks of the engine, damage, whether requests are aborted, ``kv_connector_extra_config``.
CASES = {
    "hybrid, bits": ("sliding", [150, 230, 260, 310, 350, 390, 410, 450], 60, "bit", False, {}),
    "hybrid, NaN": ("sliding", [200, 230, 330, 410], 60, "nan", False, {"host_layout": "universal"}),
    "hybrid, infinity, aborts": ("sliding", [200, 230, 260, 310, 350, 450], 60, "inf", True, {}),
    "Llama, NaN, aborts": ("llama", [40, 41, 42, 43, 44, 45, 70, 71, 72, 73, 150, 151], 40, "nan", True, {}),
    "Llama, infinity": ("llama", [40, 70, 150, 200, 250, 300], 26, "inf", False, {"host_layout": "operational_nhd"}),
}  # fmt: skip


@pytest.mark.timeout(1300)  # two engines of at most 600 s: on a busy machine they are slow, which is no failure
@pytest.mark.parametrize("case", [name if "NaN" in name else pytest.param(name, marks=pytest.mark.long) for name in CASES])
def test_failed_loads_change_no_token_and_stop_no_request(models: Models, case: str) -> None:
    """Of the requests themselves, and of others that get their blocks; an engine that stands still says what it waits for."""
    name, lengths, blocks, damage, aborts, extra = CASES[case]
    found, printed = pressure(models(name), lengths, blocks, extra, damage=damage, aborts=aborts)
    alone, _ = pressure(models(name), lengths, 400, {}, together=1, rounds=1)
    assert found["failed"] > 0 and (found["aborted"] > 0) is aborts
    assert not found["wrong"] and {**alone["first"], **found["first"]} == alone["first"]
    assert re.search(r"WARNING \d\d-\d\d \d\d:\d\d:\d\d \[\S*offload\.py:\d+\] kvbm: \d+ chunks of host memory failed", printed)


@pytest.mark.parametrize(
    ("name", "connector", "extra", "says"),
    [
        (
            "llama", "KvbmOffloadingConnector", {"cpu_bytes_to_use": 1 << 26, "host_layuot": "universal"},
            r"kv_connector_extra_config: host_layuot: expected one of .*Did you mean host_layout or host_values\?",
        ),
        ("llama", "KvbmConnector", {"load_second": 3}, r"load_second: expected one of .*Did you mean load_seconds"),
        ("mla", "KvbmOffloadingConnector", {"cpu_bytes_to_use": 1 << 26}, r"switched prefix caching off: .*without_prefix_caching"),
        ("mla", "KvbmConnector", {}, r"switched prefix caching off: .*\"without_prefix_caching\": true"),
    ],
)  # fmt: skip
def test_refused_at_the_start(models: Models, name: str, connector: str, extra: dict[str, Any], says: str) -> None:
    """A setting that nobody reads, and an engine that has switched prefix caching off itself."""
    transfer = {
        "kv_connector": connector, "kv_connector_module_path": "kvbm.integrations.vllm", "kv_role": "kv_both", "kv_port": 0,
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    llm: dict[str, Any] = {"model": str(models(name)), "kv_transfer_config": transfer, "max_model_len": 256}
    if name == "mla":  # on CPUs with AMX vLLM would choose an attention that keeps prefix caching, and takes no float32
        llm["attention_config"] = {"backend": "CPU_MLA"}
    wanted = {"llm": llm, "lengths": [40], "together": 1, "new": 1, "rounds": 1, "damage": ""}
    with pytest.raises(AssertionError, match=says):
        run("pressure", json.dumps(wanted))
