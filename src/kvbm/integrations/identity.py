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
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import BindError, KvbmError, printable
from ..link.model import differences, named
from ..store.folder import described
from ..store.keys import Content, model_of, plain, relevant, ropes

__all__ = [
    "code_of", "configs_beside", "files_in", "folder_of", "get", "key_of", "key_of_adapter", "key_of_files", "longest_counts",
    "neighbours", "of_model", "stored_model", "weights",
]  # fmt: skip

#: Kinds of RoPE that turn a position by the same angles, whatever the longest sequence is.
_PLAIN_ROPE = frozenset({"default", "linear", "llama3", "mrope", "proportional"})

#: Kinds of RoPE with other factors for long sequences.
_LONG_ROPE = frozenset({"longrope", "su"})

#: Patterns of a model's files of weights.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

#: Ends of the names of files that say which file of weights holds what, and of files of a quantisation.
_INDEX, _QUANTISATION = ".index.json", ("quant_config.json", "quantize_config.json", "quantization_config.json")

#: One of several files of one model: ``x-00001-of-00002.gguf``.
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5}\.\w+)", re.DOTALL)

#: Load formats that read one set of files of a folder, or fail; and those that read other files of it.
_SAME = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"})
_OTHER = frozenset({
    "bitsandbytes", "gguf", "layered", "mistral", "pt", "runai_streamer", "runai_streamer_sharded", "sharded_state",
})  # fmt: skip

#: Names in the settings of a loader that say how it reads, and not what.
_HOW = frozenset({"concurrency", "distributed", "enable_multithread_load", "enable_weights_track", "memory_limit", "num_threads"})

#: Values of an engine's options that change nothing.
_USUAL: tuple[object, ...] = (None, False, "", "auto", "default", (), [], {})

#: The most bytes that are read of a ``config.json``, and the most folders beside one's own that are looked at.
_MOST_BYTES, _MOST_FOLDERS = 1 << 22, 64


# ---- the fields ----------------------------------------------------------------------------------------------------------


def of_model(
    config: Mapping[str, Any], dtype: object, quantization: object, quantised: object, weights: str, longest: int
) -> dict[str, Any]:
    """The fields of a target or of a draft that all engines have.

    `config` is the configuration of Hugging Face that is in effect, with the operator's overrides; `quantization` and
    `quantised` are the method of quantisation and its configuration.  `weights` is the result of `weights`, or the operator's
    name of them, and `longest` the number of tokens of the longest sequence that the engine may hold.
    """
    counted, ropes = plain(relevant(config)), _ropes(config)
    if ropes and _PLAIN_ROPE.issuperset(ropes):
        counted = _without(counted, "max_position_embeddings")
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


def _without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        key: _without(value, name) if isinstance(value, dict) and "quant" not in key else value
        for key, value in config.items()
        if key != name
    }


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


def weights(
    name: str, revision: str | None, load_format: str, downloads: str | None, settings: object = None, engine: str = ""
) -> str:
    """A hash of a model's files of weights, and how the engine chooses among them if that is not the usual way.

    A second call with the same files does not read them again.  Name, revision and downloads are as for `folder_of`, `settings`
    are those of the engine's loader: a mapping, or a text of JSON.  Where engines choose among files by rules of their own,
    `engine`, its name, counts.

    Raises `BindError` if there are no files on this machine, or the engine may not load them.
    """
    if load_format == "dummy":
        raise BindError("load_format: dummy weights have no files to tell models apart by")
    if load_format not in _SAME | _OTHER:
        raise BindError(
            f"load_format: {load_format!r:.100} may take the weights from elsewhere than from the files of the model, which are "
            "all that kvbm can compare"
        )
    chosen = _loader(settings)
    try:
        folder = folder_of(name, revision, downloads)
        found = f"sha256:{_hashed(folder, _witnesses(folder))[:32]}"
    except BindError:
        raise
    except Exception as error:  # any error of a library that searches them
        raise BindError(f"the weights of {name!r} are not found here ({type(error).__name__}: {error})") from None
    if load_format == "auto" and any(folder.glob("consolidated*.safetensors")):
        load_format = f"auto of {engine}"  # not every engine prefers them
    elif load_format in _SAME or (load_format == "gguf" and folder.suffix == ".gguf"):
        load_format = ""
    return f"{found}{load_format and f', load_format {load_format}'}{chosen and f', {chosen}'}"


