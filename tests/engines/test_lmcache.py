"""kvbm.integrations.lmcache: kvbm's copies of blocks beside those of the installed LMCache."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import HERE, result, run

if find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed", allow_module_level=True)
warnings.simplefilter("ignore")  # while this is collected: of LMCache's imports
import torch  # noqa: E402
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection  # noqa: E402
from lmcache.v1.platform.torch_ops.mp_mem_kernels import multi_layer_block_kv_transfer as stock  # noqa: E402

import kvbm  # noqa: E402
from kvbm.integrations.lmcache import KvbmCpuDeviceSpec, KvbmDeviceSpec  # noqa: E402
from kvbm.integrations.lmcache.blocks import FORMATS  # noqa: E402
from kvbm.integrations.lmcache.ops import KvbmCpuOps, KvbmCudaOps  # noqa: E402
from kvbm.integrations.taken import lacking  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning")  # LMCache's own

NL, NB, BS, NH, HS, EACH = 3, 9, 4, 2, 8, 2
SIZES = {"b": NB, "t": BS, "h": NH, "d": HS, "o": 2, "l": NL, "s": NB * BS, "1": 1}
FUSED = {name for name in FORMATS if name.endswith(("CS", "NH_TWO_HS", "BS_TWO_HS"))} | {"NL_X_NB_BS_NH_HS"}
LATENT = {"NL_X_NB_BS_HS", "NL_X_NBBS_ONE_HS"}


def coded(shape: list[int], seed: int, dtype: Any = torch.float32) -> Any:
    """What no other element has."""
    count = torch.Size(shape).numel()
    kind = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    return (torch.arange(count, dtype=kind) + (seed << (20 if kind is torch.int32 else 8))).view(dtype).view(shape)


def engine(name: str, dtype: Any = torch.float32) -> Any:
    """Tensors as the format's name says."""
    form = FORMATS[name]
    shape = [SIZES[axis] for axis in form.dims.split()]
    if not form.table:
        return coded(shape, 1, dtype)
    tensors = [coded(shape, 1 + index, dtype) for index in range(NL * (2 if "o" in form.table else 1))]
    return [tensors[:NL], tensors[NL:]] if "o" in form.table else tensors


def flat(paged: Any) -> list[Any]:
    listed = [paged] if isinstance(paged, torch.Tensor) else paged
    return [one for entry in listed for one in (entry if isinstance(entry, list) else [entry])]


def clone(paged: Any) -> Any:
    if isinstance(paged, torch.Tensor):
        return paged.clone()
    return [clone(one) for one in paged]


def describe(name: str, dtype: Any = torch.float32, stride: int = 0) -> Any:
    desc = PageBufferShapeDesc()
    single = name in FUSED | LATENT
    desc.kv_size, desc.nl, desc.nb, desc.bs = 1 if single else 2, NL, NB, BS
    desc.nh, desc.hs, desc.element_size, desc.dtype = 1 if name in LATENT else NH, HS, dtype.itemsize, dtype
    desc.block_stride_elems = stride
    return desc


def objects(name: str, count: int, dtype: Any = torch.float32, seed: int | None = None) -> list[Any]:
    heads = 1 if name in LATENT else NH
    shape = [NL, EACH * BS, heads * HS] if name in FUSED | LATENT else [2, NL, EACH * BS, heads * HS]
    if seed is None:
        return [torch.zeros(shape, dtype=dtype) for _ in range(count)]
    return [coded(shape, seed + index, dtype) for index in range(count)]


def call(how: Any, name: str, paged: Any, held: list[Any], ids: Any, out: bool, skip: int = 0, stride: int = 0) -> None:
    dtype = flat(paged)[0].dtype
    dtype = torch.float32 if dtype in (torch.int64, torch.uint64) else dtype
    direction = TransferDirection.D2H if out else TransferDirection.H2D
    desc = describe(name, dtype, stride)
    how(paged, held, ids, torch.device("cpu"), direction, desc, EACH * BS, getattr(EngineKVFormat, name), skip)


def ours(*args: Any) -> None:
    KvbmCpuOps().multi_layer_block_kv_transfer(*args)


