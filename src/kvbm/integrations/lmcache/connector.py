"""vLLM's connector for LMCache, with keys that depend on all that K and V depend on."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector

from ...link.model import named
from ..identity import key_of
from ..versions import require_version
from ..vllm import VERSIONS
from ..vllm.identity import inputs_of, model_of
from ..vllm.log import logger

__all__ = ["KvbmLMCacheConnector"]

require_version("vLLM", vllm.__version__, *VERSIONS, part="lmcache")


class KvbmLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]  # neither is typed
    """As ``LMCacheMPConnector``; engines whose weights or configuration differ do not find each other's objects.

    LMCache's keys have the name of the model, the tokens, and a salt.  Here the name is followed by a hash of the weights and
    of the configuration (`kvbm.integrations.vllm.identity.model_of`), and the salt covers a request's adapter, pictures, sound
    and embeddings.

    Settings in ``kv_connector_extra_config``, besides LMCache's: ``model``, a name that no other weights have: then they are
    not read.  Raises `BindError` if the weights are not on this machine, and there is no name for them.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        given = vllm_config.kv_transfer_config.get_from_extra_config("model", None)
        fields = model_of(vllm_config, given, must=True)
        known = copy.copy(vllm_config)
        known.model_config = copy.copy(vllm_config.model_config)
        known.model_config.model = f"{vllm_config.model_config.model}-{key_of(fields)[:32]}"  # LMCache allows no @ here
        super().__init__(known, role, kv_cache_config)
        self._vllm_config = vllm_config
        logger.info("kvbm: LMCache's keys have the model %s, which is %s", known.model_config.model, named(fields))

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        known = self.request_trackers.get(request.request_id)
        tracker = super()._get_or_create_request_tracker(request)
        if tracker is not known and (inputs := inputs_of(request, None)):
            salt = f"{request.cache_salt or ''}\0{inputs}"
            tracker.cache_salt = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()[:32]
        return tracker
