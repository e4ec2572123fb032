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

from ..errors import BindError, printable
from ..link.model import differences, named
from ..system.cache import replacing

__all__ = [
    "describe", "folder_of", "get", "key_of", "key_of_adapter", "key_of_files", "longest_counts",
    "neighbours", "of_config", "of_model", "weights",
]  # fmt: skip

#: Names in a configuration of Hugging Face, at any depth, that change neither K nor V.
_IRRELEVANT = frozenset({
    "attention_dropout", "attn_implementation", "attn_pdrop", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "classifier_dropout", "context_len", "decoder_start_token_id", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "id2label", "initializer_range",
    "label2id", "output_attentions", "output_hidden_states", "output_router_logits", "output_scores", "pad_token_id", "prefix",
    "problem_type", "resid_pdrop", "return_dict", "return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise",
    "sep_token_id", "task_specific_params", "tie_word_embeddings", "torch_dtype", "torchscript", "transformers_version",
    "use_cache",
})  # fmt: skip

#: Kinds of RoPE that turn a position by the same angles, whatever the longest sequence is.
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "mrope", "proportional"})

#: Kinds of RoPE with other factors for long sequences.
_LONG_ROPE = frozenset({"longrope", "su"})

#: Patterns of a model's files of weights.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

#: The description in a folder of blocks; the most bytes that are read of another folder's, and the most folders that are looked at.
_DESCRIPTION, _MOST_BYTES, _MOST_FOLDERS = "content.json", 1 << 18, 64


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
    counted, ropes = of_config(config), _ropes(config)
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


def of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what does not matter."""
    return {
        name: of_config(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _IRRELEVANT and not str(name).startswith("_")
    }


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


# ---- folders of blocks ---------------------------------------------------------------------------------------------------


def key_of(model: Mapping[str, Any]) -> str:
    """A hash of the fields of a model, in hexadecimal digits: the name of what may hold its blocks."""
    return hashlib.sha256(json.dumps(named(model)).encode()).hexdigest()


def describe(folder: Path, title: str, model: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Create a folder of blocks, with a file that describes them.

    Raises
    ------
    OSError
        The folder cannot be created or written.
    """
    with replacing(folder / _DESCRIPTION) as part:
        part.write_text(json.dumps({"title": title, "model_fields": named(model), **fields}, indent=1) + "\n", encoding="utf-8")


def neighbours(folder: Path, title: str, model: Mapping[str, Any]) -> list[str]:
    """For each other folder beside this one with blocks of the same title: its name, and the fields that differ.

    They are for the log: an engine does not use the blocks of such a folder.
    """
    own, found = named(model), []
    with contextlib.suppress(OSError), os.scandir(folder.parent) as beside:
        others = (one for one in beside if one.name != folder.name and one.is_dir(follow_symlinks=False))
        for other in sorted((one for one, _ in zip(others, range(_MOST_FOLDERS), strict=False)), key=lambda one: one.name):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                description = _read(Path(other.path) / _DESCRIPTION)
                fields = description.get("model_fields")
                if description.get("title") != title or not isinstance(fields, dict):
                    continue
                if differ := differences(own, {str(field): str(value) for field, value in fields.items()}):
                    found.append(f"{printable(other.name)}: {differ}")
    return found


def _read(path: Path) -> dict[str, Any]:
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(number, "rb") as file:  # noqa: PTH123  (a descriptor)
        description = json.loads(file.read(_MOST_BYTES))
    return description if isinstance(description, dict) else {}
