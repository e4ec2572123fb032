"""What two vLLM engines compare before they exchange caches, without vLLM: each field that changes K and V, and no other."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvbm import BindError
from kvbm.integrations.identity import key_of_files, longest_counts
from kvbm.integrations.vllm.identity import differing, inputs_of, model_of
from kvbm.link.model import differences, named

HELD = {
    "model_type": "llama", "hidden_size": 64, "rms_norm_eps": 1e-6, "sliding_window": None, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "layer_types": ["full_attention"] * 3,
    "eos_token_id": 2, "transformers_version": "5.0", "_name_or_path": "/a", "dtype": "float32",
    "text_config": {"pad_token_id": 0, "num_hidden_layers": 3},
}  # fmt: skip


class Config:
    """As transformers' configuration."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.held)


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """The objects of vLLM, as far as they are read."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return engine_at(tmp_path)


def engine_at(folder: Path, **held: Any) -> Any:
    model = SimpleNamespace(
        hf_config=Config({**copy.deepcopy(HELD), **held}), model=str(folder), revision=None, dtype="torch.float32",
        quantization=None, quantization_config=None, disable_sliding_window=False, max_model_len=1024, multimodal_config=None,
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model, load_config=SimpleNamespace(load_format="auto"), cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
    )  # fmt: skip


def told(one: Any, other: Any, *given: str) -> str:
    return differences(*(named(model_of(engine, *given)) for engine in (one, other)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_parameters.rope_theta: '10000' here and '500000'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, "config.rope_parameters.rope_type"),
        ({"rms_norm_eps": 1e-5}, "config.rms_norm_eps: '1e-06' here and '1e-05'"),
        ({"sliding_window": 64}, "config.sliding_window: 'null' here and '64'"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "config.layer_types"),
        ({"quantization_config": {"quant_method": "fp8"}}, "config.quantization_config.quant_method: nothing here and 'fp8'"),
        ({"text_config": {"pad_token_id": 0, "num_hidden_layers": 4}}, "config.text_config.num_hidden_layers: '3' here and '4'"),
        ({"something_new": [1]}, "config.something_new: nothing here and '[1]'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_configuration_that_differs_is_named(engine: Any, change: dict[str, Any], field: str) -> None:
    other = engine_at(Path(engine.model_config.model), **change)
    assert field in told(engine, other)
    assert field in told(engine, other, "one name")  # a name is of the weights alone


def set_at(engine: Any, path: str, value: Any) -> None:
    *names, last = path.split(".")
    for name in names:
        engine = getattr(engine, name)
    setattr(engine, last, value)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("model_config.dtype", "torch.bfloat16", "dtype"),
        ("model_config.quantization", "fp8", "quantization"),
        ("model_config.quantization_config", {"bits": 4}, "quantization"),
        ("model_config.disable_sliding_window", True, "disable_sliding_window"),
        ("cache_config.cache_dtype", "fp8_e5m2", "kv_cache_dtype: 'float32' here and 'fp8_e5m2'"),
        ("load_config.load_format", "dummy", "weights"),
        ("model_config.multimodal_config", SimpleNamespace(mm_processor_kwargs={"max_pixels": 9}), "mm_processor_kwargs.max"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_an_option_that_changes_k_and_v_is_named(engine: Any, path: str, value: Any, field: str) -> None:
    other = engine_at(Path(engine.model_config.model))
    set_at(other, path, value)
    assert field in told(engine, other)


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_id": 7}, {"transformers_version": "6"}, {"_name_or_path": "/b"}, {"max_position_embeddings": 4096},
        {"text_config": {"pad_token_id": 5, "num_hidden_layers": 3}}, {"dtype": "bfloat16"}, {"use_cache": False},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_neither_k_nor_v_may_differ(engine: Any, change: dict[str, Any]) -> None:
    assert not told(engine, engine_at(Path(engine.model_config.model), **change))


def test_with_a_cast_only_the_format_of_the_cache_may_differ(engine: Any) -> None:
    other = engine_at(Path(engine.model_config.model))
    set_at(other, "cache_config.cache_dtype", "fp8")
    plain, casts = model_of(engine), model_of(other, casts=True)
    assert plain.keys() - casts.keys() == {"kv_cache_dtype"} and casts.items() <= plain.items()


def test_parallelism_and_lengths_may_differ(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """So may the path, if the weights are the same, and fp8 may be spelt in two ways."""
    there = tmp_path_factory.mktemp("copy")
    (there / "model.safetensors").write_bytes(b"weights")
    other = engine_at(there)
    other.model_config.max_model_len = 77
    other.parallel_config = SimpleNamespace(tensor_parallel_size=8)
    other.speculative_config = SimpleNamespace(method="ngram", draft_model_config=engine.model_config)
    engine.cache_config.cache_dtype, other.cache_config.cache_dtype = "fp8", "fp8_e4m3"
    assert not told(engine, other)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_the_longest_sequence_counts_where_it_chooses_the_factors(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "long_factor": [2.0], "original_max_position_embeddings": 512}
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    short, long, longer = (engine_at(tmp_path, rope_parameters=rope) for _ in range(3))
    short.model_config.max_model_len, long.model_config.max_model_len, longer.model_config.max_model_len = 512, 513, 2048
    assert "long factors: 'false' here and 'true'" in told(short, long) and not told(long, longer)
    assert [longest_counts({"rope_parameters": rope}, most) for most in (512, 513)] == [False, True]


def test_dynamic_angles_depend_on_the_longest_position(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    one, other = (engine_at(tmp_path, rope_parameters=rope, max_position_embeddings=most) for most in (512, 1024))
    assert "max_position_embeddings: '512' here and '1024'" in told(one, other)


def test_other_weights_at_the_same_path(engine: Any) -> None:
    """One byte.  A name of the operator replaces the hash, and then two names are compared."""
    folder = Path(engine.model_config.model)
    before = named(model_of(engine))
    (folder / "model.safetensors").write_bytes(b"weightz")
    other = engine_at(folder)
    assert differences(before, named(model_of(other))).startswith("weights: 'sha256:")
    assert not differences(named(model_of(engine, "mine")), named(model_of(other, "mine")))
    assert differences(named(model_of(engine, "mine")), named(model_of(other, "yours"))).startswith("weights: 'named mine' here")
    assert "weights" in differences(before, named(model_of(other, "mine")))


def test_weights_that_are_not_here_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = engine_at(tmp_path / "s3" / "a"), engine_at(tmp_path / "s3" / "b")
    with caplog.at_level("WARNING", "vllm.kvbm"):
        assert "weights: 'of " in told(one, other)
    assert "Set model in kv_connector_extra_config" in caplog.text


def test_a_name_of_hugging_face_is_its_files(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also online, where vLLM's own function does not look for them; the same weights at a path are the same."""
    folder, asked = Path(engine.model_config.model), []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    other = engine_at(Path("someone/model"))
    assert not told(engine, other)
    expected = ("someone/model", {"revision": None, "cache_dir": None, "local_files_only": True})
    assert asked and all(one == expected for one in asked)


