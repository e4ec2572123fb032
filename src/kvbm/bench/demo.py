"""The implementation of ``kvbm demo``: a model's KV cache is converted through three other layouts, and generation continues.

1. A transformers Llama (small, seeded random weights, bfloat16) reads a prompt and generates tokens: the reference.
2. The cache after the prompt is converted ``hf/dynamic_cache`` → ``nhd`` → ``universal`` → ``vllm/LBHNC`` → back, through
   pools whose blocks lie at random ids. Then every source is overwritten with NaN, so that only the converted bytes remain.
3. A new cache is built from those bytes and generation continues from it: the logits must have the same bits.
4. The same with blocks that are deliberately read in the wrong layout: the logits must differ, or the check proves nothing.
5. Bandwidth of each conversion on blocks of a real size, compared with a plain copy of the same number of bytes, by the sweep of
   `kvbm bench`, which also checks every bit.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich import box
from rich.panel import Panel
from rich.progress import MofNCompleteColumn
from rich.table import Table
from rich.text import Text

from .. import kernels
from ..cli.common import progress
from ..copy.transfer import convert
from ..errors import CudaUnavailableError, DeviceNotFoundError, MissingPackageError
from ..layout.shapes import BlockShape, load_shape
from ..layout.spec import load
from ..memory.allocation import require_memory
from ..planner.plan import plan
from ..pool.pool import Pool
from ..show.text import table_box
from ..system.machine import device_of
from .copies import MEMCPY, Pair, Sweep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from rich.console import Console

    from ..layout.layout import Layout

PATH = ("hf/dynamic_cache", "nhd", "universal", "vllm/LBHNC", "hf/dynamic_cache")
_PROMPT_TOKENS = 203  # 12 blocks of 16 and a tail of 11, which does not fill a block
_NEW_TOKENS = 16
_BLOCK_TOKENS = 16
_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}  # of a batch
_REPEATS = {"cpu": 5, "cuda": 20}


def run(console: Console, *, device: str | None = None, seed: int = 0) -> bool:
    """Run the demo and print its steps.  True if everything was bit-identical and the deliberate mistake was not.

    Default device: the first GPU if torch and kvbm can both use it, else the CPU.  The seed is that of the weights, the prompt
    and the block ids.
    """
    with console.status("importing torch and transformers"):
        torch = _torch()
    device = _choose_device(console, torch, device)
    with torch.inference_mode():
        ok = _roundtrip(console, device, seed)
        _bandwidth(console, device)
    console.print(
        "[bold green]bit-identical[/]: generation carried on from the converted cache"
        if ok
        else "[bold red]failed[/]: see the logits above; this is a bug in kvbm or an unsteady machine, please report it"
    )
    return ok


# ---- the round trip -------------------------------------------------------------------------------------------------


def _roundtrip(console: Console, device: str, seed: int) -> bool:
    import torch
    from transformers import DynamicCache

    rng = random.Random(seed)
    model, shape = _model(device, seed)
    parameters = sum(p.numel() for p in model.parameters())
    prompt = torch.randint(model.config.vocab_size, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))
    num_blocks, tail = divmod(_PROMPT_TOKENS, shape.nt)
    console.print(
        Panel(
            f"[bold]model[/]   transformers {model.config.model_type}, {parameters / 1e6:.0f} M random weights, "
            f"{shape.dtype},\n        {shape.nl} layers, {model.config.num_attention_heads} heads, {shape.nh} KV heads "
            f"of {shape.hd}\n"
            f"[bold]prompt[/]  {_PROMPT_TOKENS} tokens: {num_blocks} blocks of {shape.nt}, and a tail of {tail} that "
            f"stays in place\n"
            f"[bold]device[/]  {_device_name(device)}",
            title="kvbm demo",
            title_align="left",
            box=box.ROUNDED if not console.options.ascii_only else box.ASCII,
            expand=False,  # a pipe has no width
        )
    )

    # The reference: prompt, then generation, uninterrupted.
    cache = DynamicCache()
    first = _step(model, cache, prompt.to(device))[0]
    source = [(key.clone(), value.clone()) for key, value in _tensors(cache)]
    token = first.argmax().view(1, 1)
    reference, tokens = _generate(model, cache, token)
    del cache

    # Each pool between the first and the last is twice as large as needed; its blocks are used in random order.
    body = num_blocks * shape.nt
    tails = [(key[:, :, body:].clone(), value[:, :, body:].clone()) for key, value in source]
    pools = [_hf_pool(source, shape, num_blocks)]
    ids: list[list[int]] = [list(range(num_blocks))]
    for name in PATH[1:-1]:
        pools.append(_empty_pool(load(name), shape, 2 * num_blocks, device))
        ids.append(rng.sample(range(2 * num_blocks), num_blocks))
    pools.append(_empty_pool(load(PATH[-1]), shape, num_blocks, device))
    ids.append(list(range(num_blocks)))
    for pool in pools[1:]:
        _poison(pool)
    for (src, dst), (src_ids, dst_ids) in zip(pairwise(pools), pairwise(ids), strict=True):
        made = plan(src.layout, dst.layout, shape, num_blocks=(src.num_blocks, dst.num_blocks))
        console.print(Text(str(made)), end="\n\n")
        convert(src, dst, src_ids, dst_ids)

    # The deliberate mistake: the nhd pool's bytes, declared to be hnd.
    wrong = _empty_pool(load(PATH[0]), shape, num_blocks, device)
    mistaken = _reinterpret(pools[1], load("hnd"))
    convert(mistaken, wrong, ids[1], ids[-1])

    # After this only the converted bytes and the tail remain of the source.
    for key, value in source:
        key.fill_(float("nan"))
        value.fill_(float("nan"))
    for pool in pools[:-1]:
        _poison(pool)

    continued, continued_tokens = _generate(model, _cache_from(pools[-1], tails), token, tokens)
    control, _ = _generate(model, _cache_from(wrong, tails), token, tokens)
    return _print_logits(console, reference, continued, control, tokens, continued_tokens)


def _model(device: str, seed: int) -> tuple[Any, BlockShape]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).eval()
    shape = BlockShape(
        nl=config.num_hidden_layers, no=2, nh=config.num_key_value_heads, nt=_BLOCK_TOKENS, hd=config.head_dim,
        dtype="bfloat16",
    )  # fmt: skip
    return model, shape


def _tensors(cache: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a cache's keys and values, layer by layer: (1, nh, tokens, hd) each."""
    if hasattr(cache, "layers"):
        for layer in cache.layers:
            yield layer.keys, layer.values
    else:  # transformers before 4.54
        yield from zip(cache.key_cache, cache.value_cache, strict=True)


