"""Real continuous batching of transformers with tiny random models: the places in its cache, and requests that move.

Each test that generates compares tokens and log probabilities with an undisturbed run: every bit must be equal.  A run has one
request at a time, because other requests in a batch change the bits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pickle
import re
import runpy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm import reshard, wire

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("could not import 'transformers'", allow_module_level=True)

#: What `_imported` imports: three seconds of each process that collects the tests, and few run them.
transformers: Any
batching: Any
PagedAttentionCache: Any
DistributedHelper: Any
RequestState: Any

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODELS = ["llama", "hybrid"]
PROMPT = [(7 * i * i + 3 * i) % 250 + 1 for i in range(53)]
NEW = 24

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def config_of(kind: str) -> Any:
    if kind == "llama":
        return transformers.LlamaConfig(num_hidden_layers=3, **SIZES)
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(
        num_hidden_layers=4, layer_types=types, sliding_window=40, query_pre_attn_scalar=16, **SIZES
    )


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    global transformers, batching, PagedAttentionCache, DistributedHelper, RequestState
    transformers = importlib.import_module("transformers")
    if "page_size" not in getattr(getattr(transformers, "ContinuousBatchingConfig", None), "__dataclass_fields__", ()):
        pytest.skip("transformers without this continuous batching")
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.distributed import DistributedHelper
    from transformers.generation.continuous_batching.requests import RequestState

    from kvbm.integrations.transformers import batching


@pytest.fixture(autouse=True, scope="module")
def _quick(_imported: None) -> Iterator[None]:
    """One thread, as more only wait for so small matrices; old objects are frozen, as an ending manager collects garbage twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@cache
def model_of(kind: str, dtype: str, device: str) -> Any:
    torch.manual_seed(0)
    config = config_of(kind)
    config._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config).to(device=device, dtype=getattr(torch, dtype)).eval()


def sizes(page: int = 16, blocks: int = 32, **more: Any) -> Any:
    return transformers.ContinuousBatchingConfig(
        page_size=page, num_blocks=blocks, max_batch_tokens=64, return_logprobs=True, auto_switch_to_flash=False,
        max_requests_per_batch=8, **more,
    )  # fmt: skip


class Steps:
    """Lets a manager compute some steps and then wait for a pause; afterwards it runs freely."""

    def __init__(self, manager: Any) -> None:
        self.manager, self.left, self.held = manager, None, threading.Event()

    def let(self, steps: int) -> None:
        self.held.clear()
        self.left = steps

    def __call__(self, *_: Any) -> None:
        if threading.current_thread() is not self.manager._generation_thread or self.left is None:
            return
        if self.left:
            self.left -= 1
            return
        self.held.set()
        while not self.manager.background_thread_status.is_pause_requested():
            self.manager._wake_up_loop.wait(0.01)
        self.left = None


@contextlib.contextmanager
def managed(model: Any, **config: Any) -> Iterator[Any]:
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=NEW)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=sizes(**config))
    manager.steps = Steps(manager)
    hook = model.register_forward_pre_hook(manager.steps)
    manager.start()
    try:
        yield manager
    finally:
        hook.remove()
        manager.stop(hard_stop=True)


def begun(manager: Any, steps: int, prompt: list[int] = PROMPT) -> str:
    """A request of which `steps` steps are computed, and one more until the manager is paused."""
    manager.steps.let(steps)
    name = manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
    assert manager.steps.held.wait(60)
    return str(name)


def ended(manager: Any, name: str) -> tuple[list[int], list[float]]:
    """Tokens and log probabilities of a request."""
    found = next(found for found in manager.request_id_iter(name) if found.is_finished())
    assert found.error is None, found.error
    return found.generated_tokens, found.logprobs


@cache
def untouched(kind: str, dtype: str, device: str, page: int = 16) -> tuple[list[int], list[float]]:
    """The output of a manager that is not disturbed."""
    with managed(model_of(kind, dtype, device), page=page) as manager:
        found = ended(manager, manager.add_request(PROMPT, max_new_tokens=NEW, eos_token_id=-1))
    assert len(found[0]) == NEW and len(set(found[0])) > NEW // 3  # no model that says one thing only
    return found


def spoil(groups: dict[str, Any]) -> None:
    """Overwrite the cache, so that its current contents cannot be used."""
    next(iter(groups.values())).allocator.cache_tensor.view(torch.uint8).fill_(0x7B)


# ---- where the cache lies ----------------------------------------------------------------------------------------------


