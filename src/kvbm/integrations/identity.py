"""What the K and V that an engine computes depend on: weights, configuration, adapters.  It is the same for every engine.

Engines exchange caches, and share stores, only if all of it is the same.  Each engine's module collects its fields;
`kvbm.link.model` compares them and names those that differ.  What does not change K and V may differ: parallelism, the size of
blocks, their layout, the device, the longest sequence, schedules, tokens that end a text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import BindError, KvbmError, printable
from ..link.model import differences, named
from ..store.folder import described
from ..store.keys import Content, model_of, relevant, ropes

__all__ = [
    "folder_of", "get", "key_of", "key_of_adapter", "key_of_files", "longest_counts", "neighbours", "of_model", "stored_model",
    "weights",
]  # fmt: skip

#: Kinds of RoPE that turn a position by the same angles, whatever the longest sequence is.
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "mrope", "proportional"})

#: Kinds of RoPE with other factors for long sequences.
_LONG_ROPE = frozenset({"longrope", "su"})

#: Patterns of a model's files of weights.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

#: Values of an engine's options that change nothing.
_USUAL: tuple[object, ...] = (None, False, "", "auto", "default", (), [], {})

#: The most bytes that are read of a ``config.json``, and the most folders beside one's own that are looked at.
_MOST_BYTES, _MOST_FOLDERS = 1 << 22, 64


# ---- the fields ----------------------------------------------------------------------------------------------------------


def of_model(
    config: Mapping[str, Any], dtype: object, quantization: object, quantised: object, weights: str, longest: int
) -> dict[str, Any]:
    """The fields of a target or of a draft that all engines have.

    Parameters
    ----------
    config : mapping
        The configuration of Hugging Face that is in effect: with the operator's overrides.
    dtype, quantization, quantised
        The dtype of the computation, the method of quantisation, and its configuration.
    weights : str
        `weights`, or the operator's name of them.
    longest : int
        Tokens of the longest sequence that the engine may hold.
    """
    counted, ropes = relevant(config), _ropes(config)
    if ropes and _PLAIN_ROPE.issuperset(ropes):
        _drop(counted, "max_position_embeddings")
    if (chosen := longest_counts(config, longest)) is not None:
        counted["longrope: long factors"] = chosen
    text = json.dumps(quantised, sort_keys=True, default=str) if isinstance(quantised, Mapping | list) else str(quantised)
    return {
        "config": counted, "dtype": str(dtype).removeprefix("torch."), "quantization": [str(quantization), text],
        "weights": weights,
    }  # fmt: skip


def longest_counts(config: Mapping[str, Any], longest: int) -> bool | None:
    """True if LongRoPE turns by its factors for long sequences; None if the model has none.

    Engines choose them by the longest sequence that they may hold, for all sequences.
    """
    if _LONG_ROPE.isdisjoint(_ropes(config)):
        return None
    return bool(longest > min(_numbers(config, "original_max_position_embeddings"), default=0))


def _drop(config: dict[str, Any], name: str) -> None:
    config.pop(name, None)
    for value in config.values():
        if isinstance(value, dict):
            _drop(value, name)


def _numbers(config: Mapping[str, Any], name: str) -> Iterator[int]:
    """The numbers of a name, at any depth."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, name)
        elif key == name and isinstance(value, int):
            yield value


def _ropes(config: Mapping[str, Any]) -> list[str]:
    """The kinds of RoPE in a configuration; empty if it names none."""
    found = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name in ("rope_parameters", "rope_scaling"):
                found += list(_kinds(value))
            else:
                found += _ropes(value)
    return found


def _kinds(rope: Mapping[str, Any]) -> Iterator[str]:
    inner = [one for one in rope.values() if isinstance(one, Mapping)]  # one for each kind of layer
    for one in inner or [rope]:
        yield str(one.get("rope_type", one.get("type", "default")))


def get(engine: Any, name: str) -> Any:
    """An attribute of an engine's object; None if this version of the engine does not have it: then both engines have None."""
    return getattr(engine, name, None)


# ---- files of weights ----------------------------------------------------------------------------------------------------


def weights(name: str, revision: str | None, load_format: str, downloads: str | None) -> str:
    """A hash of a model's files of weights.  A second call with the same files does not read them again.

    Raises
    ------
    BindError
        There are no files on this machine, or the engine does not load them.
    """
    if load_format == "dummy":
        raise BindError("load_format: dummy weights have no files to tell models apart by")
    try:
        folder = folder_of(name, revision, downloads)
        return f"sha256:{_hashed(folder, _witnesses(folder))[:32]}"
    except BindError:
        raise
    except Exception as error:  # any error of a library that searches them
        raise BindError(f"the weights of {name!r} are not found here ({type(error).__name__}: {error})") from None


def folder_of(name: str, revision: str | None, downloads: str | None) -> Path:
    """The folder or file of a model's weights on this machine: a path, or where Hugging Face's cache has them.

    Raises the errors of `huggingface_hub` if they are not here.
    """
    if Path(name).exists():
        return Path(name)
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))


