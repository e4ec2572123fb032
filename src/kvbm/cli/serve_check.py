"""The command line: ``kvbm serve-check``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .. import errors
from .common import gpu_option, json_option, layout_option, print_json, print_prose

if TYPE_CHECKING:
    from ..integrations.vllm.serving import Engine

_COUNT = click.IntRange(1, 1 << 16)

#: Key of ``--to`` → argument of `Engine`.
_KEYS = {
    "tp": "tp", "pp": "pp", "dcp": "dcp", "block-size": "nt", "layout": "order", "kv-cache-dtype": "cache_dtype",
    "backend": "backend",
}  # fmt: skip


@click.command("serve-check")
@click.option(
    "--vllm", "given", required=True, metavar="MODEL",
    help="A config.json, its folder, or a model in Hugging Face's cache.",
)
@click.option("--tp", default=1, show_default=True, type=_COUNT, metavar="N", help="--tensor-parallel-size.")
@click.option("--pp", default=1, show_default=True, type=_COUNT, metavar="N", help="--pipeline-parallel-size.")
@click.option("--dcp", default=1, show_default=True, type=_COUNT, metavar="N", help="--decode-context-parallel-size.")
@click.option("--block-size", "nt", default=16, show_default=True, type=_COUNT, metavar="N", help="Tokens per block.")
@click.option(
    "--kv-cache-dtype", "cache_dtype", default="auto", show_default=True, metavar="TYPE", help="As vLLM's flag."
)
@click.option("--dtype", metavar="TYPE", help="Of the model, as vLLM's flag; that of its config if not given.")
@click.option("--layout", "order", default="LBHNC", show_default=True, metavar="ORDER", help="VLLM_KV_CACHE_LAYOUT.")
@click.option(
    "--backend", default="", metavar="NAME",
    help="Attention backend; FLASH_ATTN or FLASH_ATTN_MLA if not given.",
)
@click.option(
    "--host-gib", default=64.0, show_default=True, type=click.FloatRange(0, 1 << 20, min_open=True), metavar="GIB",
    help="Host memory of all ranks.",
)
@layout_option(
    "--host-layout", default="pages", show_default=True,
    help="Layout of blocks in host memory; pages: as the engine has them.",
)
@click.option(
    "--host-values", metavar="VALUES",
    help="Quantise blocks on the way to host memory: fp8, mxfp8 or nvfp4.",
)
@click.option(
    "--num-blocks", "blocks", default=64, show_default=True, type=_COUNT, metavar="N",
    help="Blocks of the store and the load that are planned.",
)
@click.option(
    "--to", "to_text", metavar="KEY=VALUE,…",
    help="The engine that decodes: tp=1,block-size=64,layout=LBNHC; other keys as in this engine.",
)
@click.option(
    "--tokens", default=8192, show_default=True, type=click.IntRange(1, 1 << 20), metavar="N",
    help="Tokens of a request, with --to.",
)
@gpu_option("GPU whose measured speeds are printed.")
@json_option()
def serve_check(
    given: str, tp: int, pp: int, dcp: int, nt: int, cache_dtype: str, dtype: str | None, order: str, backend: str,
    host_gib: float, host_layout: str, host_values: str | None, blocks: int, to_text: str | None, tokens: int, device: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Show what kvbm would do in a vLLM engine, without starting it.

    Prints the layouts, what fits into host memory, how blocks are copied, and what is sent to another engine. Nothing is
    allocated, copied or downloaded, and vLLM need not be installed. It lists what is not possible, and exits with the code of
    the first such error.
    """
    from ..integrations.vllm import models, serving

    engine = serving.Engine(models.read(given, cache_dtype, dtype), tp, pp, dcp, nt, order, cache_dtype, backend)
    to = _other(engine, to_text, given, dtype) if to_text is not None else None
    found = serving.as_json(
        engine, int(host_gib * (1 << 30)), host_layout, blocks=blocks, device=device, to=to, tokens=tokens, host_values=host_values
    )
    if as_json:
        print_json(found)
    else:
        for line in _lines(found):
            if line.startswith((" ", "VLLM_")):
                click.echo(line)
            else:
                print_prose(line)
    for note in serving.notes(found["model"]):
        click.echo(f"{click.style('note:', bold=True)} {note}", err=True)
    for one in found["refused"]:
        click.echo(f"{click.style('refused:', fg='red', bold=True)} {one['what']}: {one['why']}", err=True)
    if found["refused"]:
        sys.exit(getattr(errors, found["refused"][0]["error"]).exit_code)


