"""The model of contents in a folder that engines share, from what an engine says: each that changes K and V, and no version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm import BindError
from kvbm.integrations.identity import configs_beside, stored_model, weights
from kvbm.integrations.vllm.identity import model_of, stored_model_of
from kvbm.link.model import differences, named
from kvbm.store.keys import key_of_json

FILE = {
    "model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": None, "torch_dtype": "bfloat16",
    "transformers_version": "4.40", "text_config": {"num_hidden_layers": 3, "pad_token_id": 0},
}  # fmt: skip

#: The same configuration as versions of the libraries give it to engines.
OLD = {**FILE, "rope_scaling": None, "use_cache": True, "new_default": 7}
NEW = {**FILE, "rope_theta": None, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "dtype": "bfloat16"}
LONG = {**FILE, "rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(FILE))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def told(files: Path | None, config: dict[str, Any] = NEW, **change: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "overrides": None, "dtype": "torch.bfloat16", "quantization": (None, None), "weights": "named x", "longest": 100,
        "more": {}, **change,
    }  # fmt: skip
    return stored_model(config, files, **given)


def test_versions_of_libraries_share(files: Path) -> None:
    """The file counts, and RoPE as it is in effect; what engines add to a configuration does not."""
    one = told(files)
    assert one == told(files, OLD, more={"model_impl": "auto", "x": None, "y": "", "z": []}) and one["more"] == {}
    assert one["config"] == {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000, "sliding_window": None,
                             "text_config": {"num_hidden_layers": 3}}  # fmt: skip
    assert one["rope"] == {"": {"rope_theta": 10000, "rope_type": "default"}} and one["dtype"] == "bfloat16"


CHANGES: dict[str, dict[str, Any]] = {
    "rope in effect": {"config": {**NEW, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
    "an override": {"overrides": {"rms_norm_eps": 0.1}, "config": {**NEW, "rms_norm_eps": 0.1}},
    "an override that has no effect": {"overrides": {"rope_theta": 5e5}}, "another one": {"overrides": {"rope_theta": 1e6}},
    "a function": {"overrides": lambda config: config}, "dtype": {"dtype": "float16"}, "weights": {"weights": "named y"},
    "quantisation": {"quantization": ("fp8", None)}, "an option": {"more": {"disable_sliding_window": True}},
    "longrope": {"config": LONG, "longest": 4}, "longrope, long": {"config": LONG, "longest": 5},
}  # fmt: skip


def test_what_changes_the_model(files: Path) -> None:
    """Each alone; another file, too."""
    found = {name: key_of_json(told(files, **change)) for name, change in CHANGES.items()}
    found["as it is"] = key_of_json(told(files))
    (files / "config.json").write_text(json.dumps({**FILE, "rms_norm_eps": 2e-6}))
    found["another file"] = key_of_json(told(files))
    assert len({*found.values()}) == len(found)
    (files / "config.json").write_text(json.dumps({**FILE, "quantization_config": {"bits": 4}}))
    assert told(files, quantization=("awq", {})) == told(files, quantization=("awq_marlin", {}))  # kernels for the same weights
    (files / "config.json").write_text(json.dumps({**FILE, "quantization_config": {"quant_method": "awq"}}))
    assert told(files, quantization=("awq", None)) == told(files, quantization=("awq_marlin", None))
    assert told(files, quantization=("awq", None)) != told(files, quantization=("fp8", None))


@pytest.mark.parametrize("text", [None, "{", "[]", "[" * 100_000])
def test_without_a_file_the_configuration_in_effect_counts(files: Path, text: str | None) -> None:
    (files / "config.json").unlink()
    if text is not None:
        (files / "config.json").write_text(text)
    assert told(files) == told(None) and told(None)["config"]["rope_parameters"]["rope_theta"] == 10000
    assert told(None, {**NEW, "rms_norm_eps": 1}) != told(None)


def test_what_vllm_says(files: Path) -> None:
    """The folder of the configuration, of the weights or one of its own; neither length nor version nor blocks."""
    def engine(**model: Any) -> Any:
        held = {
            "hf_config": SimpleNamespace(to_dict=lambda: dict(NEW)), "model": str(files), "revision": None,
            "dtype": "torch.bfloat16",
            "quantization": None, "disable_sliding_window": False, "max_model_len": 1024, "hf_overrides": {}, **model,
        }  # fmt: skip
        return SimpleNamespace(model_config=SimpleNamespace(**held), load_config=SimpleNamespace(load_format="auto"))

    one = stored_model_of(engine(), "")
    assert one["weights"].startswith("sha256:") and one["more"] == {} and {**one, "weights": "named x"} == told(files)
    assert stored_model_of(engine(max_model_len=7), "") == one
    assert stored_model_of(engine(), "mine")["weights"] == "named mine"
    assert stored_model_of(engine(disable_sliding_window=True), "")["more"] == {"disable_sliding_window": True}
    other = files / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**FILE, "rms_norm_eps": 3}))
    assert stored_model_of(engine(hf_config_path=str(other)), "")["config"]["rms_norm_eps"] == 3
    assert "rope_parameters" in stored_model_of(engine(config_format="mistral"), "")["config"]


# ---- engines whose K and V differ, and whose folders look alike ----------------------------------------------------------


def engine_at(folder: Path, load_format: str = "auto", settings: object = None, **model: Any) -> Any:
    """The objects of vLLM, whose configuration is that of the folder."""
    held = json.loads((folder / "config.json").read_text())
    beside = folder / "hf_quant_config.json"
    if beside.exists() and "quantization_config" not in held:  # as vLLM does
        held["quantization_config"] = json.loads(beside.read_text())
    given = {
        "hf_config": SimpleNamespace(to_dict=lambda: json.loads(json.dumps(held))), "model": str(folder), "revision": None,
        "dtype": "torch.bfloat16", "quantization": None, "quantization_config": None, "disable_sliding_window": False,
        "max_model_len": 100, "hf_overrides": {}, "multimodal_config": None, "trust_remote_code": False, **model,
    }  # fmt: skip
    return SimpleNamespace(
        model_config=SimpleNamespace(**given), cache_config=SimpleNamespace(cache_dtype="auto"), speculative_config=None,
        load_config=SimpleNamespace(load_format=load_format, download_dir=None, model_loader_extra_config=settings or {}),
    )  # fmt: skip


def quark(activations: str) -> dict[str, Any]:
    found = {"weight": {"dtype": "fp4"}, "input_tensors": {"dtype": activations}}
    return {"quantization_config": {"quant_method": "quark", "global_quant_config": found}}


def torchao(kind: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}}


def config(**more: Any) -> dict[str, str]:
    """A file of a folder."""
    return {"config.json": json.dumps({**FILE, **more})}


def index(name: str) -> str:
    return json.dumps({"weight_map": {"w": name}})


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
MIXED = config(quantization_config={"quant_method": "modelopt"})
CODE = config(auto_map={"AutoModel": "modeling_x.Model"})
SHARDS = {"a.safetensors": "A", "b.safetensors": "B"}
INDEX = "model.safetensors.index.json"

#: Two engines: files of the folder that differ, and what else differs between the engines.
PAIRS: dict[str, tuple[dict[str, str], dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "load formats": ({"model.pt": "before"}, {"model.pt": "before"}, {}, {"load_format": "pt"}),
    "names of files": ({"a.safetensors": "A", "b.pt": "B"}, {"a.pt": "A", "b.safetensors": "B"}, {}, {}),
    "an index": ({**SHARDS, INDEX: index("a.safetensors")}, {**SHARDS, INDEX: index("b.safetensors")}, {}, {}),
    "shards by a pattern": (
        {}, {}, {"load_format": "sharded_state", "settings": {"pattern": "a-{rank}"}},
        {"load_format": "sharded_state", "settings": {"pattern": "b-{rank}"}},
    ),
    "activations of Quark": (config(**quark("fp4")), config(**quark("fp6_e3m2")), {}, {}),
    "a part's quantisation": (config(text_config=quark("fp4")), config(text_config=quark("fp6_e3m2")), {}, {}),
    "types of torchao": (config(**torchao("A")), config(**torchao("B")), {}, {}),
    "a name with _": (config(_sliding_window_pattern=2), config(_sliding_window_pattern=3), {}, {}),
    "ModelOpt's file": (
        {"hf_quant_config.json": json.dumps(MODELOPT)},
        {"hf_quant_config.json": json.dumps({**MODELOPT, "quantization": {"quant_algo": "W4A16_NVFP4"}})},
        {"quantization": "modelopt_fp4"}, {"quantization": "modelopt_fp4"},
    ),
    "ModelOpt's file of layers": (
        {**MIXED, "hf_quant_config.json": '{"quantized_layers": 1}'},
        {**MIXED, "hf_quant_config.json": '{"quantized_layers": 2}'}, {}, {},
    ),
    "a quantisation beside the checkpoint's": (
        MIXED, MIXED, {"quantization": "modelopt"},
        {"quantization": "modelopt", "quantization_config": {"linear": "fp8_per_token"}},
    ),
    "a class": ({}, {}, {}, {"model_class_overrides": {"A": "json:JSONDecoder"}}),
    "an implementation": ({}, {}, {}, {"model_impl": "transformers"}),
    "code": (
        {**CODE, "modeling_x.py": "1"}, {**CODE, "modeling_x.py": "2"},
        {"trust_remote_code": True}, {"trust_remote_code": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_two_models_that_look_alike(tmp_path: Path, case: str) -> None:
    """They have two keys in a folder, and are refused on a link."""
    engines = []
    for at, (held, options) in enumerate(zip(PAIRS[case][:2], PAIRS[case][2:], strict=True)):
        folder = tmp_path / str(at)
        folder.mkdir()
        for name, text in {"config.json": json.dumps(FILE), "model.safetensors": "weights", **held}.items():
            (folder / name).write_text(text)
        engines.append(engine_at(folder, **options))
    one, other = (key_of_json(stored_model_of(engine, "")) for engine in engines)
    assert one != other
    assert differences(*(named(model_of(engine)) for engine in engines))


def test_a_file_that_an_override_names_counts(files: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    held = tmp_path_factory.mktemp("beside") / "quant.json"
    found = []
    for text in ("1", "2"):
        held.write_text(text)
        engine = engine_at(files, hf_overrides={"quantization_config_file": str(held)})
        found.append((key_of_json(stored_model_of(engine, "")), named(model_of(engine))))
    assert found[0][0] != found[1][0]
    assert differences(found[0][1], found[1][1]).startswith("files of overrides.quantization_config_file: ")


def test_code_of_another_repository(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts by its contents; where it is not found, a folder is refused, and a link finds nothing equal."""
    (files / "config.json").write_text(json.dumps({**FILE, "auto_map": {"AutoModel": "org/code--modeling_x.Model"}}))
    engine = engine_at(files, trust_remote_code=True)

    def absent(name: str, revision: object, downloads: object) -> Path:
        raise OSError(name)

    monkeypatch.setattr("kvbm.integrations.identity.folder_of", absent)
    with pytest.raises(BindError, match="auto_map: the code of 'org/code' is not found here"):
        stored_model_of(engine, "mine")
    assert differences(*(named(model_of(engine, "mine")) for _ in range(2))).startswith("code: 'not known ")
    assert stored_model_of(engine_at(files), "mine")["more"] == {}  # without --trust-remote-code
    code = files / "code"
    code.mkdir()
    monkeypatch.setattr("kvbm.integrations.identity.folder_of", lambda *_: code)
    found = []
    for text in ("1", "2"):
        (code / "modeling_x.py").write_text(text)
        found.append(stored_model_of(engine, "mine")["more"]["code"])
    assert [*found[0]] == ["org/code"] and found[0] != found[1]


