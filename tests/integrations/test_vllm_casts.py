"""The setting `cast` of `KvbmConnector`, and the scales of vLLM's layers, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm import BindError
from kvbm.integrations.vllm import casts
from kvbm.planner.cast import AMAX


def engine(*layers: Any) -> tuple[Any, dict[str, int]]:
    """VLLM's object with layers ``a``, ``b``, …, and their numbers in the model."""
    named = dict(zip("abcdef", layers, strict=False))
    numbers = {name: number for number, name in enumerate(named)}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=named)), numbers


def layer(dtype: str = "fp8", k: float = 1.0, v: float = 1.0, *, heads: Any = None, latent: bool = False) -> Any:
    """As vLLM has them: for heads with scales of their own, the number on the host is the largest."""
    of = {"_k_scale": np.array(k if heads is None else heads, "f4"), "_v_scale": np.array(v, "f4")}
    more = {"kv_lora_rank": 512} if latent else {}
    return SimpleNamespace(kv_cache_dtype=dtype, _k_scale_float=k, _v_scale_float=v, **of, **more)


@pytest.mark.parametrize(
    ("given", "scale"),
    [
        (None, None), ("amax", AMAX), (0.5, kvbm.Scale(0.5)), (1, kvbm.Scale(1.0)), ([0.1, 0.2], kvbm.Scale([0.1, 0.2])),
        ({"k": [0.1, 0.2], "v": 0.5}, kvbm.Scale(k=[0.1, 0.2], v=0.5)),
    ],
)  # fmt: skip
def test_the_setting(given: Any, scale: Any) -> None:
    assert casts.cast_of({} if given is None else {"cast": given}) == scale


@pytest.mark.parametrize(
    "value",
    ["fp8", 0, -1.0, True, float("nan"), 1e40, 10**400, [], ["1"], [[1.0]], [True], {}, {"k": 1.0}, {"k": 1.0, "v": None},
     {"k": None, "v": None}, {"k": 1.0, "v": 1.0, "q": 1.0}, {"k": [1.0], "v": [1.0, 2.0]}],
)  # fmt: skip
def test_settings_that_are_none(value: Any) -> None:
    with pytest.raises(BindError, match="kv_connector_extra_config: cast: expected 'amax', a number, a list with one for each"):
        casts.cast_of({"cast": value})


def test_a_cast_has_the_scales_of_the_engine() -> None:
    """Those of fp8 are beside the cache in vLLM; values that were cast with others would be wrong."""
    one, many, of_k = kvbm.Scale(0.1), kvbm.Scale([0.1, 0.2]), kvbm.Scale(k=[0.1, 0.2], v=[0.5, 0.1])
    casts.require_scales(*engine(layer(k=0.1, v=0.1), layer("auto", 3.0, 3.0), layer("fp8_per_token_head")), one)
    casts.require_scales(*engine(layer("fp8_per_token_head")), AMAX)
    casts.require_scales(*engine(layer(k=0.1, v=0.1, heads=[0.1, 0.1])), one)
    casts.require_scales(*engine(layer(k=0.1, v=1.0, latent=True)), one)  # it has no V
    casts.require_scales(*engine(layer(k=0.1, v=0.1), layer(k=0.2, v=0.2)), many)
    casts.require_scales(*engine(layer(k=0.1, v=0.5), layer(k=0.2, v=0.1)), of_k)
    stage, layers = engine(layer("fp8_e5m2", k=0.2, v=0.1))
    casts.require_scales(stage, dict.fromkeys(layers, 1), of_k)  # the second stage of a pipeline
    casts.require_scales(*engine(layer(k=0.1, v=1.0, latent=True), layer(k=0.2, v=1.0, latent=True)), many)
    per_head = layer(k=0.1, v=0.1, heads=[0.1, 0.05])
    for wrong, cast, says in (
        (layer(k=0.1), one, r'as the numbers of layer 0: "cast": {"k": \[0.1\d*\], "v": \[1.0\]} on both sides'),
        (layer("fp8_e5m2"), one, 'layer 0: "cast": 1.0 on both sides'),
        (layer(), AMAX, 'layer 0: "cast": 1.0 on both sides'),
        (per_head, one, "layer 0: a cast has one for K and one for V of a layer, and 'a' has others for some heads"),
        (layer(k=0.2, v=0.1), many, r'"cast": {"k": \[0.2\d*\], "v": \[0.1\d*\]} on both sides'),
    ):
        with pytest.raises(BindError, match=rf"cast: .*: layer 'a' has the scales k .* and v .*{says}"):
            casts.require_scales(*engine(wrong), cast)
    latent = layer(k=0.1, latent=True)
    latent._k_scale_float = 0.2
    with pytest.raises(BindError, match=r"layer 'a' has the scales k 0.1\d*, 0.2\d*; expected"):
        casts.require_scales(*engine(latent), one)
    swapped = engine(layer(k=0.2, v=0.1), layer(k=0.1, v=0.5))
    with pytest.raises(BindError, match=r"layer 0: \"cast\": {\"k\": \[0.2\d*, 0.1\d*\], \"v\": \[0.1\d*, 0.5\]} on both sides"):
        casts.require_scales(*swapped, of_k)
    with pytest.raises(BindError, match=r"layer 'a' has .* for the layers 2, and those of the others, on both sides"):
        casts.require_scales(stage, dict.fromkeys(layers, 2), of_k)  # it has numbers for two layers
    with pytest.raises(BindError, match=r"layer 'b' has .*: \"cast\": \[0.1\d*, 0.3\d*\] on both"):
        casts.require_scales(*engine(layer(k=0.1, latent=True), layer(k=0.3, latent=True)), one)