def _loader(settings: object) -> str:
    """What counts of the settings of a loader, as JSON; empty if there is none.

    Raises `BindError`: they may name files that are not in the model's folder.
    """
    given: object = settings or {}
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise BindError(f"model_loader_extra_config: expected an object, got a {type(given).__name__}: it may say which weights")
    found = {str(name): value for name, value in given.items() if name not in _HOW}
    for name, text in _texts(found, ""):
        if "/" in text or ".." in text:
            raise BindError(
                f"model_loader_extra_config: {name}: expected no path, got {text!r:.100}: it may be a place of other weights than "
                "the files of the model"
            )
    return json.dumps(plain(found), sort_keys=True) if found else ""


def _texts(value: object, name: str) -> Iterator[tuple[str, str]]:
    """The texts in an object, at any depth, and the names at which they are."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, name)
    elif isinstance(value, str | os.PathLike):
        yield name, os.fspath(value)


def folder_of(name: str, revision: str | None, downloads: str | None) -> Path:
    """The folder or file of a model's weights on this machine: a path, or where Hugging Face's cache has them.

    Raises the errors of `huggingface_hub` if they are not here, and `BindError` if engines take names from another hub.
    """
    if Path(name).exists():
        return Path(name)
    for variable in ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"):
        if os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"):
            raise BindError(f"{name!r} is a name at ModelScope ({variable}), whose cache is not searched; expected a path")
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))


def key_of_adapter(path: str) -> str | None:
    """A hash of the files of an adapter, which engines find by a path, a path after ``~``, or a name at Hugging Face.

    None if there are none here: then nobody knows whether two adapters are the same, also if their names are.
    """
    with contextlib.suppress(Exception):  # any error of a library that searches them
        plain_path = Path(path).expanduser()  # as vLLM: a name is looked for only if it is no path
        folder = plain_path if plain_path.is_absolute() else folder_of(path, None, None)
        found = [folder] if folder.is_file() else sorted(one for one in folder.rglob("*") if one.is_file())
        return _hashed_adapter(folder, tuple((str(one), *_witness(one)) for one in found))
    return None


def files_in(given: object) -> dict[str, str]:
    """Hashes of the files that options name, by the names of these: a path says nothing of what is there."""
    found = {}
    for name, text in _texts(given, ""):
        with contextlib.suppress(OSError, ValueError):
            if Path(text).is_file():
                found[name] = _digest(Path(text)).hex()[:32]
    return found


def configs_beside(*folders: Path | None) -> dict[str, list[str]]:
    """Hashes of the files of a quantisation in a model's folders, by their names.

    Engines read them beside ``config.json``: ModelOpt's ``hf_quant_config.json``, for example.
    """
    found: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.json")) if folder is not None else ():
            if path.name.endswith(_QUANTISATION) and (text := _digest(path).hex()[:32]) not in found.get(path.name, ()):
                found.setdefault(path.name, []).append(text)
    return found


def code_of(config: Mapping[str, Any], names: Sequence[str], revision: str | None) -> dict[str, str]:
    """Hashes of the Python files that a model brings, by the names of the repositories that have them.

    The ``auto_map`` of its configuration says whether there is code, and in which repositories beside the model's own, which
    `names` are names or paths of: the model's and its configuration's.  Raises `BindError` if the code is not on this machine.
    """
    said = [text for name, text in _texts(config, "") if "auto_map" in name.split(".")]
    own = dict.fromkeys(names) if any("--" not in text for text in said) else {}
    places = {f"own {at}": one for at, one in enumerate(own)}
    places |= {repository: repository for text in said for repository, is_other, _ in [text.partition("--")] if is_other}
    found = {}
    for label, place in places.items():
        try:
            folder = folder_of(place, revision, None)
            files = sorted(folder.rglob("*.py"))
            found[label] = _sum(folder, files)[:32]
        except Exception as error:  # any error of a library that searches them
            raise BindError(
                f"auto_map: the code of {place!r} is not found here ({type(error).__name__}: {error}); expected it in Hugging "
                "Face's cache, or the model's folder with its Python files"
            ) from None
    return found


def key_of_files(folder: Path, more: str) -> str:
    """SHA-256 of the names and of all bytes of a model's files of weights, and of a text, in hexadecimal digits.

    The text, `more`, is everything else that influences the computation.  Raises `BindError` if there are no weights.
    """
    files = _files(folder)
    if all(path.suffix == ".json" for path in files):
        raise BindError(f"{folder} holds no weights to tell models apart by; expected a name of your own for it")
    return _sum(folder, files, more)


def _sum(folder: Path, files: list[Path], more: str = "") -> str:
    """A hash of a text and of lines as ``sha256sum`` writes them: digests and names, as engines choose files by their names."""
    root = folder.parent if folder.is_file() else folder
    whole = hashlib.sha256(more.encode())
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        for path, digest in zip(files, threads.map(_digest, files), strict=True):
            whole.update(f"{digest.hex()}  ".encode() + os.fsencode(path.relative_to(root).as_posix()) + b"\n")
    return whole.hexdigest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _files(folder: Path) -> list[Path]:
    """The files of weights of a folder, and those that say which of them hold what; all shards if one is given."""
    if folder.is_file():
        one = _SHARD.fullmatch(folder.name)
        beside = (path for path in folder.parent.iterdir() if path.is_file()) if folder.suffix == ".gguf" else ()
        shards = [
            path for path in beside
            if (one and (other := _SHARD.fullmatch(path.name)) and one.groups() == other.groups())
            or (path.name.startswith("mmproj") and path.suffix == ".gguf")
        ]  # fmt: skip
        return sorted({folder, *shards})
    ends = (*_WEIGHTS, _INDEX)
    return sorted(path for path in folder.rglob("*") if path.name.endswith(ends) and path.is_file())


def _witness(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _witnesses(folder: Path) -> tuple[tuple[Any, ...], ...]:
    return tuple((str(file), *_witness(file)) for file in _files(folder))


@functools.lru_cache(8)
def _hashed(folder: Path, files: tuple[tuple[Any, ...], ...]) -> str:  # noqa: ARG001  (files that changed are read again)
    return key_of_files(folder, "")


@functools.lru_cache(256)
def _hashed_adapter(folder: Path, files: tuple[tuple[Any, ...], ...]) -> str:  # noqa: ARG001
    config = folder / "adapter_config.json"
    return key_of_files(folder, config.read_text(encoding="utf-8") if config.exists() else "")


# ---- folders of units ----------------------------------------------------------------------------------------------------


def key_of(model: Mapping[str, Any]) -> str:
    """A hash of the fields of a model, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(named(model)).encode()).hexdigest()


