"""The command line: ``kvbm serve-check``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import errors
from ..layout import spec
from .click_classes import Command, Real, Whole
from .common import cast_option, gpu_option, json_option, note, print_json, print_prose, size_of
from .complete import complete_dtype, items_of, some_of

if TYPE_CHECKING:
    from ..integrations.vllm.serving import Engine
    from ..planner.cast import Cast

_COUNT = Whole(1, 1 << 16)

#: Numbers of ranks → vLLM's flag.
_RANKS = {"tp": "--tensor-parallel-size", "pp": "--pipeline-parallel-size", "dcp": "--decode-context-parallel-size"}

#: What ``--to`` may say: numbers, and texts → argument of `Engine`.
_NUMBERS = (*_RANKS, "nt")
_TEXTS = {"layout": "order", "kv-cache-dtype": "cache_dtype", "backend": "backend"}


def _ranks(command: Any) -> Any:
    """An option for each number of ranks."""
    for name, flag in reversed(_RANKS.items()):
        option = click.option(f"--{name}", default=1, show_default=True, type=_COUNT, metavar="N", help=f"{flag}.")
        command = option(command)
    return command


def _of(module: str, *tables: str) -> Callable[[], Iterator[str]]:
    """The names in these tables of a module, which is imported when the shell asks for them."""
    return lambda: chain.from_iterable(getattr(import_module(module, __package__), table) for table in tables)


@click.command(
    "serve-check",
    cls=Command,
    other_names={
        **{flag: f"--{name}" for name, flag in _RANKS.items()},
        "--tokens-per-block": "--block-size",
        "--page-size": "--block-size",
        "--nt": "--block-size",
        "--model": "--vllm",
        "--attention-backend": "--backend",
    },
    examples=[
        "kvbm serve-check --vllm config.json --tp 2 --host-gib 64",
        "kvbm serve-check --vllm config.json --tp 2 --to tp1,nt64,layout=LBNHC",
        "kvbm serve-check --vllm config.json --host-values fp8 --json",
    ],
)
@click.option(
    "--vllm", "given", required=True, metavar="MODEL", shell_complete=some_of(files=True),
    help="A config.json, its folder, or a model in Hugging Face's cache.",
)  # fmt: skip
@_ranks
@click.option("--block-size", "nt", default=16, show_default=True, type=_COUNT, metavar="N", help="Tokens per block.")
@click.option(
    "--kv-cache-dtype", "cache_dtype", default="auto", show_default=True, metavar="TYPE", help="As vLLM's flag.",
    shell_complete=some_of(names=_of("..integrations.vllm.models", "CACHE_DTYPES")),
)  # fmt: skip
@click.option(
    "--dtype",
    metavar="TYPE",
    help="Of the model, as vLLM's flag; that of its config if not given.",
    shell_complete=complete_dtype,
)
@click.option(
    "--layout", "order", default="LBHNC", show_default=True, metavar="ORDER", help="VLLM_KV_CACHE_LAYOUT.",
    shell_complete=some_of(names=_of("..engines.vllm", "ORDERS")),
)  # fmt: skip
@click.option(
    "--backend", default="", metavar="NAME", shell_complete=some_of(names=_of("..engines.vllm", "SIDE_BY_SIDE", "LATENT")),
    help="Attention backend; FLASH_ATTN or FLASH_ATTN_MLA if not given.",
)  # fmt: skip
@click.option(
    "--host-gib", default=64.0, show_default=True, type=Real(0, 1 << 20, min_open=True), metavar="GIB",
    help="Host memory of all ranks.",
)  # fmt: skip
@click.option(
    "--host-layout", default="pages", show_default=True, metavar="LAYOUT",
    shell_complete=some_of("pages", names=spec.layouts),
    help="Layout of blocks in host memory; pages: as the engine has them.",
)  # fmt: skip
@click.option(
    "--host-values",
    metavar="VALUES",
    shell_complete=some_of(names=_of("..integrations.host_values", "FORMATS")),
    help="Quantise blocks on the way to host memory: fp8, mxfp8 or nvfp4.",
)
@click.option(
    "--folder",
    metavar="DIR",
    shell_complete=some_of(files=True),
    help="Folder of files behind host memory. The host layout is then universal if not given.",
)
@click.option(
    "--folder-bytes",
    callback=lambda _, __, value: value and size_of(value, most_tib=1024),
    metavar="SIZE",
    help="With --folder: the most bytes of all its files, such as 500GiB.",
)
@click.option(
    "--num-blocks", "blocks", default=64, show_default=True, type=_COUNT, metavar="N",
    help="Blocks of the store and the load that are planned.",
)  # fmt: skip
@click.option(
    "--to", "to_text", metavar="PLACEMENT", shell_complete=items_of(*_NUMBERS, *(f"{name}=" for name in _TEXTS)),
    help="The engine that decodes: tp1,nt64,layout=LBNHC; what it does not say is as in this engine.",
)  # fmt: skip
@click.option(
    "--tokens", default=8192, show_default=True, type=Whole(1, 1 << 20), metavar="N",
    help="Tokens of a request, with --to.",
)  # fmt: skip
@cast_option('With --to and another kv-cache-dtype: "cast" of both engines, amax, a number, or JSON, as kvbm convert has it.')
@gpu_option("GPU whose measured speeds are printed.")
@json_option()  # fmt: skip
def serve_check(
    given: str, tp: int, pp: int, dcp: int, nt: int, cache_dtype: str, dtype: str | None, order: str, backend: str,
    host_gib: float, host_layout: str, host_values: str | None, folder: str | None, folder_bytes: int | None, blocks: int,
    to_text: str | None, tokens: int, cast: Cast, device: int, as_json: bool,
) -> None:  # fmt: skip
    """Show what kvbm would do in a vLLM engine, without starting it.

    Prints the layouts, what fits into host memory, how blocks are copied, and what is sent to another engine. Nothing is
    allocated, copied or downloaded, and vLLM need not be installed. It lists what is not possible, and exits with the code of
    the first such error.
    """
    from ..integrations.vllm import models, serving

    ctx = click.get_current_context()
    for name in ("cast", "tokens"):
        if to_text is None and ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name} goes with --to, the engine that decodes")
    if (folder is None) != (folder_bytes is None):
        raise click.UsageError("--folder and --folder-bytes: expected both, or none of them")
    if folder and host_values is None and ctx.get_parameter_source("host_layout") is ParameterSource.DEFAULT:
        host_layout = "universal"
    engine = serving.Engine(models.read(given, cache_dtype, dtype), tp, pp, dcp, nt, order, cache_dtype, backend)
    to = _other(engine, to_text, given, dtype) if to_text is not None else None
    found = serving.as_json(
        engine, int(host_gib * (1 << 30)), host_layout, blocks=blocks, device=device, to=to, tokens=tokens, host_values=host_values,
        cast=cast, folder=None if folder is None else {"folder": folder, "folder_bytes": folder_bytes},
    )  # fmt: skip
    if as_json:
        print_json(found)
    else:
        for line in _lines(found):
            if line.startswith("VLLM_"):
                click.echo(line)  # a command, to be copied
            else:
                print_prose(line)
    if engine.model.served == "MODEL" and not as_json:
        note(f"MODEL in the commands stands for the name or the folder of the model, of which {given} is only the config.")
    for text in serving.notes(found["model"]):
        note(text)
    for one in found["refused"]:
        click.echo(f"{click.style('refused:', fg='red', bold=True)} {one['what']}: {one['why']}", err=True)
    if found["refused"]:
        sys.exit(getattr(errors, found["refused"][0]["error"]).exit_code)


def _other(engine: Engine, text: str, given: str, dtype: str | None) -> Engine:
    """The engine that `--to` describes."""
    from dataclasses import replace

    from ..integrations.vllm import models
    from ..reshard import presets

    given_there = presets.options(text.removeprefix("vllm:"), _NUMBERS, tuple(_TEXTS), "--to")
    for name in _NUMBERS:
        if not 0 < given_there.get(name, 1) <= 1 << 16:
            raise errors.SpecError(f"--to: {name}: expected a number from 1 to 65,536, got {given_there[name]}")
    settings = {_TEXTS.get(name, name): value for name, value in given_there.items()}
    try:
        if "cache_dtype" in settings:
            settings["model"] = models.read(given, settings["cache_dtype"], dtype)
        return replace(engine, **settings)
    except errors.SpecError as error:
        raise errors.SpecError(f"--to: {error}") from None


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
        for text in dict.fromkeys([*to["casts"], *to["proofs"]]):
            yield f"  {text[0].lower()}{text[1:]}"
        yield "Prefill and decode (host: the address of each machine):"
        yield to["prefill"]["command"]
        yield to["decode"]["command"]
    if (both := found["together"]) is not None:
        yield "The same with offloading:"
        yield both["prefill"]["command"]
        yield both["decode"]["command"]


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
    speed = f"{one['gbps']:g} GB/s ({one['measured']})" if one["gbps"] else "speed not measured on this machine (kvbm tune)"
    kvbm_work = f"{one['launches']} {'launch' if one['launches'] == 1 else 'launches'} of a kernel"
    if one["descriptors"]:
        kvbm_work += f", {one['descriptors']:,} descriptors"
    return (
        f"  {one['way']} of {one['blocks']} blocks, stage {one['stage']}, {_groups(one['groups'])}: {one['bytes']:,} bytes, "
        f"{one['strategy']}: {kvbm_work}; vLLM's own: {one['vllm_descriptors']:,} descriptors; {speed}"
    )


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}–{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
