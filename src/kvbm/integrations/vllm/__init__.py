"""vLLM: offloading to host memory with kvbm as the copier (``docs/vllm.md``).

vLLM is imported with the first of these names that is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvbmOffloadingConnector", "KvbmOffloadingSpec", "register"]

_HOMES = {"KvbmOffloadingConnector": "offload", "KvbmOffloadingSpec": "offload"}


def register() -> None:
    """Tell vLLM of the connectors here, by their names; it calls this where the package is installed."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ("KvbmOffloadingConnector",):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, f"{__name__}.{_HOMES[name]}", name)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