@pytest.mark.parametrize("given", ["", 7, ["a"]])
def test_names_that_are_none(engine: Any, given: Any) -> None:
    with pytest.raises(BindError, match="model: expected a name of the weights"):
        model_of(engine, given)


def test_a_draft_counts(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its weights and configuration, not how many tokens it guesses."""
    folder = tmp_path_factory.mktemp("draft")
    (folder / "model.safetensors").write_bytes(b"draft")
    one, other = engine, engine_at(Path(engine.model_config.model))
    one.speculative_config, other.speculative_config = (
        SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=tokens,
            draft_load_config=None,
            draft_model_config=engine_at(folder).model_config,
        )
        for tokens in (1, 4)
    )
    assert not told(one, other)
    other.speculative_config.draft_model_config = engine_at(folder, rms_norm_eps=1e-3).model_config
    assert "draft.config.rms_norm_eps" in told(one, other)
    other.speculative_config = None
    assert "draft." in told(one, other)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("", "", ""), ("adapter=1", "adapter=1", ""), ("adapter=1", "adapter=2", "adapter"), ("", "image=1", "image"),
        ("adapter=1,image=2", "image=3", "adapter, image"), ("adapter=1", "\x1b[31m\n", "\\x1b[31m\\n, adapter"),
    ],
)  # fmt: skip
def test_what_differs_of_two_requests_is_named(ours: str, theirs: str, said: str) -> None:
    assert differing(ours, theirs) == said


def test_what_the_caches_of_a_request_depend_on(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a")
    adapter = SimpleNamespace(lora_name="x", lora_path=str(tmp_path))
    picture = SimpleNamespace(modality="image", identifier="9f", mm_position=SimpleNamespace(offset=3, length=8))
    sound = SimpleNamespace(modality="audio", identifier="9f", mm_position=SimpleNamespace(offset=3, length=8))
    embeds = torch.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3))
    plain = SimpleNamespace(lora_request=None, mm_features=[], prompt_embeds=None)
    found = [
        inputs_of(SimpleNamespace(**{**vars(plain), **more}), 4)
        for more in (
            {}, {"prompt_token_ids": [1, 2, 3, 4]}, {"prompt_token_ids": [1, 2, 4, 3]}, {"prompt_token_ids": [1, 2, 3]},
            {"lora_request": adapter}, {"mm_features": [picture]}, {"mm_features": [sound]}, {"mm_features": [picture] * 2},
            {"prompt_embeds": embeds}, {"prompt_embeds": embeds.bfloat16()}, {"prompt_embeds": embeds.T},
        )
    ]  # fmt: skip
    assert inputs_of(SimpleNamespace(), 4) == inputs_of(plain, 4)
    long = SimpleNamespace(prompt_token_ids=[1, 2, 3, 4, 5])
    assert inputs_of(long, 4) == found[1] != inputs_of(long, 5)  # the first tokens count
    (tmp_path / "adapter_model.safetensors").write_bytes(b"b")  # the same name, trained again
    found.append(inputs_of(SimpleNamespace(lora_request=adapter), 4))
    assert len({*found}) == len(found) and all(found)


def test_adapters_are_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a path, by ``~`` and by a name at Hugging Face, as vLLM finds them."""
    hub = tmp_path / "hub"

    def snapshot_download(name: str, **options: Any) -> str:
        assert name == "org/ad" and options["local_files_only"]
        return str(hub)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path, folder in (("~/ad", "ad"), ("org/ad", "hub"), ("ad2", "ad2"), (str(tmp_path / "ad3"), "ad3")):
        (tmp_path / folder).mkdir()
        request, found = SimpleNamespace(lora_request=SimpleNamespace(lora_name="a", lora_path=path)), []
        for text in (b"one", b"other", b"one"):
            (tmp_path / folder / "adapter_model.safetensors").write_bytes(text)
            found.append(inputs_of(request, None))
        assert found[0] == found[2] != found[1], path
    request.lora_request.is_3d_lora_weight = True
    assert inputs_of(request, None) != found[0]


@pytest.mark.parametrize("path", ["~/absent", "org/absent", "/absent", "empty"])
def test_an_adapter_that_is_not_found_is_equal_to_none(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request goes on, without caches of others; the log says so once."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    request = SimpleNamespace(lora_request=SimpleNamespace(lora_name="a", lora_path=path))
    with caplog.at_level("WARNING", "vllm.kvbm"):
        one, other = inputs_of(request, None), inputs_of(request, None)
    assert differing(one, other) == "adapter" and caplog.text.count(f"the adapter {path} has no files here") == 1


def test_keys_of_models(tmp_path: Path) -> None:
    """The key depends on all bytes of the weights, in any files, and on the other arguments."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-1.safetensors").write_bytes(bytes(1000))
        (tmp_path / name / "model-2.bin").write_bytes(bytes(10))
    key = key_of_files(tmp_path / "a", "config")
    assert key_of_files(tmp_path / "b", "config") == key != key_of_files(tmp_path / "b", "other")
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    assert key_of_files(tmp_path / "b", "config") == key
    (tmp_path / "b" / "model-1.safetensors").write_bytes(bytes(999) + b"\1")
    assert key_of_files(tmp_path / "b", "config") != key
    (tmp_path / "none").mkdir()
    with pytest.raises(BindError, match=r"none holds no weights"):
        key_of_files(tmp_path / "none", "config")