def cache_of(kind: str, dtype: str, device: str, page: int = 16) -> Any:
    config = config_of(kind)
    config._attn_implementation = "sdpa"
    return PagedAttentionCache(
        config, resolved(page), torch.device(device), DistributedHelper(None, None), getattr(torch, dtype)
    )


def resolved(page: int) -> Any:
    found = sizes(page)
    found.max_memory_percent, found.max_blocks_per_request = 0.5, 0
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_engine_writes_where_the_layout_says(kind: str, dtype: str, device: str) -> None:
    """Every element of three requests, written by the engine's own code into its cache."""
    paged = cache_of(kind, dtype, device)
    groups = batching.groups_of(paged)
    assert list(groups) == (["full_attention"] if kind == "llama" else ["sliding_attention", "full_attention"])
    generator = torch.Generator().manual_seed(1)
    for name, length in (("a", 35), ("b", 16), ("c", 50)):
        state = RequestState(request_id=name, initial_tokens=[0] * length)
        assert paged.can_store_request_tokens(state, length)
        write: list[list[int]] = [[] for _ in groups]
        paged.extend_read_and_write_indices(name, 0, length, None, write)
        for group in groups.values():
            for at, layer in enumerate(group.layers):
                rows = torch.randint(-(2**15), 2**15, (2, 1, 2, length, 16), generator=generator, dtype=torch.int32)
                kv = (rows.to(torch.float32) / 128).to(device=device, dtype=getattr(torch, dtype))
                none = {n: torch.zeros(2) for n in groups}
                index = [torch.tensor(one, device=device) for one in write]
                kwargs = {
                    "cu_seq_lens_k": none, "max_length_k": dict.fromkeys(groups, 0), "write_index": index,
                    "read_index": [one[:0] for one in index],
                }  # fmt: skip
                paged.update(kv[0], kv[1], layer, kwargs)
                # What the layout says, in bytes: of each token that is kept, at its slot.
                kept = range(max(0, length - (group.window or length)), length)
                slots = np.array([token % (group.window or length + 1) for token in kept])
                table, nt = np.array(group.table(name)), group.pool.shape.nt
                o, t, h, d = np.ix_(range(2), range(len(slots)), range(2), range(16))
                _, where = group.pool.resolved.address(table[slots // nt][t], l=at, o=o, h=h, t=(slots % nt)[t], d=d)
                found = paged.cache_tensor.view(kv.dtype)[torch.from_numpy(where // kv.element_size()).to(device)]
                assert torch.equal(found, kv[:, 0].transpose(1, 2)[:, list(kept)])


def test_pools_of_types_share_no_block() -> None:
    """In a hybrid model, blocks of requests in one group do not overlap the other's."""
    paged = cache_of("hybrid", "float32", "cpu")
    state = RequestState(request_id="a", initial_tokens=[0] * 60)
    assert paged.can_store_request_tokens(state, 60)
    groups = batching.groups_of(paged)
    held = {
        name: {byte for block in group.table("a") for byte in range(block * n, (block + 1) * n)}
        for name, group in groups.items()
        for n in [group.pool.nbytes // group.pool.num_blocks]
    }
    assert not held["full_attention"] & held["sliding_attention"] and all(held.values())
    assert min(map(min, held.values())) >= 2 * paged.bytes_per_sector  # nor among what is never given away
    assert [len(g.table("a")) for g in groups.values()] == [3, 4]
    assert groups["sliding_attention"].span("a", 60).tokens == range(40)


# ---- versions ----------------------------------------------------------------------------------------------------------


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(transformers, "__version__", "6.2.0")
    batching.groups_of(cache_of("llama", "float32", "cpu"))
    assert "transformers 6.2.0 was not tested, only 5.19 or newer, before 5.25" in caplog.text


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    monkeypatch.setitem(sys.modules, "transformers.generation.continuous_batching.offloading_manager", None)
    monkeypatch.delitem(sys.modules, "kvbm.integrations.transformers.batching")
    with pytest.raises(ImportError, match=re.escape("transformers 4.57.1 has no supported continuous batching")):
        importlib.import_module("kvbm.integrations.transformers.batching")


def _without(name: str) -> Callable[[Any], None]:
    return lambda paged: delattr(paged, name)


def _shifted(paged: Any) -> None:
    views = paged.cache_allocators["full_attention"]._kv_token_views
    views[1] = (views[1][1], views[1][0])


def _strided(paged: Any) -> None:
    paged.cache_allocators["full_attention"].block_physical_stride += 16


def _unknown(paged: Any) -> None:
    paged.cache_allocators["linear_attention"] = paged.cache_allocators.pop("full_attention")


def _old(paged: Any) -> None:
    del paged.cache_allocators["full_attention"].block_table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without("cache_tensor"),
            "cache (PagedAttentionCache): expected cache_tensor, got none; install transformers 5.19",
        ),
        (_without("cache_allocators"), "expected cache_allocators"),
        (_old, "allocator (FullAttentionCacheAllocator): expected block_table"),
        (
            _shifted,
            "layer 1, K, block 0, token 0: hf/paged_attention has it at byte 4096, the engine writes it at 6144",
        ),
        (_strided, "layer 0, K, block"),
        (_unknown, "linear_attention: expected full_attention or sliding_attention"),
    ],
    ids=["tensor", "allocators", "tables", "order", "stride", "type"],
)
def test_a_cache_that_is_another_one_is_refused(change: Callable[[Any], None], message: str) -> None:
    paged = cache_of("llama", "float32", "cpu")
    change(paged)
    with pytest.raises(kvbm.BindError, match=re.escape(message)):
        batching.groups_of(paged)


# ---- requests that move ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_request_goes_on_after_host_memory(kind: str, dtype: str, device: str) -> None:
    """Offloaded during its generation, then the whole cache changes; and again, from other blocks."""
    with managed(model_of(kind, dtype, device)) as manager:
        ours = batching.Batching(manager)
        host = batching.Host(ours.groups, 8)
        name = begun(manager, 5)
        for again in range(2):
            with ours.paused():
                before = {n: g.table(name) for n, g in ours.groups.items()}
                parked = ours.offload(name, host)
                assert not any(group.table(name) for group in ours.groups.values())
                assert parked.state.position_offset == len(PROMPT) + len(parked.state.generated_tokens) - 1
                assert list(parked.held.ids) == list(ours.groups) and all(parked.held.ids.values())
                spoil(ours.groups)
                ours.reserve(parked.state, f"in the way {again}")  # takes the blocks that it had
                assert ours.restore(parked, host)
                assert all(not set(before[n]) & set(g.table(name)) for n, g in ours.groups.items())
                manager.steps.let(2)
            assert manager.steps.held.wait(60)
        with ours.paused():  # lets it run on
            pass
        assert ended(manager, name) == untouched(kind, dtype, device)
        blocks = sum(map(len, parked.held.ids.values()))
        assert host.stats == {"stored": 2 * blocks, "loaded": 2 * blocks, "wrong": 0}
        assert all(host.room({n: [0] * 8}) for n in ours.groups)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_block_that_came_back_wrong_is_computed_again(kind: str, check: bool, device: str) -> None:
    """A byte is flipped in host memory: digests find it, and tokens stay right; without digests they differ."""
    with managed(model_of(kind, "float32", device)) as manager:
        ours = batching.Batching(manager)
        host = batching.Host(ours.groups, 8, "hnd", check=check)
        name = begun(manager, 5)
        with ours.paused():
            parked = ours.offload(name, host)
            group = ours.groups["full_attention"]
            stored = host.pools["full_attention"]
            _, at = stored.resolved.address(parked.held.ids[group.name][1], l=0, o=0, t=3)
            array, _ = stored.resolved.address(parked.held.ids[group.name][1], l=0, o=0, t=3)
            stored.arrays[array].reshape(-1).view(np.uint8)[at + 3] ^= 0x42  # exponent
            assert ours.restore(parked, host) is not check
            for one in ours.groups.values() if check else ():  # nothing of it is left
                blocks = one.table(parked.state.request_id)
                assert blocks and not bool(one.pool.arrays[0][blocks].any())
        tokens = ended(manager, name)[0]
        assert (tokens == untouched(kind, "float32", device)[0]) is check
        assert host.stats["wrong"] == int(check)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "dtype", "src", "dst"),
    [
        ("llama", "float32", 16, 16),
        ("llama", "bfloat16", 16, 32),
        ("llama", "float32", 32, 8),
        ("hybrid", "bfloat16", 16, 16),
        ("hybrid", "float32", 16, 32),
        ("hybrid", "bfloat16", 32, 8),
    ],
)
def test_prefill_here_decode_there(kind: str, dtype: str, src: int, dst: int, device: str) -> None:
    """One manager reads the prompt, another one with another block size generates; the first one's blocks are free."""
    model = model_of(kind, dtype, device)
    with managed(model, page=src) as one, managed(model, page=dst, blocks=24) as other:
        prefill, decode = batching.Batching(one), batching.Batching(other)
        go_on = batching.HandOver(prefill, decode)
        name = begun(one, 1)
        with prefill.paused():
            moved = go_on(name, "moved")
            spoil(prefill.groups)
            assert not any(group.table(name) for group in prefill.groups.values())
        assert ended(other, moved) == untouched(kind, dtype, device, dst)
        with prefill.paused():
            prefill.cache.evict_cached_blocks()  # the prompt stays for others with the same one
            assert prefill.cache.compute_free_capacity() == 1.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MODELS)
