"""Names in ``kv_connector_extra_config`` of kvbm's connectors for vLLM.  vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..settings import require_known

__all__ = ["WITHOUT_PREFIX_CACHING", "require_settings"]

#: The setting that lets a connector start where vLLM has switched prefix caching off itself, see `reuse.require_reuse`.
WITHOUT_PREFIX_CACHING = "without_prefix_caching"

#: Connector → names of its settings.  For offloading these are vLLM's, and kvbm's.
_SETTINGS = {
    "KvbmGuard": ("check_seconds", "guarded", "host", "insecure", "port", "secret_file", "unguarded"),
    "KvbmConnector": (
        "cast", "chunk_bytes", "hold_seconds", "host", "insecure", "load_seconds", "max_sms", "model", "push_layers", "push_tokens",
        "ring_bytes", "secret_file", WITHOUT_PREFIX_CACHING,
    ),
    "KvbmOffloadingConnector": (
        "block_size", "blocks_per_chunk", "cache_policy_module_path", "canonical_layout", "cpu_bytes_to_use", "eviction_policy",
        "max_tracker_size", "offload_prompt_only", "self_describing_kv_events", "spec_module_path", "spec_name", "store_threshold",
        "folder", "folder_bytes", "host_layout", "host_values", "model_key", "unit_tokens", "verify", WITHOUT_PREFIX_CACHING,
    ),
}  # fmt: skip

#: Names of ``--kv-transfer-config`` itself.
_OUTSIDE = (
    "enable_permute_local_kv", "engine_id", "kv_buffer_device", "kv_connector", "kv_connector_extra_config",
    "kv_connector_module_path", "kv_load_failure_policy", "kv_port", "kv_role",
)  # fmt: skip


def require_settings(given: Mapping[str, Any], connector: str) -> None:
    """Raise `BindError` for a setting that the connector does not have; the message says where it belongs."""
    places = dict.fromkeys(_OUTSIDE, "one level up, beside kv_connector_extra_config")
    for other, names in _SETTINGS.items():
        if other != connector:
            places |= dict.fromkeys(names, f"to {other}, in whose kv_connector_extra_config it is expected")
    require_known(given, _SETTINGS[connector], "kv_connector_extra_config", places)