def pointers(tensors: list[Any]) -> Any:
    return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in FORMATS if not FORMATS[name].scale])
def test_as_lmcache_does(name: str, dtype: Any) -> None:
    """Out and in again, bit by bit what LMCache's own copy gives; an object that is not full; blocks that are skipped."""
    paged = engine(name, dtype)
    for ids, skip in (([5, 2, 7, 1], 0), ([5, 2, 7], 1), (torch.tensor([8, 0, 3]), 2)):
        expected, found = objects(name, 2, dtype), objects(name, 2, dtype)
        call(stock, name, paged, expected, ids, True, skip)
        call(ours, name, paged, found, ids, True, skip)
        assert all(map(torch.equal, found, expected)) and any(one.view(torch.int16).any() for one in found)
        held = objects(name, 2, dtype, seed=50)
        theirs, mine = clone(paged), clone(paged)
        call(stock, name, theirs, held, ids, False, skip)
        call(ours, name, mine, held, ids, False, skip)
        same = [
            torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(flat(mine), flat(theirs), strict=True)
        ]
        assert all(same) and not torch.equal(flat(mine)[0].view(torch.int16), flat(paged)[0].view(torch.int16))


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].table and not FORMATS[name].scale])
def test_pointers(name: str) -> None:
    """As compiled kernels are called: addresses of the engine's tensors and of the objects."""
    paged = engine(name)
    expected, found = objects(name, 2), objects(name, 2)
    call(stock, name, paged, expected, [5, 2, 7, 1], True)
    call(ours, name, pointers(flat(paged)), [one.data_ptr() for one in found], [5, 2, 7, 1], True)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("how", [lambda held, new: held.copy_(new), lambda held, new: np.copyto(held.numpy(), new.numpy())])
def test_a_tensor_of_pointers_may_be_written_again(how: Any) -> None:
    """By torch or behind its back: what it held for the call before is not used."""
    name, one = "NL_X_TWO_NB_BS_NH_HS", KvbmCpuOps().multi_layer_block_kv_transfer
    old, new = engine(name), clone(engine(name))
    for tensor in flat(new):
        tensor.add_(1)
    held, expected, found = pointers(flat(old)), objects(name, 2), objects(name, 2)
    call(one, name, held, [each.data_ptr() for each in found], [5, 2, 7, 1], True)
    how(held, pointers(flat(new)))
    call(one, name, held, [each.data_ptr() for each in found], [5, 2, 7, 1], True)
    call(stock, name, new, expected, [5, 2, 7, 1], True)
    assert all(map(torch.equal, found, expected))


#: vLLM's orders of memory → its views ``(layers, blocks, heads, tokens, content)`` in it.  LMCache refuses heads outside blocks.
ORDERS = {"LBHNC": "lbhtd", "LBNHC": "lbthd", "BLHNC": "blhtd", "BLNHC": "blthd", "LHBNC": "lhbtd", "BHLNC": "bhltd"}