def test_prefill_here_decode_there_over_a_wire(kind: str, device: str) -> None:
    """As between two processes: the state as bytes, an endpoint per group on each side, and both managers run meanwhile."""
    model = model_of(kind, "float32", device)
    with managed(model, page=16) as one, managed(model, page=32) as other, contextlib.ExitStack() as stack:
        prefill, decode = batching.Batching(one), batching.Batching(other)
        links = {}
        for name in prefill.groups:
            ends = []
            for side, ours in (("prefill", prefill), ("decode", decode)):
                place, pool = ours.groups[name].placement(side), ours.groups[name].pool
                end = reshard.Endpoint(side, place, 0, pool, wire=wire.memory(f"{side}/{name}"), ring_bytes=1 << 26)
                ends.append(stack.enter_context(contextlib.closing(end)))
            links[name] = ends[0].meet([ends[1].card()]), ends[1].meet([ends[0].card()])
        state = prefill.detach(begun(one, 1))
        sent = {name: links[name][0].send("req", span) for name, span in prefill.spans(state).items()}
        moved = decode.reserve(pickle.loads(pickle.dumps(state)), "moved")
        arrivals = {name: links[name][1].receive("req", span) for name, span in decode.spans(moved).items()}
        for handle in (*sent.values(), *arrivals.values()):
            handle.synchronize()
        prefill.release(state)
        spoil(prefill.groups)
        decode.attach(moved)
        assert ended(other, "moved") == untouched(kind, "float32", device, 32)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_that_is_half_read_moves(device: str) -> None:
    """A prompt of three steps, moved after the first one; also a name that is taken, and a request that does not exist."""
    model, prompt = model_of("hybrid", "float32", device), [*PROMPT, *PROMPT[::-1], *PROMPT]
    with managed(model) as one, managed(model) as other:
        here, there = batching.Batching(one), batching.Batching(other)
        name = begun(one, 1, prompt)
        with here.paused():
            go_on = batching.HandOver(here, there)
            with pytest.raises(kvbm.BindError, match="the manager has one of this name; pass another as request_id="):
                batching.HandOver(here, here)(name)
            state = here.detach(name)
            assert state.status.name == "PREFILLING" and state.position_offset == 128
            here.attach(state)
            moved = go_on(name)
            with pytest.raises(kvbm.BindError, match="expected one that is being computed"):
                here.detach(name)
        again = one.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
        assert ended(other, moved) == ended(one, again)


