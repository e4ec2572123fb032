"""vLLM: `KvbmConnector` (``docs/disaggregate.md``); vLLM finds it by its entry point, and is imported when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from .version import require_version

__all__ = ["KvbmConnector", "register"]

_HOME = {"KvbmConnector": "connector"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm import __version__

    require_version(__version__)
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def register() -> None:
    """Tell vLLM what there is; called by vLLM, which finds it as an entry point (``vllm.general_plugins``)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector("KvbmConnector", __name__, "KvbmConnector")