def stored_model(
    config: Mapping[str, Any], files: Path | None, overrides: object, dtype: object,
    quantization: tuple[object, object], weights: str, longest: int, more: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The model of contents in a folder that engines share, by the rule of `kvbm.store.keys`.

    `config` is the configuration of Hugging Face that is in effect, and takes the place of the ``config.json`` in the folder
    `files` if there is none.  `overrides` is what the operator has changed in the configuration: fields by name, or a function.
    `quantization` is the method of quantisation, which counts if the file has none or another one, and the operator's
    configuration of it.  `weights` is the result of `weights`, or ``named`` and the operator's name of them; `longest` the
    number of tokens of the longest sequence that the engine may hold.  `more` is what else changes K and V in this engine;
    usual values (nothing, False, ``auto``, ``default``) do not count.
    """
    held = _config_of(files) or config
    found = {name: value for name, value in more.items() if value not in _USUAL}
    if overrides and isinstance(overrides, Mapping):
        found["overrides"] = {str(name): [given, config.get(name)] for name, given in overrides.items()}
    elif overrides:
        found["overrides"] = relevant(config)
    if given := files_in(overrides):
        found["files of overrides"] = given
    if quantization[1] not in _USUAL or (quantization[0] and _is_other(str(quantization[0]), held.get("quantization_config"))):
        found["quantization"] = list(quantization)
    if (chosen := longest_counts(config, longest)) is not None:
        found["longrope: long factors"] = chosen
    return model_of(weights, held, ropes(config), str(dtype).removeprefix("torch."), found)


def _is_other(method: str, held: object) -> bool:
    """True unless a method is that of a file: ``awq`` and ``awq_marlin`` are kernels for the same weights."""
    if not isinstance(held, Mapping):
        return True
    theirs, ours = (re.sub(r"\W", "_", text) for text in (str(held.get("quant_method") or ""), method))
    return theirs not in ours and ours not in theirs


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
