"""What an engine of SGLang says of its model, without SGLang: modules with the names that are imported take its place."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvbm.integrations
from kvbm import BindError
from kvbm.store.keys import key_of_json

NAME = "kvbm.integrations.sglang"
FILE = {"model_type": "llama", "rms_norm_eps": 1e-6, "auto_map": {"AutoModel": "modeling_x.Model"}}


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; the package beside it needs all of SGLang, and is not imported."""
    def of_arguments(given: Any) -> Any:
        held = json.loads(Path(given.model_path, "config.json").read_text())
        return SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: held), model_path=given.model_path, revision=None, dtype="torch.bfloat16",
            quantization=None, context_len=100,
        )  # fmt: skip

    for name, held in {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.arg_groups": {}, "sglang.srt.configs": {},
        "sglang.srt.arg_groups.model_override_base": {"resolving_view": lambda given: given},
        "sglang.srt.configs.model_config": {"ModelConfig": SimpleNamespace(from_server_args=of_arguments)},
        "sglang.srt.runtime_context": {"get_server_args": lambda: None}, NAME: {"__path__": []},
    }.items():  # fmt: skip
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    path = Path(kvbm.integrations.__path__[0], "sglang", "identity.py")
    spec = importlib.util.spec_from_file_location(f"{NAME}.identity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FILE))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "modeling_x.py").write_text("1")
    return folder


def arguments(files: Path, **more: Any) -> Any:
    return SimpleNamespace(**{"model_path": str(files), "load_format": "auto", "model_loader_extra_config": "{}", **more})


def test_each_option_that_changes_the_model(identity: Any, files: Path, tmp_path: Path) -> None:
    adapter, restored = tmp_path / "ad", tmp_path / "restored.pt"
    adapter.mkdir()

    def told(**more: Any) -> str:
        return key_of_json(identity.stored_model_of("", arguments(files, **more)))

    usual = identity.stored_model_of("", arguments(files))
    assert usual["more"] == {} and usual["weights"].startswith("sha256:") and len(usual["weights"]) == 39
    found = [
        told(), told(load_format="pt"), told(load_format="sharded_state"), told(trust_remote_code=True),
        told(load_format="sharded_state", model_loader_extra_config='{"pattern": "x-{rank}"}'),
    ]  # fmt: skip
    assert told(load_format="safetensors") == told(load_format=SimpleNamespace(value="auto")) == found[0]
    for text in ("one", "other"):
        (adapter / "adapter_model.safetensors").write_text(text)
        restored.write_text(text)
        (files / "modeling_x.py").write_text(text)
        found += [
            told(trust_remote_code=True), told(modelopt_checkpoint_restore_path=str(restored)),
            told(lora_paths=[f"a={adapter}"]), told(lora_paths=[{"lora_name": "b", "lora_path": str(adapter)}]),
            told(uno_lora_path=str(adapter)),
        ]  # fmt: skip
    assert len({*found}) == len(found) and told() == found[0]
    (files / "hf_quant_config.json").write_text("{}")
    assert told() not in found


def test_an_adapter_at_hugging_face_is_its_files(
    identity: Any, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        assert name == "org/ad" and options["local_files_only"]
        return str(tmp_path / "hub")

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    (tmp_path / "hub").mkdir()
    found = []
    for text in ("one", "other"):
        (tmp_path / "hub" / "adapter_model.safetensors").write_text(text)
        found.append(identity.stored_model_of("", arguments(files, lora_paths=["org/ad"]))["more"]["adapters"])
    assert [*found[0]] == ["org/ad"] and found[0] != found[1]


@pytest.mark.parametrize(
    "more", [{"lora_paths": ["a=/absent"]}, {"lora_paths": [{"lora_path": "~"}]}, {"uno_lora_path": "/absent"}]
)
def test_an_adapter_without_files_is_refused(
    identity: Any, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(BindError, match=r"SGLang: the adapter '.*' has no files here .*; expected a folder with its weights"):
        identity.stored_model_of("mine", arguments(files, **more))


@pytest.mark.parametrize("kind", ["dummy", "npcache", "remote", "remote_instance", "private"])
def test_weights_from_elsewhere_are_refused(identity: Any, files: Path, kind: str) -> None:
    with pytest.raises(BindError, match=rf"SGLang: load_format: .*{kind}.*; expected model_id in --hicache-storage"):
        identity.stored_model_of("", arguments(files, load_format=kind))
    assert identity.stored_model_of("mine", arguments(files, load_format=kind))["weights"] == "named mine"