def key_of_adapter(path: str) -> str:
    """A hash of an adapter's files; its path if there are none here."""
    try:
        folder = Path(path)
        files = tuple((str(one), *_witness(one)) for one in sorted(folder.rglob("*")) if one.is_file())
        return _hashed_adapter(path, files) if files else path
    except (OSError, BindError):
        return path


def key_of_files(folder: Path, more: str) -> str:
    """SHA-256 of all bytes of a model's files of weights and of a text, in hexadecimal digits.

    Parameters
    ----------
    folder : Path
        Folder of the model, or a file of weights.
    more : str
        A text of everything else that influences the computation.

    Raises
    ------
    BindError
        There are no weights.
    """
    if not (files := _files(folder)):
        raise BindError(f"{folder} holds no weights to tell models apart by; expected a name of your own for it")

    def digest(path: Path) -> bytes:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    whole = hashlib.sha256(more.encode())
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        for one in threads.map(digest, files):
            whole.update(one)
    return whole.hexdigest()


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.suffix in _WEIGHTS and path.is_file())


def _witness(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _witnesses(folder: Path) -> tuple[tuple[Any, ...], ...]:
    return tuple((str(file), *_witness(file)) for file in _files(folder))


@functools.lru_cache(8)
def _hashed(folder: Path, files: tuple[tuple[Any, ...], ...]) -> str:  # noqa: ARG001  (files that changed are read again)
    return key_of_files(folder, "")


@functools.lru_cache(256)
def _hashed_adapter(path: str, files: tuple[tuple[Any, ...], ...]) -> str:  # noqa: ARG001
    config = Path(path, "adapter_config.json")
    return key_of_files(Path(path), config.read_text(encoding="utf-8") if config.exists() else "")


# ---- folders of units ----------------------------------------------------------------------------------------------------


def key_of(model: Mapping[str, Any]) -> str:
    """A hash of the fields of a model, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(named(model)).encode()).hexdigest()


def stored_model(
    config: Mapping[str, Any],
    files: Path | None,
    overrides: object,
    dtype: object,
    quantization: tuple[object, object],
    weights: str,
    longest: int,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The model of contents in a folder that engines share, by the rule of `kvbm.store.keys`.

    Parameters
    ----------
    config : mapping
        The configuration of Hugging Face that is in effect.
    files : Path, optional
        The folder of the ``config.json`` that the engine has read.  If there is none, `config` takes its place.
    overrides
        What the operator has changed in the configuration: fields by name, or a function.
    dtype, quantization
        The dtype of the computation; the method of quantisation and its configuration, which count if the file has none.
    weights : str
        `weights`, or ``named`` and the operator's name of them.
    longest : int
        Tokens of the longest sequence that the engine may hold.
    more : mapping
        What else changes K and V in this engine.  Usual values (nothing, False, ``auto``, ``default``) do not count.
    """
    held = _config_of(files) or config
    found = {name: value for name, value in more.items() if value not in _USUAL}
    if overrides and isinstance(overrides, Mapping):
        found["overrides"] = {str(name): [given, config.get(name)] for name, given in overrides.items()}
    elif overrides:
        found["overrides"] = relevant(config)
    if quantization[0] and "quantization_config" not in held:
        found["quantization"] = list(quantization)
    if (chosen := longest_counts(config, longest)) is not None:
        found["longrope: long factors"] = chosen
    return model_of(weights, held, ropes(config), str(dtype).removeprefix("torch."), found)


def _config_of(folder: Path | None) -> dict[str, Any] | None:
    """The ``config.json`` in a folder; None if there is none."""
    if folder is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError), (folder / "config.json").open("rb") as file:
            found = json.loads(file.read(_MOST_BYTES))
            return found if isinstance(found, dict) else None
    return None


def neighbours(folder: Path, content: Content, model: Mapping[str, Any]) -> list[str]:
    """For each other folder beside this one with units of the same title: its name, and why they are not used.

    They are for the log.
    """
    own, found = _compared({**content.fields, "model": model}), []
    with contextlib.suppress(OSError), os.scandir(folder.parent) as beside:
        others = (one for one in beside if one.name != folder.name and one.is_dir(follow_symlinks=False))
        for other in sorted((one for one, _ in zip(others, range(_MOST_FOLDERS), strict=False)), key=lambda one: one.name):
            there = described(other.path)
            if there is None or there.title != content.title:
                continue
            with contextlib.suppress(KvbmError, RecursionError):
                if why := there.problem or differences(own, _compared(there.fields)):
                    found.append(f"{printable(other.name)}: {printable(why, 1000)}")
    return found


def _compared(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a content that tell a reader in what two differ; the fingerprint follows from the layout."""
    return named({name: value for name, value in fields.items() if name != "fingerprint"})