REFUSED: list[tuple[str, Callable[[Path], object], str]] = [
    ("dummy", lambda _: None, "load_format: dummy"),
    ("tensorizer", lambda _: {"tensorizer_uri": "s3://a"}, "load_format: 'tensorizer'"),
    ("npcache", lambda _: None, "load_format: 'npcache'"), ("ipc_cache", lambda _: None, "load_format: 'ipc_cache'"),
    ("of_a_plugin", lambda _: None, "load_format: 'of_a_plugin'"),
    ("sharded_state", lambda folder: {"pattern": f"{folder}/x-{{rank}}"}, "model_loader_extra_config: pattern: expected no path"),
    ("auto", lambda _: '{"a": ["../b"]}', "model_loader_extra_config: a: expected no path"),
    ("auto", lambda _: "no JSON", "model_loader_extra_config: expected an object, got a str"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "message"), REFUSED)
def test_weights_from_elsewhere_are_refused(files: Path, kind: str, settings: Callable[[Path], object], message: str) -> None:
    """Unless the operator names them; on a link two places are two models."""
    engine = engine_at(files, kind, settings(files))
    with pytest.raises(BindError, match=message):
        stored_model_of(engine, "")
    assert stored_model_of(engine, "mine")["weights"] == "named mine"
    assert kind == "dummy" or f"load_format {kind}" in model_of(engine)["weights"]


