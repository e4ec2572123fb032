"""Settings in the wrong place of vLLM's ``--kv-transfer-config``: the message says where they belong.  Without vLLM."""

from __future__ import annotations

import pytest

from kvbm import BindError
from kvbm.integrations.vllm.setting_names import require_settings

DISAGGREGATION, OFFLOADING = "KvbmConnector", "KvbmOffloadingConnector"


@pytest.mark.parametrize(
    ("connector", "name", "says"),
    [
        (DISAGGREGATION, "folder", "folder: .*belongs to KvbmOffloadingConnector, in whose kv_connector_extra_config"),
        (DISAGGREGATION, "cpu_bytes_to_use", "cpu_bytes_to_use: .*belongs to KvbmOffloadingConnector"),
        (DISAGGREGATION, "kv_port", "kv_port: .*belongs one level up, beside kv_connector_extra_config"),
        (DISAGGREGATION, "load_second", "load_second: expected one of .*Did you mean load_seconds"),
        (OFFLOADING, "kv_load_failure_policy", "kv_load_failure_policy: .*belongs one level up"),
        (OFFLOADING, "secret_file", "secret_file: .*belongs to KvbmConnector"),
        (OFFLOADING, "folder_byte", "folder_byte: expected one of .*Did you mean folder_bytes"),
    ],
)
def test_settings_in_the_wrong_place(connector: str, name: str, says: str) -> None:
    with pytest.raises(BindError, match=f"^kv_connector_extra_config: {says}"):
        require_settings({name: 1}, connector)


def test_settings_of_a_connector() -> None:
    both = {"without_prefix_caching": True}
    require_settings({"cast": 1.0, "host": "127.0.0.1", **both}, DISAGGREGATION)
    require_settings({"folder": "/kv", "folder_bytes": 1 << 40, "eviction_policy": "lru", **both}, OFFLOADING)
