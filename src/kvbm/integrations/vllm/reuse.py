"""Refuse to load caches into an engine that has switched off their reuse itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform

from ...errors import BindError
from ..settings import flag_of
from .setting_names import WITHOUT_PREFIX_CACHING

__all__ = ["require_reuse"]

#: Architectures whose configuration in vLLM switches prefix caching off.
_ARCHITECTURES = ("UnlimitedOCRForCausalLM",)


def require_reuse(vllm_config: Any, extra: Mapping[str, Any]) -> None:
    """Raise `BindError` if vLLM has switched prefix caching off for this model or platform, unless a setting allows it.

    There a token that is computed after a loaded prompt may differ from the one after a computed prompt: vLLM reads the cache in
    another way than it computes a whole prompt.  Prefix caching that the user has switched off is no reason.
    """
    allowed = flag_of(extra, WITHOUT_PREFIX_CACHING, False)
    if vllm_config.cache_config.enable_prefix_caching or allowed:
        return
    if why := _why(vllm_config.model_config):
        raise BindError(
            f"vLLM has switched prefix caching off: {why}.  A prompt whose cache is loaded may then get other tokens than a "
            f'computed one, so kvbm loads none; to load them anyway, add "{WITHOUT_PREFIX_CACHING}": true to '
            "kv_connector_extra_config"
        )


def _why(model: Any) -> str:
    """Why vLLM has switched prefix caching off; empty if it was the user."""
    if not current_platform.is_cuda_alike() and getattr(model, "use_mla", False):
        where = current_platform.device_type
        return f"on this platform ({where}), it computes a prompt with a latent (MLA) in another way than it decodes"
    if not getattr(model, "is_prefix_caching_supported", True):
        return f"it does not support it for {model.model}"
    if current_platform.is_cpu() and current_platform.get_cpu_architecture().name == "RISCV":
        return "it does not support it on RISC-V"
    found = set(_ARCHITECTURES).intersection(getattr(model, "architectures", None) or ())
    return f"the caches of {', '.join(sorted(found))} depend on more than the tokens before" if found else ""