def _other(engine: Engine, text: str, given: str, dtype: str | None) -> Engine:
    """The engine that `--to` describes."""
    from dataclasses import replace

    from ..integrations.vllm import models

    settings: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        if key not in _KEYS or not value:
            raise errors.SpecError(f"--to: expected KEY=VALUE with one of {', '.join(_KEYS)}, got {item!r:.100}")
        name = _KEYS[key]
        if name in settings:
            raise errors.SpecError(f"--to: {key}: expected once, got twice")
        if name in ("tp", "pp", "dcp", "nt") and not (value.isdecimal() and 0 < int(value[:9]) <= 1 << 16):
            raise errors.SpecError(f"--to: {key}: expected a number from 1 on, got {value!r:.100}")
        settings[name] = int(value) if name in ("tp", "pp", "dcp", "nt") else value
    if "cache_dtype" in settings:
        settings["model"] = models.read(given, settings["cache_dtype"], dtype)
    return replace(engine, **settings)


# ---- for people ----------------------------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> Iterator[str]:
    from ..planner.plan import size_text

    model = found["model"]
    what = "a latent" if model["kv"] == 1 else f"K and V of {model['heads']} heads"
    yield (
        f"{model['name']}: {model['type']}, {model['layers']} layers, {what} of {model['head_size']}, {model['dtype']}: "
        f"{model['token_bytes']:,} bytes per token"
    )
    if len(model["groups"]) > 1:
        for number, group in enumerate(model["groups"]):
            sees = f"sees {group['sliding_window']:,} tokens" if group["sliding_window"] else "sees all tokens"
            layers = f"{len(group['layers'])} layers from {group['layers'][0]} on"
            yield f"  group {number}: {layers}, {sees}, {group['token_bytes']:,} bytes per token"
    if (engine := found["engine"]) is not None:
        yield ""
        yield from _engine(engine)
    if (offloading := found["offloading"]) is not None:
        host = offloading["host"]
        who = "all ranks" if host["copies"] == 1 else f"{host['copies']} ranks"
        yield ""
        yield (
            f"Host memory: {size_text(host['bytes'])} as {host['layout']}: {host['blocks']:,} blocks of "
            f"{size_text(host['bytes_a_block'])} for {who}, {host['tokens']:,} tokens"
        )
        if host["values"]:
            yield f"  {host['values']}"
        for note in host["notes"]:
            yield f"  {note}"
        for one in offloading["copies"]:
            yield _copy(one)
        yield "Offloading:"
        yield offloading["command"]
    if (to := found["disaggregation"]) is not None:
        yield ""
        yield "The engine that decodes:"
        yield from _engine(to["decode"]["engine"])
        yield f"A request of {to['tokens']:,} tokens: {size_text(to['bytes'])} in {to['chunks']:,} chunks"
        ways: dict[tuple[int, int], list[int]] = {}
        for one in to["messages"]:
            sums = ways.setdefault((one["from"], one["to"]), [0, 0])
            sums[0] += one["bytes"]
            sums[1] += one["chunks"]
        for (src, dst), (nbytes, chunks) in ways.items():
            yield f"  rank {src} sends rank {dst} {nbytes:,} bytes in {chunks:,} chunks"
        for text in dict.fromkeys(to["proofs"]):
            yield f"  {text}"
        yield "Prefill and decode (host: the address of each machine):"
        yield to["prefill"]["command"]
        yield to["decode"]["command"]


def _engine(engine: dict[str, Any]) -> Iterator[str]:
    for one in engine["ranks"]:
        held = f"layers {_span(one['layers'])}, heads {_span(one['heads'])}"
        yield f"  rank {one['rank']}: {held}, {one['token_bytes']:,} bytes per token"
    alike: dict[tuple[int, str], list[str]] = {}
    for one in engine["pages"]:
        text = (
            f"{one['layout']} ({one['order']}), as {one['backend']} writes it: {one['shape']}, "
            f"pages of {one['page_bytes']:,} bytes"
        )
        alike.setdefault((one["stage"], text), []).append(str(one["group"]))
    for (stage, text), groups in alike.items():
        yield f"  stage {stage}, {_groups(groups)}: {text}"


def _groups(names: list[str]) -> str:
    return f"group{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _copy(one: dict[str, Any]) -> str:
    speed = (
        f"{one['gbps']:g} GB/s ({one['measured']})" if one["gbps"] else "speed not measured on this machine (kvbm tune)"
    )
    kvbm_work = f"{one['launches']} {'launch' if one['launches'] == 1 else 'launches'} of a kernel"
    if one["descriptors"]:
        kvbm_work += f", {one['descriptors']:,} descriptors"
    return (
        f"  {one['way']} of {one['blocks']} blocks, stage {one['stage']}, {_groups(one['groups'])}: {one['bytes']:,} bytes, "
        f"{one['strategy']}: {kvbm_work}; vLLM's own: {one['vllm_descriptors']:,} descriptors; {speed}"
    )


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
