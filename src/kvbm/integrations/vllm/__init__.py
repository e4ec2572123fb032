"""vLLM: offloading to host memory, prefill and decode in separate engines, and a guard for other connectors.

``docs/engines/vllm.md`` and ``docs/engines/vllm-disaggregated.md`` have the commands.
vLLM finds the connectors by an entry point; it is imported with the first of these names that is used.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from ..versions import require_version

__all__ = ["KvbmConnector", "KvbmGuard", "KvbmOffloadingConnector", "KvbmOffloadingSpec", "register"]

#: The first version that was tested, and the first newer one that was not.
VERSIONS = ("0.32", "0.34")

_HOMES = {
    "KvbmConnector": "connector", "KvbmGuard": "guard", "KvbmOffloadingConnector": "offload", "KvbmOffloadingSpec": "offload",
}  # fmt: skip


def register() -> None:
    """Tell vLLM of the connectors here, by their names; it calls this where the package is installed."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ("KvbmConnector", "KvbmGuard", "KvbmOffloadingConnector"):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, __name__, name)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm import __version__

    with suppress(ImportError):  # `require_version` says it better
        import_module(f"{__name__}.log")
    require_version("vLLM", __version__, *VERSIONS)
    register()  # MultiConnector looks the names of its connectors up, however they were found
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
