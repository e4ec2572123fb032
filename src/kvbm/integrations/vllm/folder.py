"""The folder of files behind host memory: its settings, and the engines whose blocks it can hold.  vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import BindError

__all__ = ["RANKS", "Settings", "require_ranks"]

#: Default tokens per unit.
UNIT_TOKENS = 16

#: Sizes in vLLM's ``parallel_config`` that must be 1.
RANKS = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")


@dataclass(frozen=True)
class Settings:
    """The settings of the folder in ``kv_connector_extra_config``.

    `most_bytes` is the limit of the bytes of all its files.  `model_key` is the operator's name of the weights; empty: their
    files are hashed.
    """

    folder: Path
    most_bytes: int
    unit_tokens: int = UNIT_TOKENS
    model_key: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings | None:
        """The settings; None if there is no folder, and `BindError` if one has a wrong type, or the folder has no limit."""
        if extra.get("folder") is None:
            if named := [name for name in ("folder_bytes", "unit_tokens", "model_key") if name in extra]:
                raise BindError(f"kv_connector_extra_config: {named[0]}: expected it only with folder: set folder, too")
            return None
        folder, key = extra["folder"], extra.get("model_key", "")
        for name, given in (("folder", folder), ("model_key", key)):
            if not isinstance(given, str) or (name == "folder" and not Path(given).is_absolute()):
                kind = "an absolute path" if name == "folder" else "a text"
                raise BindError(f"kv_connector_extra_config: {name}: expected {kind}, got {given!r:.200}")
        if extra.get("folder_bytes") is None:
            raise BindError(
                "kv_connector_extra_config: folder_bytes: expected with folder, the most bytes of all its files, got none"
            )
        for name in ("folder_bytes", "unit_tokens"):
            given = extra.get(name, UNIT_TOKENS if name == "unit_tokens" else None)
            if isinstance(given, bool) or not isinstance(given, int) or given < 1:
                raise BindError(f"kv_connector_extra_config: {name}: expected a number from 1 on, got {given!r:.200}")
        return cls(Path(folder), extra["folder_bytes"], extra.get("unit_tokens", UNIT_TOKENS), key)

    def require_units(self, nt: int, chunk: int, where: str = "") -> None:
        """Raise `BindError` unless blocks of `nt` tokens are whole units, or units are whole blocks and a chunk whole units.

        A chunk is stored and loaded as a whole.  `where` names the blocks.
        """
        unit = self.unit_tokens
        if nt % unit == 0 or (unit % nt == 0 and chunk % unit == 0):
            return
        several = "" if chunk == nt else f", or several of them and divides the chunks of {chunk}"
        more = "" if unit % nt else f'; for units of several blocks set "blocks_per_chunk": {unit // nt}'
        raise BindError(
            f"folder: {where}unit_tokens: expected a number that divides the blocks of {nt} tokens{several}, got {unit}{more}"
        )


def require_ranks(sizes: Mapping[str, int]) -> None:
    """Raise `BindError` if one of the sizes, each with its name in `RANKS`, is not 1."""
    for name, size in sizes.items():
        if size != 1:
            raise BindError(
                f"folder: {name}: expected 1, got {size}; blocks of other ranks' layers or tokens are not stored in files"
            )
