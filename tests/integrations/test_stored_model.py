"""The model of contents in a folder that engines share, from what an engine says: each that changes K and V, and no version."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm.integrations.identity import stored_model
from kvbm.integrations.vllm.identity import stored_model_of
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