def _step(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
    return logits.clone()


def _generate(
    model: Any, cache: Any, token: torch.Tensor, forced: Sequence[int] | None = None
) -> tuple[list[torch.Tensor], list[int]]:
    """Generate greedily.  With `forced`, the next inputs are those tokens, not the chosen ones, so that runs are comparable."""
    import torch

    all_logits, chosen = [], []
    for position in range(_NEW_TOKENS):
        logits = _step(model, cache, token)[0]
        all_logits.append(logits)
        chosen.append(int(logits.argmax()))
        token = torch.tensor([[chosen[-1] if forced is None else forced[position]]], device=token.device)
    return all_logits, chosen


def _hf_pool(source: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: BlockShape, num_blocks: int) -> Pool:
    """Bind the cache's full blocks: ``[l o] h b t d`` is a view of (1, nh, tokens, hd) with tokens = (b t)."""
    body = num_blocks * shape.nt
    tensors = [
        tensor[0, :, :body].contiguous().view(shape.nh, num_blocks, shape.nt, shape.hd)
        for pair in source
        for tensor in pair
    ]
    return Pool(load("hf/dynamic_cache"), shape, tensors)


def _cache_from(pool: Pool, tails: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Build a transformers cache from a pool in ``hf/dynamic_cache`` and the tokens that did not fill a block."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    arrays = [array.view(1, pool.shape.nh, -1, pool.shape.hd) for array in pool.arrays]
    for layer, (key_tail, value_tail) in enumerate(tails):
        key, value = arrays[2 * layer : 2 * layer + 2]
        cache.update(torch.cat([key, key_tail], dim=2), torch.cat([value, value_tail], dim=2), layer)
    return cache


def _empty_pool(layout: Layout, shape: BlockShape, num_blocks: int, device: str) -> Pool:
    """A pool over one tensor, not initialised."""
    import torch

    resolved = layout.resolve(shape, num_blocks)
    if device == "cpu":
        require_memory(resolved.nbytes, f"{layout.name}: {num_blocks:,} blocks of {shape}")
    side = torch.empty(resolved.nbytes, dtype=torch.uint8, device=device).view(getattr(torch, shape.dtype))
    pieces = side.split([each.nbytes // each.itemsize for each in resolved.allocations])
    return Pool(layout, shape, [one.view(each.shape) for one, each in zip(pieces, resolved.allocations, strict=True)])


def _reinterpret(pool: Pool, layout: Layout) -> Pool:
    """Bind the same bytes under another layout with the same number of allocations, as a wrong guess would."""
    allocations = layout.resolve(pool.shape, pool.num_blocks).allocations
    tensors = [array.view(a.shape) for array, a in zip(pool.arrays, allocations, strict=True)]
    return Pool(layout, pool.shape, tensors)


def _poison(pool: Pool) -> None:
    for array in pool.arrays:
        array.fill_(float("nan"))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))


def _print_logits(
    console: Console, reference: Sequence[torch.Tensor], continued: Sequence[torch.Tensor],
    control: Sequence[torch.Tensor], tokens: Sequence[int], continued_tokens: Sequence[int],
) -> bool:  # fmt: skip
    same = [_same_bits(a, b) for a, b in zip(reference, continued, strict=True)]
    differ = [not _same_bits(a, b) for a, b in zip(reference, control, strict=True)]
    yes, no = ("yes", "NO")
    table = Table(title="logits after the prompt", title_justify="left", title_style="bold", box=table_box(console))
    table.add_column("token", justify="right")
    table.add_column("uninterrupted", justify="right")
    table.add_column("converted cache", justify="right")
    table.add_column("same bits")
    table.add_column("nhd read as hnd", justify="right")
    for row in range(len(reference)):
        if 4 <= row < len(reference) - 1 and same[row] and differ[row]:
            if row == 4:
                table.add_row("…", "…", "…", "…", "…", style="dim")
            continue
        count = int((reference[row] != control[row]).sum())
        table.add_row(
            f"+{row + 1}",
            f"{float(reference[row].max()):.6f} → {tokens[row]}",
            f"{float(continued[row].max()):.6f} → {continued_tokens[row]}",
            f"[green]{yes}[/]" if same[row] else f"[red]{no}[/]",
            f"{count} of {reference[row].numel()} differ" if differ[row] else "[red]the same![/]",
        )
    console.print(table)
    console.print(
        f"converted cache: {sum(same)} of {len(same)} steps have the same bits in all {reference[0].numel()} logits\n"
        f"nhd read as hnd: {sum(differ)} of {len(differ)} steps differ, as they must for this to be a check\n"
    )
    return all(same) and all(differ)


# ---- bandwidth ------------------------------------------------------------------------------------------------------


def _bandwidth(console: Console, device: str) -> None:
    """Measure each conversion on blocks of llama-3.1-8b at random ids, as `kvbm bench` does."""
    kind = device.partition(":")[0]
    direction, backend = {"cpu": ("h2h", "host"), "cuda": ("d2d", "direct")}[kind]
    shape = load_shape("llama-3.1-8b")
    pairs = [Pair.parse(f"{src}:{dst}") for src, dst in pairwise(PATH)]
    sweep = Sweep(
        [shape], [_BYTES[kind] // shape.nbytes], [direction], pairs, {direction: [backend]}, {},
        built_in_peers=False, place=device, iters=_REPEATS[kind],
    )  # fmt: skip
    with progress("bandwidth", sweep.steps, MofNCompleteColumn(), console=console) as update:
        sweep.note = lambda line: console.print(line, style="dim", soft_wrap=True, markup=False)
        sweep.step = lambda title: update(advance=1, description=f"bandwidth: {title}")
        rows = list(sweep.run())
    if not rows:
        return
    moved = rows[0].total_bytes
    title = f"bandwidth: llama-3.1-8b, {rows[0].num_blocks} blocks at random ids, {moved / 2**20:,.0f} MiB"
    table = Table(title=title, title_justify="left", title_style="bold", box=table_box(console))
    table.add_column("conversion")
    for column in ("ms", "GB/s", "of a plain copy"):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: row.backend == MEMCPY):
        ms, gbps = f"{row.median_ms:,.1f}", f"{row.bandwidth_gbps:,.1f}"
        if row.backend == MEMCPY:
            table.add_row("a plain copy of the same bytes", ms, gbps, "", style="dim")
        else:
            table.add_row(row.pattern.replace(":", " → "), ms, gbps, f"{row.ratio:.2f}")
    console.print(table)
    console.print(f"GB/s count each byte that is moved once; medians of {_REPEATS[kind]}\n", style="dim")


# ---- helpers --------------------------------------------------------------------------------------------------------


def _torch() -> Any:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingPackageError(
            f"the demo runs a real model and needs torch and transformers ({error.name or error} is missing): "
            "pip install 'kvbm-layouts[demo]'"
        ) from None
    transformers.logging.set_verbosity_error()
    return torch


def _choose_device(console: Console, torch: Any, wanted: str | None) -> str:
    if wanted == "cpu":
        return "cpu"
    index = device_of(wanted or "cuda:0")
    missing = (
        f"torch {torch.__version__} sees no GPU"
        if not torch.cuda.is_available()
        else "kvbm was built without CUDA kernels (`kvbm doctor` says more)"
        if kernels.is_using_stubs()
        else None
    )
    if missing is None and index >= (count := torch.cuda.device_count()):
        raise DeviceNotFoundError(f"device {wanted!r}: no such GPU: torch sees {count} of them, from 0 on")
    if missing is None:
        return f"cuda:{index}"
    if wanted is not None:
        raise CudaUnavailableError(f"device {wanted!r}: {missing}")
    console.print(f"{missing}: running on the CPU", style="dim")
    return "cpu"


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return f"{device}, {torch.cuda.get_device_name(device)}"