def test_a_step_that_is_under_way_is_computed_again() -> None:
    """As when a GPU computes one batch while the next one is planned: the token is unknown, its position already counts."""
    model = model_of("llama", "float32", "cpu")
    with managed(model) as one, managed(model) as other:
        here, there = batching.Batching(one), batching.Batching(other)
        name = begun(one, 4)
        with here.paused():
            state = one.batch_processor.scheduler.active_requests[name]
            state.position_offset, state.tokens_to_process = state.position_offset + 1, [-1]
            moved = batching.HandOver(here, there)(name)
            assert state.status.name == "FINISHED"  # what comes of the step is dropped
        assert ended(other, moved) == untouched("llama", "float32", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_prefill_here_decode_there_while_steps_overlap(kind: str) -> None:
    """Two overlapping batches on a GPU, the engine's fastest mode."""
    model = model_of(kind, "bfloat16", "cuda")
    with managed(model, use_async_batching=True) as one, managed(model, use_async_batching=True) as other:
        here, there = batching.Batching(one), batching.Batching(other)
        moved = batching.HandOver(here, there)(begun(one, 4))
        assert ended(other, moved)[0] == untouched(kind, "bfloat16", "cuda")[0]


def test_models_that_differ_do_not_hand_over() -> None:
    """Another RoPE, or one other number among the weights.  A copy of the model is the same."""
    model = model_of("llama", "float32", "cpu")
    turned, trained, same = (deepcopy(model) for _ in range(3))
    turned.config.rope_parameters = {**turned.config.rope_parameters, "rope_theta": 5e5}
    with torch.no_grad():
        trained.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    with managed(model) as one, managed(turned) as two, managed(trained) as three, managed(same) as four:
        here, *there = (batching.Batching(each) for each in (one, two, three, four))
        with pytest.raises(kvbm.BindError, match=r"model: config.rope_parameters.rope_theta: '10000' here and '500000'"):
            batching.HandOver(here, there[0])
        with pytest.raises(kvbm.BindError, match=r"weights: model.layers.0.self_attn.k_proj.weight differs"):
            batching.HandOver(here, there[1])
        batching.HandOver(here, there[2])


def test_a_request_of_another_model_is_not_restored() -> None:
    """It generated other tokens.  It stays in host memory, and its own model goes on; a copy of the model is the same."""
    model = model_of("llama", "float32", "cpu")
    trained, same = deepcopy(model), deepcopy(model)
    with torch.no_grad():
        trained.model.layers[0].self_attn.k_proj.weight[0, 0] += 1
    with managed(model) as one, managed(trained) as two, managed(same) as three:
        here, there, copy = (batching.Batching(each) for each in (one, two, three))
        host = batching.Host(here.groups, 8)
        name = begun(one, 5)
        parked = here.offload(name, host)
        with pytest.raises(kvbm.BindError, match=r"weights: model.layers.0.self_attn.k_proj.weight differs"):
            there.restore(parked, host)
        assert not any(group.table(name) for group in there.groups.values())
        assert copy.restore(parked, host, "again")
        assert ended(three, "again") == untouched("llama", "float32", "cpu")


def test_what_cannot_move_stays() -> None:
    """No space at the destination or in host memory, or a manager that does not run: the request continues where it is."""
    model = model_of("llama", "float32", "cpu")
    with managed(model) as one, managed(model, blocks=3) as other:
        here, there = batching.Batching(one), batching.Batching(other)
        name = begun(one, 4)
        with here.paused():
            with pytest.raises(kvbm.BindError, match=r"no room for 5[78] tokens"):
                batching.HandOver(here, there)(name)
            with pytest.raises(kvbm.BindError, match=r"expected room in host memory for .*4.*, got .*3"):
                here.offload(name, batching.Host(here.groups, 3))
        assert ended(one, name) == untouched("llama", "float32", "cpu")
    with pytest.raises(kvbm.BindError, match="expected a running manager"):
        batching.Batching(one)
    one.is_running = lambda: True
    one.distributed_helper.tp_size = 2
    with pytest.raises(kvbm.BindError, match="expected a manager of one process, got tp 2"):
        batching.Batching(one)


def test_a_request_that_came_is_found_by_its_prefix() -> None:
    """Blocks computed elsewhere are used for other requests with the same prompt."""
    model = model_of("llama", "float32", "cpu")
    with managed(model) as one, managed(model) as other:
        here, there = batching.Batching(one), batching.Batching(other)
        moved = batching.HandOver(here, there)(begun(one, 1), "moved")
        ended(other, moved)
        with there.paused():
            blocks = there.groups["full_attention"].allocator.match_prefix_blocks(PROMPT)
        assert len(blocks) == len(PROMPT) // 16


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_between_two_managers_is_not_cancelled(kind: str) -> None:
    """Its blocks would be given to others while they are still read and written."""
    model = model_of(kind, "float32", "cpu")
    with managed(model) as one, managed(model) as other:
        here, there = batching.Batching(one), batching.Batching(other)
        state = here.detach(begun(one, 1))
        moved = there.reserve(state, "moved")
        before = here.spans(state), there.spans(moved)
        for manager, name in ((one, state.request_id), (other, "moved")):
            manager.cancel_request(name)
            ended(manager, manager.add_request(PROMPT[::-1], max_new_tokens=NEW, eos_token_id=-1))
        for spans, now in zip(before, (here.spans(state), there.spans(moved)), strict=True):
            assert [list(span.table) for span in spans.values()] == [list(span.table) for span in now.values()]
        for name, group in here.groups.items():
            plan = reshard.plan(group.placement("source"), there.groups[name].placement("destination"))
            reshard.Local(plan, [group.pool], [there.groups[name].pool])(before[0][name], before[1][name]).synchronize()
        here.release(state)
        there.attach(moved)
        assert ended(other, "moved") == untouched(kind, "float32", "cpu")
        for batch, left in ((here, state), (there, moved)):
            with pytest.raises(kvbm.BindError, match="got one without blocks: it was released"):
                batch.attach(left)


def test_what_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of another size, a failing copy, a request restored twice: no block is lost or belongs to two requests."""
    model = model_of("llama", "float32", "cpu")
    with managed(model) as one, managed(model, page=32) as other:
        here, there = batching.Batching(one), batching.Batching(other)
        host = batching.Host(here.groups, 8)
        name = begun(one, 4)
        with here.paused(), there.paused():
            with monkeypatch.context() as patch:
                patch.setattr(host, "_store", lambda *_: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    here.offload(name, host)
            assert host.room({"full_attention": [0] * 8})
            parked = here.offload(name, host)
            with pytest.raises(kvbm.KvbmError, match="expected pools of one block shape"):
                there.restore(parked, host)
            assert there.cache.compute_free_capacity() == 1.0
            assert here.restore(parked, host)
            with pytest.raises(kvbm.BindError, match="a request that was offloaded is restored once"):
                here.restore(parked, host, "again")
            assert not here.groups["full_attention"].table("again")
            assert sorted(host._free["full_attention"]) == list(range(8))
        assert ended(one, name) == untouched("llama", "float32", "cpu")


# ---- when the cache is full ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("spoiled", "check"), [(False, True), (True, True), (True, False)], ids=["whole", "spoiled", "unchecked"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_a_full_cache_is_offloaded_by_kvbm(
    kind: str, spoiled: bool, check: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generate_batch with space for some of its requests: the same tokens as with space for all.

    Also if bytes change in host memory; without verification the tokens then differ.
    """
    model = model_of(kind, "float32", device)
    prompts = [[(i * j + 5 * j) % 250 + 1 for i in range(40)] for j in range(1, 7)]
    greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=NEW)

    def generate(blocks: int) -> list[list[int]]:
        found = model.generate_batch(prompts, greedy, sizes(16, blocks), warmup=False)
        assert not any(one.error for one in found.values())
        return [one.generated_tokens for one in found.values()]

    if spoiled:
        put = batching.Host.put

        def flips(self: batching.Host, *args: Any) -> batching.Held:
            held = put(self, *args)
            self.pools["full_attention"].arrays[held.ids["full_attention"][0]].reshape(-1).view(np.uint8)[7] ^= 0x42
            return held

        monkeypatch.setattr(batching.Host, "put", flips)
    pools: list[weakref.ref[kvbm.Pool]] = []
    hosts: list[batching.Host] = []
    begin = batching.Offloading.__init__

    def begins(self: batching.Offloading, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        pools.extend(weakref.ref(group.pool) for group in self.groups.values())
        hosts.append(self.host)

    monkeypatch.setattr(batching.Offloading, "__init__", begins)
    reset = batching.Offloading.reset

    def resets(self: batching.Offloading) -> None:
        reset(self)
        assert self.host.room({name: [0] * 16 for name in self.groups})

    monkeypatch.setattr(batching.Offloading, "reset", resets)
    with batching.offloading(16, check=check) as made:
        few = generate(14)
        gc.collect()
        assert pools and not any(one() for one in pools)  # the engine's cache is not kept, though host memory is
    assert (few == generate(64)) is (check or not spoiled) and len(made) == 1
    [stats] = made
    assert stats["loaded"] and bool(stats["wrong"]) is (spoiled and check)


# ---- the example -------------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transformers_batching.py"


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spoil", [False, True], ids=["whole", "spoiled"])
def test_the_example_runs(
    spoil: bool, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(EXAMPLE), "--device", device, *(["--spoil"] if spoil else [])]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "host memory", "offloaded and restored", "prefill here, decode there", "a full cache", "generate_batch"
    ]  # fmt: skip
    assert all(said[i].endswith("the same") for i in (1, 2, 4))
    assert ("computed again" in said[0]) is spoil and f"'wrong': {int(spoil)}" in said[0]


@pytest.mark.slow
def test_the_page_is_true() -> None:
    """docs/engines/transformers.md: its Python runs, and its names exist."""
    page = (EXAMPLE.parent.parent / "docs" / "engines" / "transformers.md").read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)), {})
    assert f"transformers {batching.VERSIONS[0]} or newer, before {batching.VERSIONS[1]}" in page
    for name in re.findall(r"`(?:here|there)\.(\w+)", page):
        assert hasattr(batching.Batching, name) or name == "groups", name
