"""The keys of contents and units, which name their folders for all engines: ``docs/reference/store.md`` is this rule for others.

The names of files in them are `folder.Part.name`.

A content is everything that two caches must have in common so that one can continue the other.  A unit is a fixed number of tokens
of a sequence.  No engine, no version of an engine, no tensor parallelism and no block size is part of a name.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import BindError
from ..layout import spec as layouts
from ..layout.layout import Layout
from ..layout.shapes import BlockShape

__all__ = [
    "IRRELEVANT", "LAYOUT", "PARTS", "RULE", "Chain", "Content", "key_of_json", "model_of", "plain", "relevant", "ropes",
    "salted",
]  # fmt: skip

#: The version of the rule.  It is part of every content, so folders of another version have other keys.
RULE = "kvbm-store-2"

#: Order of elements in the files, if values are the engine's.
LAYOUT = "universal"

#: Names in a configuration of Hugging Face, and in those of its parts, that change neither K nor V.  They are part of the rule.
IRRELEVANT = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_auto_class", "_class_name",
    "_commit_hash", "_diffusers_version", "_experts_implementation", "_experts_implementation_internal", "_from_model_config",
    "_name_or_path", "_output_attentions", "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "classifier_dropout", "context_len", "decoder_start_token_id", "dtype", "embd_pdrop",
    "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout",
    "id2label", "initializer_range", "label2id", "output_attentions", "output_hidden_states", "output_router_logits",
    "output_scores", "pad_token_id", "prefix", "problem_type", "resid_pdrop", "return_dict", "return_dict_in_generate",
    "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "task_specific_params", "tie_word_embeddings", "torch_dtype",
    "torchscript", "transformers_version", "use_cache",
})  # fmt: skip

#: Objects in a configuration that are those of a part of the model, also without ``model_type``.
PARTS = frozenset({
    "audio_config", "language_config", "llm_config", "talker_config", "text_config", "thinker_config", "vision_config",
})  # fmt: skip

#: The bytes before the salt in the hash that begins a salted chain.  SGLang 0.5.23 begins its own chains with the same hash.
_SALT = b"sglang-cache-namespace-v1\x00\x01"


# ---- contents ------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value of JSON in which equal numbers have one form: a number without a fraction is an integer."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _text(value: Any) -> str:
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"))


def key_of_json(value: Any) -> str:
    """SHA-256 of an object as JSON in the form of the rule, in hexadecimal digits."""
    return hashlib.sha256(_text(value).encode()).hexdigest()


def relevant(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the names in `IRRELEVANT`, which are left out of the configurations of its parts, too.

    All other objects are taken whole: in a ``quantization_config``, ``dtype`` and ``_type`` are the arithmetic.
    """
    return {
        name: relevant(value) if isinstance(value, Mapping) and _is_part(str(name), value) else value
        for name, value in config.items()
        if name not in IRRELEVANT
    }


def _is_part(name: str, value: Mapping[str, Any]) -> bool:
    return "quant" not in name and "compress" not in name and (name in PARTS or "model_type" in value)


def ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as it is in effect in a configuration: by the path of the part that has it, one form for all versions of the names.

    Examples
    --------
    >>> ropes({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'': {'factor': 2.0, 'rope_theta': 10000.0, 'rope_type': 'linear'}}
    """
    return dict(_ropes(config, ""))


def _ropes(config: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    named = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta")
    if isinstance(named, Mapping) and (named or theta is not None):
        if named and all(isinstance(one, Mapping) for one in named.values()):  # one for each kind of layer
            yield path, {str(kind): _rope(one, theta) for kind, one in named.items()}
        else:
            yield path, _rope(named, theta)
    for name, value in config.items():
        if isinstance(value, Mapping) and name not in ("rope_parameters", "rope_scaling"):
            yield from _ropes(value, f"{path}.{name}" if path else str(name))


def _rope(given: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    kind = given.get("rope_type") or given.get("type") or "default"
    found = {"rope_theta": theta, **given, "rope_type": kind}
    return {name: found[name] for name in sorted(found) if name != "type" and found[name] is not None}


def model_of(
    weights: str, config: Mapping[str, Any], rope: Mapping[str, Any], dtype: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The model of a content, as an object for JSON.

    Parameters
    ----------
    weights : str
        ``sha256:`` and a hash of the files of weights, and the load format if it counts; or ``named`` and the operator's name.
    config, rope : mapping
        The model's ``config.json``, and RoPE in effect: `ropes` of the engine's configuration.
    dtype : str
        Dtype of the computation.
    more : mapping
        Everything else that changes K and V, by name; empty in the usual case.
    """
    found = {"weights": weights, "config": relevant(config), "rope": dict(rope), "dtype": dtype, "more": dict(more)}
    return plain(found)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Content:
    """What two caches must have in common.  Units are found only by an equal content."""

    model: str  # `key_of_json` of the model: of its weights and configuration (`model_of`)
    title: str  # name of the model for readers; it is not part of the key
    layers: tuple[int, ...]  # the layers' numbers in the model
    shape: BlockShape  # shape of a unit of the whole model: all KV heads, and the tokens of a unit
    #: Order of elements in the files: heads outermost.
    layout: Layout = field(default_factory=lambda: layouts.load(LAYOUT))
    values: str = ""  # what quantised values are; empty for those of the shape's dtype

    @property
    def fields(self) -> dict[str, Any]:
        """The content as an object for JSON."""
        return {
            "rule": RULE, "model": self.model, "layers": list(self.layers), "shape": asdict(self.shape),
            "layout": self.layout.order_text, "fingerprint": self.layout.fingerprint, "values": self.values or self.shape.dtype,
        }  # fmt: skip

    @property
    def key(self) -> str:
        """SHA-256 of the content, in hexadecimal digits: the name of the folder of its units."""
        return key_of_json(self.fields)


# ---- units ---------------------------------------------------------------------------------------------------------------


def salted(salt: str) -> bytes:
    """The bytes with which the chain of a sequence begins: none without a salt, else the 32 of a hash."""
    if not salt:
        return b""
    data = salt.encode(errors="surrogatepass")
    return hashlib.sha256(_SALT + struct.pack("<Q", len(data)) + data).digest()


class Chain:
    """Keys of a sequence's units: each is SHA-256 of the key before it and of the unit's tokens.

    Parameters
    ----------
    unit : int
        Tokens of a unit.
    tokens : sequence of int
        Tokens of the sequence, from 0 to 2^32 - 1; it may grow.
    salt : str
        Sequences with different salts have different keys.

    Examples
    --------
    >>> one, other = Chain(2, [5, 6, 7, 8, 9]), Chain(2, [5, 6, 7, 8])
    >>> one.keys(0, 4) == other.keys(0, 4), len(one.keys(2, 4)), one.keys(2, 4)[0] in one.keys(0, 2)
    (True, 1, False)
    """

    def __init__(self, unit: int, tokens: Sequence[int], salt: str = "") -> None:
        self.unit = unit
        self._tokens = tokens
        self._last = salted(salt)
        self._keys: list[str] = []

    @property
    def whole(self) -> int:
        """Number of tokens in whole units."""
        return len(self._tokens) // self.unit * self.unit

    def keys(self, first: int, last: int) -> tuple[str, ...]:
        """Keys of the units of tokens `first` to `last` (exclusive); both are multiples of a unit.

        Raises `BindError` if they are not, if the range is beyond the sequence, or if a token is none.
        """
        if first % self.unit or last % self.unit or not 0 <= first <= last <= len(self._tokens):
            raise BindError(f"store: expected tokens of {len(self._tokens)}, in whole units of {self.unit}, got {first} to {last}")
        for at in range(len(self._keys) * self.unit, last, self.unit):
            tokens = self._tokens[at : at + self.unit]
            try:
                packed = struct.pack(f"<{self.unit}I", *tokens)
            except struct.error:
                raise BindError(f"store: expected tokens from 0 to 2^32 - 1, got {list(tokens)!s:.200}") from None
            self._last = hashlib.sha256(self._last + packed).digest()
            self._keys.append(self._last.hex())
        return tuple(self._keys[first // self.unit : last // self.unit])