@pytest.mark.parametrize("kind", ["hf", "safetensors", "fastsafetensors", "instanttensor"])
def test_formats_that_read_the_same_files_share(files: Path, kind: str) -> None:
    usual = weights(str(files), None, "auto", None)
    assert usual == weights(str(files), None, kind, None, {"enable_multithread_load": True, "num_threads": 3}, "vLLM")
    assert usual == weights(str(files), None, "auto", None, "{}", "SGLang")
    (files / "consolidated.safetensors").write_bytes(b"others")  # vLLM's auto prefers them
    one, other = (weights(str(files), None, "auto", None, None, engine) for engine in ("vLLM", "SGLang"))
    assert len({one, other, weights(str(files), None, kind, None)}) == 3


def test_all_shards_of_a_gguf_count(tmp_path: Path) -> None:
    first, second, alien = (tmp_path / f"m-{part}.gguf" for part in ("00001-of-00002", "00002-of-00002", "00001-of-00003"))
    for file in (first, second, alien):
        file.write_bytes(b"a")
    found = [weights(str(first), None, "gguf", None), weights(str(first), None, "auto", None)]
    alien.write_bytes(b"b")
    found.append(weights(str(first), None, "gguf", None))
    assert len({*found}) == 1
    second.write_bytes(b"b")
    assert weights(str(first), None, "gguf", None) not in found


def test_names_at_modelscope_are_not_looked_for_elsewhere(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(BindError, match="'org/model' is a name at ModelScope"):
        weights("org/model", None, "auto", None)
    assert weights(str(files), None, "auto", None).startswith("sha256:") and configs_beside(files, None) == {}