@pytest.mark.parametrize("order", ORDERS)
def test_vllm_orders(order: str) -> None:
    """Every element of whole blocks, by its coordinates, in each of vLLM's orders."""
    axes = ORDERS[order]
    memory = coded([SIZES[axis] for axis in axes], 3)
    view = memory.permute([axes.index(axis) for axis in "lbhtd"])
    name = "NL_X_NB_NH_BS_CS"
    found = objects(name, 2)
    before = view.clone()
    call(ours, name, [*view], found, [5, 2, 7], True)
    for at, block in enumerate([5, 2, 7]):
        part = found[at // EACH][:, (at % EACH) * BS : (at % EACH + 1) * BS].view(NL, BS, NH, HS)
        assert torch.equal(part, before[:, block].permute(0, 2, 1, 3))
    call(ours, name, [*view], found, [1, 0, 8], False)
    expected = before.clone()
    expected[:, [1, 0, 8]] = before[:, [5, 2, 7]]
    assert torch.equal(view, expected)


def test_pointers_of_blocks_that_are_apart() -> None:
    """BLHNC by pointers and the step of a block: LMCache's own copy refuses it on the CPU."""
    memory = coded([NB, NL, NH, BS, HS], 3)
    name, stride = "NL_X_NB_NH_BS_CS", NL * NH * BS * HS
    found = objects(name, 1)
    layers = pointers([memory[:, layer] for layer in range(NL)])
    call(ours, name, layers, [found[0].data_ptr()], [4, 6], True, stride=stride)
    for at, block in enumerate([4, 6]):
        part = found[0][:, at * BS : (at + 1) * BS].view(NL, BS, NH, HS)
        assert torch.equal(part, memory[block].permute(0, 2, 1, 3))
    with pytest.raises(NotImplementedError):
        call(stock, name, layers, [found[0].data_ptr()], [4, 6], True, stride=stride)


def indexer(blocks: int, tokens: int, step: int, seed: int) -> tuple[list[Any], Any]:
    """Keys of DSA indexers as vLLM has them, and the tokens in them: ``(layers, blocks, tokens, 132)``.

    A block has 128 bytes of each of its tokens, then four bytes of each; `step` bytes from block to block.
    """
    rows = torch.randint(0, 256, (NL, blocks, tokens, 132), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    memory = torch.zeros((NL, blocks, step), dtype=torch.uint8)
    memory[:, :, : tokens * 128] = rows[..., :128].reshape(NL, blocks, -1)
    memory[:, :, tokens * 128 : tokens * 132] = rows[..., 128:].reshape(NL, blocks, -1)
    return [one.as_strided((blocks, tokens, 132), (step, 132, 1), one.storage_offset()) for one in memory], rows


def indexer_call(paged: Any, held: list[Any], ids: list[int], tokens: int, out: bool, step: int = 0) -> None:
    """64 tokens an object."""
    desc = PageBufferShapeDesc()
    desc.kv_size, desc.nl, desc.nb, desc.bs, desc.nh, desc.hs, desc.element_size = 1, NL, 9, tokens, 1, 132, 1
    desc.dtype, desc.block_stride_elems = torch.uint8, step
    direction = TransferDirection.D2H if out else TransferDirection.H2D
    ours(paged, held, ids, torch.device("cpu"), direction, desc, 64, EngineKVFormat.NL_X_NB_BSV_BSS, 0)


@pytest.mark.parametrize("step", [132, 132 + 12], ids=["dense", "padded"])
def test_indexers(step: int) -> None:
    """An object has tokens one after another, each with its scale, so an engine of other blocks loads them."""
    (paged, rows), ids = indexer(9, 16, 16 * step, 0), [5, 2, 7, 1, 8, 0]
    held = [torch.zeros((NL, 64, 132), dtype=torch.uint8) for _ in range(2)]
    indexer_call(paged, held, ids, 16, True)
    tokens = rows[:, ids].reshape(NL, 96, 132)
    assert torch.equal(torch.cat(held, 1)[:, :96], tokens) and not held[1][:, 32:].any()
    found = [torch.zeros_like(one) for one in held]
    indexer_call(pointers(paged), [one.data_ptr() for one in found], ids, 16, True, 16 * step)
    assert all(map(torch.equal, found, held))
    other, _ = indexer(9, 32, 32 * step, 1)
    indexer_call(other, held, [3, 0, 6], 32, False)
    back = [torch.zeros_like(one) for one in held]
    indexer_call(other, back, [3, 0, 6], 32, True)
    assert torch.equal(torch.cat(back, 1)[:, :96], tokens)
    values = other[0].as_strided((9, 32, 128), (32 * step, 128, 1))
    assert torch.equal(values[[3, 0, 6]].reshape(96, 128), tokens[0, :, :128])


def test_indexers_of_other_sizes_are_refused() -> None:
    """Of 68 bytes a token (mxfp4) LMCache says this format for none; where their scales lie is not guessed."""
    paged = [torch.zeros((9, 16, 68), dtype=torch.uint8) for _ in range(NL)]
    with pytest.raises(kvbm.BindError, match=r"contiguous blocks of 132 bytes a token, got 68"):
        indexer_call(paged, [torch.zeros((NL, 64, 68), dtype=torch.uint8)], [5, 2], 16, True)


def test_a_block_that_stands_for_none_is_written_again_and_again() -> None:
    name = "NL_X_TWO_NB_BS_NH_HS"
    held = objects(name, 2, seed=50)
    theirs, mine = engine(name), engine(name)
    call(stock, name, theirs, held, [0, 0, 0, 3], False)
    call(ours, name, mine, held, [0, 0, 0, 3], False)
    assert all(map(torch.equal, mine, theirs))


def test_what_is_not_known_is_an_error() -> None:
    name = "NL_X_TWO_NB_BS_NH_HS"
    paged, held = engine(name), objects(name, 2)
    for form in set(EngineKVFormat.__members__) - set(FORMATS):
        with pytest.raises(kvbm.BindError, match=f"{form}: expected one of"):
            call(ours, form, paged, held, [1, 2], True)
    assert set(FORMATS) < set(EngineKVFormat.__members__)
    for wrong in (
        lambda: call(ours, name, paged, [held[0][:, :1]], [1, 2], True),
        lambda: call(ours, name, paged, held, [1, 2, 3, 4, 5], True),
        lambda: call(ours, name, paged, held, [NB], True),
        lambda: call(ours, name, [*paged[:2], paged[2][:, 1:]], held, [1], True),
        lambda: call(ours, name, [one[0] for one in paged], held, [1], True),
        lambda: call(ours, name, pointers(paged[:2]), held, [1], True),
        lambda: call(ours, name, pointers(paged), held, [1], True, stride=1000),
    ):
        with pytest.raises(kvbm.BindError):
            wrong()
    assert not any(one.any() for one in held)


def test_the_plugin_is_chosen_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed and not named, it changes nothing: between two backends that are available LMCache would not choose."""
    monkeypatch.delenv("LMCACHE_DEVICE_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda, cpu = KvbmDeviceSpec(), KvbmCpuDeviceSpec()
    assert not cuda.is_available() and not cpu.is_available()
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "kvbm")
    assert cuda.is_available() and not cpu.is_available() and cuda.device_type == "cuda" and cuda.ops_cls is KvbmCudaOps


def test_compiled_copies_do_not_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache binds its compiled operations to the instance, in place of the methods."""
    import lmcache.v1.platform.devices.cuda.device_ops as module

    def bound(self: Any) -> None:
        self.multi_layer_block_kv_transfer = self.execute_object_group_transfer = self.something = lambda *_: "compiled"

    monkeypatch.setattr(module.CudaDeviceOps, "ensure_native", bound)
    made = KvbmCudaOps()
    made.ensure_native()
    assert made.multi_layer_block_kv_transfer.__func__ is KvbmCudaOps.multi_layer_block_kv_transfer
    assert not hasattr(made, "execute_object_group_transfer") and made.something() == "compiled"


GATHER = """
import torch, lmcache
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.transfer_context import base
ops = base.resolve_device_ops("cpu")
caches = {str(layer): torch.randn(9, 2, 4, 8) for layer in range(3)}
before = {name: one.clone() for name, one in caches.items()}
hints = {"kv_layout": "HND"}
chunks = base.gather_paged_kv_to_cpu(caches, [5, 2, 7, 1], 2, layout_hints=hints, engine_type=EngineType.VLLM)
for one in caches.values(): one.zero_()
base.scatter_cpu_to_paged_kv(caches, [5, 2, 7, 1], chunks, 2, layout_hints=hints, engine_type=EngineType.VLLM)
right = all(torch.equal(caches[name][[5, 2, 7, 1]], before[name][[5, 2, 7, 1]]) for name in caches)
print("RESULT", type(ops).__name__, right, sum(float(one.abs().sum()) for one in chunks) > 0)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """PYTHONPATH with the project's entry points, also where it is not installed."""
    info = tmp_path / "kvbm_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbm-plugin\nVersion: 0\n")
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["lmcache.device_plugins"]
    lines = ["[lmcache.device_plugins]", *(f"{name} = {target}" for name, target in plugins.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(tmp_path), *sys.path])


@pytest.mark.parametrize("backend", ["kvbm_cpu", ""])
def test_in_lmcache(path: str, backend: str) -> None:
    """LMCache finds the entry points, and its engine-driven transfer copies with what was chosen."""
    environment = {**os.environ, "PYTHONPATH": path, "LMCACHE_DEVICE_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", GATHER], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"RESULT {'KvbmCpuOps' if backend else 'CpuDeviceOps'} True True" in done.stdout


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_with_lmcache(models: Callable[[str], Path], path: str) -> None:
    """Blocks leave vLLM for a server by the plugin and come back: the same tokens; other ones if what comes back is zeroed."""
    found = result(
        run(
            "lmcache_offload",
            models("llama"),
            PYTHONPATH=path,
            LMCACHE_DEVICE_BACKEND="kvbm_cpu",
            LMCACHE_TRACK_USAGE="false",
            LMCACHE_DISABLE_BANNER="1",
        )
    )
    tokens, cached = zip(*found["runs"], strict=True)
    assert found["ops"] == "KvbmCpuOps" and [name for name, _ in found["calls"]] == ["D2H"] * 3 + ["H2D"] * 6
    assert tokens[3:6] == tokens[:3] and cached[:3] == (0, 0, 0) and cached[3:6] == (256, 256, 319)
    assert cached[6:] == cached[3:6] and not set(map(tuple, tokens[6:])) & set(map(tuple, tokens[:3]))  # the control


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_keys_of_engines_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache gets another name of the model for other weights or angles, and another salt for an adapter; vLLM's is unchanged."""
    connector = importlib.import_module("kvbm.integrations.lmcache.connector")
    stock, made = connector.LMCacheMPConnector, []

    def begin(self: Any, config: Any, *_: Any) -> None:
        made.append(config.model_config.model)
        self.request_trackers = {}

    def track(self: Any, request: Any) -> Any:
        return self.request_trackers.setdefault(request.request_id, SimpleNamespace(cache_salt=request.cache_salt or ""))

    monkeypatch.setattr(stock, "__init__", begin)
    monkeypatch.setattr(stock, "_get_or_create_request_tracker", track)

    def engine(theta: float = 1e4, given: str | None = None) -> Any:
        model = SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_theta": theta}}), model=str(tmp_path),
            revision=None, dtype="torch.float32", max_model_len=64,
        )  # fmt: skip
        transfer = SimpleNamespace(get_from_extra_config=lambda name, usual: given if name == "model" else usual)
        config = SimpleNamespace(
            model_config=model, load_config=SimpleNamespace(load_format="auto", download_dir=None), kv_transfer_config=transfer
        )
        found = connector.KvbmLMCacheConnector(config, None)
        assert found._vllm_config is config and config.model_config.model == str(tmp_path)
        return found

    with pytest.raises(kvbm.BindError, match="holds no weights"):
        engine()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    one = engine()
    engine()
    engine(5e5)
    engine(given="mine")
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    engine()
    assert made[0] == made[1] and len(set(made)) == 4 and all(name.startswith(f"{tmp_path}-") and "@" not in name for name in made)
    plain = SimpleNamespace(request_id="plain", cache_salt=None, lora_request=None)
    adapted = SimpleNamespace(
        request_id="adapted", cache_salt=None, lora_request=SimpleNamespace(lora_name="a", lora_path="/none")
    )
    salts = [one._get_or_create_request_tracker(request).cache_salt for request in (plain, adapted, adapted)]
    assert salts[0] == "" and len(salts[1]) == 32 and salts[2] == salts[1]  # a request keeps its salt


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks something is refused by its name."""
    assert list(lacking("LMCache")) == []
    monkeypatch.setattr("lmcache._version.__version__", "0.6.0")
    monkeypatch.delattr("lmcache.v1.platform.devices.cuda.CudaDeviceSpec.is_available")
    monkeypatch.delattr("lmcache.v1.platform.base.device_spec.DeviceSpec.is_available")
    monkeypatch.setattr(kvbm.integrations, "lmcache", kvbm.integrations.lmcache)  # the import below replaces it, too
    for name in [name for name in sys.modules if name.startswith("kvbm.integrations.lmcache")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(kvbm.BindError, match=r"LMCache 0.5.6 or newer, before 0.5.7, got 0.6.0, which lacks lmcache"):
        importlib.import_module("kvbm.integrations.lmcache").KvbmDeviceSpec  # noqa: B018
