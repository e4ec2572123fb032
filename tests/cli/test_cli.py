"""The command line: its output, the files that it writes, and one exit code per class of error."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import casting
import kvbm
import matrix
import oracle
from casting import Side
from kvbm import reshard, store
from kvbm.cli import doctor
from kvbm.cli.app import main
from kvbm.layout.shapes import shape_names
from memory import numpy_dtype, placed
from processes import cli

SHAPE = "nl=2,no=2,nh=4,nt=16,hd=32,dtype=bfloat16"


def call(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args], env={"COLUMNS": "200"})


def ok(*args: str | Path) -> str:
    result = call(*args)
    assert result.exit_code == 0, result.output
    return result.output


def test_help() -> None:
    text = ok("--help")
    for command in (
        "layouts", "shapes", "show", "check", "completion", "plan", "gallery", "schema", "codegen", "convert", "digest", "doctor",
        "demo", "reshard", "verify",
    ):  # fmt: skip
        assert command in text
        assert "Usage" in ok(command, "--help")
    assert kvbm.__version__ in ok("--version")
    for group in ((), ("link",)):
        title = "Commands:" if group else "Layouts and shapes:"
        listed = CliRunner().invoke(main, [*group, "--help"], env={"COLUMNS": "80"}).output.partition(title)[2]
        assert len(listed.splitlines()) > 2 and "..." not in listed, "sentences are whole"


def test_layouts() -> None:
    text = ok("layouts")
    for name in matrix.orders():
        assert name in text
        assert kvbm.load(name).fingerprint in text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is of Linux")
@pytest.mark.parametrize("args", ["--help", "show --help", "layouts", "--version"])
def test_a_full_disk_is_one_line(args: str) -> None:
    """Red for the help, which ended with a traceback."""
    done = cli("onto_a_full_disk", *args.split())
    assert done.returncode and done.stderr.splitlines()[0] == "error: No space left on device"
    assert "Traceback" not in done.stderr


def test_layouts_in_a_pipe() -> None:
    """One line per layout, even for a narrow terminal; name, order, fingerprint and title are never cut."""
    result = CliRunner().invoke(main, ["layouts"], env={"COLUMNS": "40"})
    _, *rows = result.output.splitlines()
    assert result.exit_code == 0 and [row.split()[0] for row in rows if "/" not in row.split()[0]]
    assert {row.split()[0] for row in rows} == set(kvbm.layouts())
    for row in rows:
        layout = kvbm.load(row.split()[0])
        assert [part.strip() for part in row.split("  ") if part.strip()] == [
            layout.name, layout.order_text, layout.fingerprint, *filter(None, [layout.title])
        ]  # fmt: skip


def test_tables_are_not_cut_in_a_terminal() -> None:
    """A table that needs 60 columns has lines of 60 in a terminal of 30; only cells of several words are wrapped."""
    from rich.console import Console

    from kvbm.cli.common import new_table, print_table

    text = io.StringIO()
    table = new_table("one", "two", "words", wrapped=("words",))
    table.add_row("a" * 20, "b" * 30, "some words of text")
    print_table(table, Console(file=text, width=30, force_terminal=True, color_system=None))
    assert "a" * 20 in text.getvalue() and "b" * 30 in text.getvalue() and "…" not in text.getvalue()
    assert [word for word in ("some", "words", "of", "text") if word not in text.getvalue()] == []


def test_layouts_as_json() -> None:
    listed = json.loads(ok("layouts", "vllm/flash_attn", "--json"))
    assert [one["name"] for one in listed] == ["vllm/flash_attn_hnd", "vllm/flash_attn_nhd"]
    assert listed[1]["order"] == "[l] o b t h d" and listed[1]["fingerprint"] == kvbm.load("vllm/flash_attn_nhd").fingerprint
    (planes,) = json.loads(ok("layouts", "vllm/fp8_ds_mla", "--json"))
    assert [plane["dtype"] for plane in planes["planes"]] == ["float8_e4m3fn", "float32", "bfloat16"]
    told = json.loads(ok("layouts", "nhd", "--aliases", "--shape", SHAPE, "--json"))
    assert any("nhd" in group["names"] for group in told["aliases"]) and told["same_addresses"]["num_blocks"] == 1024


@pytest.mark.parametrize("name", ["vllm/flash_attn_nhd", "vllm/fp8_ds_mla", "vllm/paged_attn_v0", "swizzle/128x4"])
def test_show_as_json(name: str) -> None:
    """Strides and extents give the address of every element, as the library does."""
    told = json.loads(call("show", name, "--num-blocks", "6", "--json").stdout)
    shape = ",".join(f"{key}={told['shape'][key]}" for key in ("nl", "no", "nh", "nt", "hd", "dtype"))
    resolved = kvbm.load(name).resolve(kvbm.load_shape(shape), 6)
    assert told["bytes"] == resolved.nbytes and told["num_allocations"] == resolved.table_size
    assert [tuple(one["shape"]) for one in told["allocations"]] == [kind.shape for kind in resolved.kinds]
    assert told["steps"] and all(step["extent"] >= 1 for step in told["steps"]) and told["address"]
    if resolved.parts or len(resolved.orders) == 2 or any(len(step["axes"]) != 1 for step in told["steps"]):
        return
    at = {"b": 3, "l": 0, "o": 1 % told["shape"]["no"], "h": 0, "t": 5 % told["shape"]["nt"], "d": 7}
    entry = offset = 0
    for step in told["steps"]:
        index = at[step["axes"][0]] // step["divisor"] % step["extent"]
        entry, offset = entry + index * step["allocations"], offset + index * step["stride"]
    assert resolved.address(at.pop("b"), **at) == (entry, offset)


def test_plan_as_json(tmp_path: Path) -> None:
    told = json.loads(ok("plan", "nhd", "universal", "--json"))
    made = kvbm.plan("nhd", "universal", "llama-3.1-8b")
    (part,) = told["parts"]
    assert told["kernels"] == made.kernels() and told["kind"] == made.kind == "rows"
    assert told["explanation"] == made.explain().splitlines()
    nbytes = 1
    for loop in part["loops"][1:]:
        nbytes *= loop["extent"]
    assert nbytes * part["loops"][-1]["src"]["bytes"] == made.nbytes == part["bytes"]
    assert [loop["src"] for loop in part["loops"] if loop["what"] == "row"] == [
        {"allocations": 0, "bytes": 256}, {"allocations": 0, "bytes": 2048},
    ]  # fmt: skip


def test_plan_of_a_cast() -> None:
    args = ("plan", "nhd", "record/per_token_head_fp8_planes", "--cast", "amax")
    made = kvbm.plan(*args[1:3], "llama-3.1-8b", cast="amax")
    text = ok(*args)
    assert str(made) in text and "each group of 128 with a float32 scale from its largest value" in " ".join(text.split())
    (part,) = json.loads(ok(*args, "--json"))["parts"]
    assert part["kind"] == "cast" and part["loops"][-1] == {
        "what": "8 elements", "axes": [], "extent": 16, "src": {"allocations": 0, "bytes": 16},
        "dst": {"allocations": 0, "bytes": 8},
    }  # fmt: skip
    elements = 8
    for loop in part["loops"][1:]:
        elements *= loop["extent"]
    assert elements == made.shape.nbytes // 2
    assert "with the scale 0.5 of the caller" in ok("plan", "nhd", "hnd", "--cast", "0.5", "--dtype", "float8_e4m3fn")
    assert call("plan", "nhd", "hnd", "--cast", "x").exit_code == 2
    assert call("plan", "nhd", "hnd", "--dtype", "int8").exit_code == kvbm.PlanError.exit_code


def test_a_cast_has_no_picture(tmp_path: Path) -> None:
    """Red: a notebook ended with ZeroDivisionError."""
    made = kvbm.plan("nhd", "record/mxfp8_tensors", "llama-3.1-8b", cast="amax")
    assert made._repr_svg_() is None and "values in another format" in made._repr_html_()
    result = call("plan", "nhd", "record/mxfp8_tensors", "--cast", "amax", "--svg", tmp_path / "x.svg")
    assert result.exit_code == kvbm.PlanError.exit_code and "a plan of a cast has no picture" in result.output
    assert not list(tmp_path.iterdir())


def test_check_as_json() -> None:
    bad = Path(__file__).parents[1] / "data" / "bad" / "unknown_key.yaml"
    result = call("check", "nhd", bad, "--json")
    good, wrong = json.loads(result.stdout)
    assert result.exit_code == kvbm.SpecError.exit_code == wrong["exit_code"] and "unknown_key.yaml:3" in wrong["error"]
    assert (good["given"], good["error"], good["name"]) == ("nhd", None, "nhd") and "one-to-one" in good["notes"][0]


def test_shapes() -> None:
    """One line per shape, even for a narrow terminal; the sizes are those of the files."""
    result = CliRunner().invoke(main, ["shapes"], env={"COLUMNS": "40"})
    rows = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert result.exit_code == 0 and [name for name in rows if name in shape_names()] == shape_names()
    # 80 layers of K and V, one of 8 heads, 16 tokens, 128 elements, 2 bytes
    assert rows["llama-3.1-70b/tp8"].split() == [
        "llama-3.1-70b/tp8", "80", "2", "1", "16", "128", "bfloat16", f"{80 * 2 * 16 * 128 * 2:,}", "Llama", "3.1", "70B",
    ]  # fmt: skip
    listed = json.loads(ok("shapes", "Llama-3.1-8B", "--json"))
    assert [one["name"] for one in listed] == [f"llama-3.1-8b{tp}" for tp in ("", "/tp2", "/tp4", "/tp8")]
    assert listed[1] == {
        "name": "llama-3.1-8b/tp2", "title": "Llama 3.1 8B", "nl": 32, "no": 2, "nh": 4, "nt": 16, "hd": 128,
        "dtype": "bfloat16", "bytes_per_block": 32 * 2 * 4 * 16 * 128 * 2,
    }  # fmt: skip
    result = call("shapes", "no such")
    assert result.exit_code == kvbm.SpecError.exit_code and "'no such'" in result.output


@pytest.mark.parametrize("name", sorted(matrix.orders()))
def test_show(name: str) -> None:
    shape = "deepseek-v3" if matrix.latent(name) else "llama-3.1-70b/tp4"
    text = ok("show", name, "--shape", shape if not matrix.scales(name) else "nl=1,no=1,nh=1,nt=256,hd=16")
    assert name in text and len(text.splitlines()) > 3


def test_plan() -> None:
    text = ok("plan", "nhd", "universal", "--shape", "llama-3.1-70b")
    made = kvbm.plan(kvbm.load("nhd"), kvbm.load("universal"), kvbm.load_shape("llama-3.1-70b"))
    assert str(made) in text
    assert made.kernels()[0] in text


def test_reshard(tmp_path: Path) -> None:
    """Files and presets; the command prints what the library returns."""
    file = tmp_path / "prefill.yaml"
    file.write_text("mesh: tp4\nshard: {h: tp}\nnt: 16\n", encoding="utf-8")
    made = reshard.plan(reshard.load(str(file), kvbm.load_shape(SHAPE)), reshard.load("vllm:tp2,nt64", kvbm.load_shape(SHAPE)))
    text = ok("reshard", file, "vllm:tp2,nt64", "--shape", SHAPE)
    assert text.startswith(f"{made}\n\nLayers: ") and "prefill (tp4, 16 tokens per block) → vllm:tp2,nt64" in text
    assert " ".join(text.partition("\n\n")[2].split()) == " ".join(made.explain().split())
    counted = ok("reshard", file, "vllm:tp2,nt64", "--shape", SHAPE, "--tokens", 1000)
    assert "1,000 tokens: 62 units, and 8 tokens one by one" in counted
    printed = json.loads(ok("reshard", file, "vllm:tp2,nt64", "--shape", SHAPE, "--json"))
    assert printed["fingerprint"] == made.fingerprint and len(printed["messages"]) == 4
    assert [m["bytes"] for m in printed["messages"]] == [2 * 2 * 16 * 32 * 2] * 4


def test_reshard_with_a_cast() -> None:
    """Red: the command knew no cast."""
    engines, shape = ("vllm:tp4", "vllm:tp2,nt64"), "llama-3.1-8b,nl=2"
    layouts, fp8 = ("--from", "nhd", "--to", "record/per_token_head_fp8_planes"), "float8_e4m3fn"
    text = ok("reshard", *engines, "--shape", shape, "--cast", "amax", *layouts)
    assert "cast 'amax': data: bfloat16 → float8_e4m3fn" in text and "every scale from a message that has all" in text
    many = '{"k": [0.5, 0.25], "v": 1}'
    codes = ("--dtype", fp8, "--from", "nhd", "--to", "hnd")
    found = json.loads(ok("reshard", *engines, "--shape", shape, "--cast", many, *codes, "--json"))
    shapes = [kvbm.load_shape(f"{shape},dtype={dtype}") for dtype in ("bfloat16", fp8)]
    sides = [reshard.load(*one) for one in zip(engines, shapes, strict=True)]
    made = reshard.plan(*sides, cast=kvbm.Scale(k=[0.5, 0.25], v=1), layouts=("nhd", "hnd"))
    assert found["fingerprint"] == made.fingerprint and found["cast"]["scale"] == {"k": [0.5, 0.25], "v": 1.0}
    step = ok("reshard", *engines, "--shape", shape, "--gather", "--cast", "0.5", *codes)
    assert "Cast: values change from bfloat16 to float8_e4m3fn, with the scale 0.5 of the caller." in " ".join(step.split())
    for more, code, says in (
        (("--cast", "[1]"), kvbm.PlanError.exit_code, "expected one number for each of the 2 layers of the model, got 1"),
        (("--cast", "amax", *layouts[:2]), 2, "--from and --to: expected both, beside --cast, or none"),
        (layouts, 2, "--from and --to: expected both, beside --cast, or none"),
        (("--dtype", fp8), kvbm.PlanError.exit_code, "or cast= to change values on the way"),
        (("--cast", "amax", *codes), kvbm.PlanError.exit_code, "no plane of scales takes part"),
        (("--cast", "[0.5,"), 2, "expected amax, a number, or JSON"),
        (("--cast", "[0.5, true]"), 2, "layer 1: expected a number from"),
        (("--cast", "[" * 9999), 2, "expected amax, a number, or JSON"),
        (("--cast", '{"k": null, "v": null}'), 2, "expected numbers for k and v, got {'k': None, 'v': None}"),
        (("--cast", '{"k": 1, "k": 0.5, "v": 1}'), 2, "'k' is there twice"),
    ):
        result = call("reshard", *engines, "--shape", shape, *more)
        assert result.exit_code == code and says in " ".join(result.stderr.split()), (more, result.stderr)


def test_reshard_of_replicas() -> None:
    shape = "llama-3.1-8b,nh=1"
    one, striped = (ok("reshard", "vllm:tp4", "vllm", "--shape", shape, *more) for more in ((), ("--stripe",)))
    assert "1 message, unit" in one and "4 messages, unit" in striped and "All of a group send" in striped
    text = ok("reshard", "vllm", "vllm:tp4", "--shape", shape, "--gather")
    assert text.startswith("Step 1:\n") and "\nStep 2:\n" in text and "4 messages" in text and "12 messages" in text
    first, second = json.loads(ok("reshard", "vllm", "vllm:tp4", "--shape", shape, "--gather", "--json"))
    assert (len(first["messages"]), len(second["messages"])) == (4, 12)


def test_reshard_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Any] = []

    def draw(*made: Any) -> Figure:
        drawn.extend(made)
        return Figure()

    monkeypatch.setattr("kvbm.show.reshard_figure.draw", draw)
    path = tmp_path / "made.svg"
    assert ok("reshard", "vllm:tp4", "vllm:tp2", "--shape", SHAPE, "--svg", path) == f"{path}\n"
    assert "<svg" in path.read_text(encoding="utf-8") and [made.title for made in drawn] == ["vllm:tp4 → vllm:tp2"]
    assert len(json.loads(ok("reshard", "vllm:tp4", "vllm:tp2", "--shape", SHAPE, "--svg", path, "--json"))["messages"]) == 4
    result = call("reshard", "vllm:tp4", "vllm:tp2", "--shape", SHAPE, "--svg", tmp_path / "no" / "x.svg")
    assert result.exit_code == kvbm.SpecError.exit_code and len(drawn) == 2, "nothing is drawn that could not be written"
    ok("reshard", "vllm", "vllm:tp2", "--shape", "llama-3.1-8b,nh=1", "--gather", "--svg", path)
    assert len(drawn) == 4, "both steps"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, tmp_path: Path) -> None:
    """The script contains the program and its variable; if the shell is installed, it can parse the script."""
    script = ok("completion", shell)
    assert f"_KVBM_COMPLETE={shell}_complete" in script and "complete" in script and " kvbm" in script
    if (program := shutil.which(shell)) is not None:
        path = tmp_path / "script"
        path.write_text(script, encoding="utf-8")
        subprocess.run([program, "-n", str(path)], check=True)
    assert call("completion", "tcsh").exit_code == 2


def test_shapes_are_completed() -> None:
    complete = ShellComplete(main, {}, "kvbm", "_KVBM_COMPLETE")
    found = [item.value for item in complete.get_completions(["show", "nhd", "--shape"], "llama-3.1-8b")]
    assert found == [f"llama-3.1-8b{tp}" for tp in ("", "/tp2", "/tp4", "/tp8")]


def test_placements_are_completed() -> None:
    for given, expected in (("v", ["vllm:tp"]), ("", [""]), ("some", ["some"]), ("./x", ["./x"])):
        complete = ShellComplete(main, {}, "kvbm", "_KVBM_COMPLETE")
        assert [item.value for item in complete.get_completions(["reshard"], given)] == expected


def test_check_good(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('title: mine\norder: "[b l o] t h d"\n', encoding="utf-8")
    text = ok("check", path)
    assert "mine.yaml" in text and "nhd" in text, "an alias of a shipped layout is told"
    assert "ok" in ok("check", matrix.LAYOUTS / "universal.yaml", matrix.LAYOUTS / "vllm" / "LBHNC.yaml")


def test_check_bad() -> None:
    bad = Path(__file__).parents[1] / "data" / "bad"
    result = call("check", bad / "unknown_key.yaml", bad / "repeated_axis.yaml")
    assert result.exit_code == kvbm.SpecError.exit_code
    assert "unknown_key.yaml:3" in result.output and "repeated_axis.yaml:2" in result.output, (
        "every error, not the first alone"
    )
    result = call("check", bad / "shape_split_does_not_cover.yaml", "--shape", SHAPE.replace("hd=32", "hd=128"))
    assert result.exit_code == kvbm.LayoutError.exit_code


def test_check_takes_names() -> None:
    """The command checks the requested shape, and no other."""
    both = ok("check", "universal", "vllm/LBHNC")
    assert both.count("ok  ") == 2 and "universal: [b] h l o t d" in both and "shipped shapes" in both
    assert ok("check", "universal", "--shape", SHAPE).splitlines()[1:] == [f"    one-to-one at {SHAPE}"]
    result = call("check", "nhd", "vllm/paged_attn_v0", "--shape", SHAPE.replace("hd=32", "hd=5"))
    assert result.exit_code == kvbm.LayoutError.exit_code and "vllm/paged_attn_v0" in result.output and "ok  nhd" in result.output
    result = call("check", "universl")
    assert result.exit_code == kvbm.SpecError.exit_code and "universal" in result.output, "the nearest names"
    assert call("check", "none.yaml").exit_code == kvbm.SpecError.exit_code


@pytest.mark.parametrize(
    "args",
    [("show", "nhd"), ("plan", "nhd", "universal"), ("which", "32x2,1024,16,8,128"), ("reshard", "vllm:tp4", "vllm:tp2")],
    ids=lambda args: args[0],
)
@pytest.mark.slow  # 0.5 s
def test_a_shape_need_not_be_given(args: tuple[str, ...]) -> None:
    assert ok(*args) == ok(*args, "--shape", "llama-3.1-8b")
    assert "[default: llama-3.1-8b" in " ".join(ok(args[0], "--help").split())


@pytest.mark.parametrize("args", [("show", "flashinfer/mla"), ("show", "vllm/fp8_ds_mla"), ("plan", "vllm/mla", "mlc/mla")])
def test_a_latent_has_a_shape_of_its_own(args: tuple[str, ...]) -> None:
    """If the default shape does not fit, another is chosen and named on stderr; a given shape is never replaced."""
    result = call(*args)
    assert result.exit_code == 0 and "deepseek-v3" in result.stderr and "--shape" in result.stderr, result.output
    assert result.stdout == ok(*args, "--shape", "deepseek-v3")
    assert call(*args, "--shape", "llama-3.1-8b").exit_code == kvbm.LayoutError.exit_code
    assert call("show", "nhd").stderr == ""


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("plan", "nhd", "no/such", "--shape", SHAPE), kvbm.SpecError),
        (("plan", "nhd", "universal", "--shape", "llama-9"), kvbm.SpecError),
        (("plan", "nhd", "universal", "--shape", "llama-3.1-8b,dtype=float7"), kvbm.DTypeError),
        (("plan", "operational", "universal", "--shape", SHAPE), kvbm.PlanError),
        (("plan", "nhd", "vllm/paged_attn_v0", "--shape", SHAPE.replace("hd=32", "hd=5")), kvbm.LayoutError),
        (("show", "vllm/paged_attn_v0", "--shape", SHAPE.replace("hd=32", "hd=5")), kvbm.LayoutError),
        (("show", "no/such", "--shape", SHAPE), kvbm.SpecError),
        (("reshard", "vllm:tp3", "vllm", "--shape", SHAPE), kvbm.SpecError),
        (("reshard", "vllm", "no.yaml", "--shape", SHAPE), kvbm.SpecError),
        (("reshard", "vllm:tp4", "vllm", "--shape", "llama-9"), kvbm.SpecError),
        (("reshard", "vllm", "vllm", "--shape", SHAPE, "--svg", "picture.png"), kvbm.SpecError),
    ],
)
def test_exit_codes(args: tuple[str, ...], error: type[kvbm.KvbmError]) -> None:
    result = call(*args)
    assert result.exit_code == error.exit_code, result.output
    assert "Traceback" not in result.output and "error" in result.output
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "args", [(), ("nonsense",), ("plan", "nhd"), ("show",), ("convert", "nowhere", "out", "--to", "nhd"),
             ("reshard", "vllm"), ("reshard", "vllm", "vllm", "--shape", SHAPE, "--tokens", "0")]
)  # fmt: skip
def test_usage(args: tuple[str, ...]) -> None:
    assert call(*args).exit_code == 2


def test_codegen(tmp_path: Path) -> None:
    layouts, out = tmp_path / "layouts", tmp_path / "out"
    layouts.mkdir()
    (layouts / "a.yaml").write_text('order: "[b l o] t h d"\n', encoding="utf-8")
    (layouts / "b.yaml").write_text('order: "[b] h l o t d"\n', encoding="utf-8")
    assert call("codegen", "--layouts", layouts, "--out", out, "--check").exit_code == 1
    assert not list(out.glob("*")), "--check writes nothing"
    ok("codegen", "--layouts", layouts, "--out", out)
    assert (out / "kernels_00.cu").is_file() and (out / "manifest.txt").is_file()
    ok("codegen", "--layouts", layouts, "--out", out, "--check")
    (out / "kernels_00.cu").write_text("// edited\n", encoding="utf-8")
    result = call("codegen", "--layouts", layouts, "--out", out, "--check")
    assert result.exit_code == 1 and "kernels_00.cu" in result.output
    assert (out / "kernels_00.cu").read_text(encoding="utf-8") == "// edited\n"


def test_doctor() -> None:
    text = ok("doctor")
    for word in ("kvbm", "driver", "torch", "numpy", "wire.memory", "wire.mapped", "wire.torch", "wire.nixl"):
        assert word in text


def test_doctor_cuts_nothing_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    path = f"/{'b' * 60}/end"
    text = io.StringIO()
    console = Console(file=text, width=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(doctor, "findings", lambda: iter([("ok", "kvbm", path)]))
    monkeypatch.setattr("kvbm.cli.app.terminal", lambda: console)
    assert call("doctor").exit_code == 0
    assert path in "".join(text.getvalue().split()) and "…" not in text.getvalue()


class _Core:
    """Replaces the extension for doctor: a driver that answers or fails, and GPUs of given capabilities."""

    def __init__(self, driver: int | kvbm.KvbmError = 13000, gpus: Any = (), images: int = 9) -> None:
        self.driver, self.gpus, self.images = driver, gpus, images

    def kernel_names(self) -> list[str]:
        return ["one"]

    def num_images(self) -> int:
        return self.images

    def driver_version(self) -> int:
        if isinstance(self.driver, kvbm.KvbmError):
            raise self.driver
        return self.driver

    def device_count(self) -> int:
        if isinstance(self.gpus, kvbm.KvbmError):
            raise self.gpus
        return len(self.gpus)

    def device_info(self, index: int) -> dict[str, Any]:
        return {"name": "GPU", "capability": self.gpus[index], "sms": 1, "memory": 1 << 30}

    def has_memcpy_batch(self) -> bool:
        return True


def _unavailable(code: int) -> kvbm.KvbmError:
    return kvbm.CudaUnavailableError("why", code=code)


@pytest.mark.parametrize(
    ("core", "expected", "first"),
    [
        pytest.param(_Core(_unavailable(-1)), 0, "no NVIDIA driver found", id="no-driver"),
        pytest.param(_Core(_unavailable(-1), images=0), 0, "no NVIDIA driver found", id="nothing-built-no-driver"),
        pytest.param(_Core(_unavailable(34)), 0, "no NVIDIA driver found", id="stub-of-a-driver"),
        pytest.param(_Core(_unavailable(803)), 19, "", id="mismatched-driver"),
        pytest.param(_Core(_unavailable(803), images=0), 0, "", id="mismatched-driver-nothing-built"),
        pytest.param(_Core(), 0, "", id="no-gpu"),
        pytest.param(_Core(gpus=_unavailable(100)), 0, "", id="no-gpu-says-the-driver"),
        pytest.param(_Core(gpus=_unavailable(46)), 19, "", id="gpu-that-is-taken"),
        pytest.param(_Core(gpus=[(9, 0)]), 0, "", id="gpu"),
        pytest.param(_Core(gpus=[(8, 0)]), 19, "", id="gpu-without-image"),
        pytest.param(_Core(gpus=[(8, 0)], images=0), 0, "", id="gpu-nothing-built"),
        pytest.param(_Core(gpus=[(8, 0), (9, 0)]), 0, "", id="one-of-two-gpus"),
        pytest.param(None, 16, "", id="no-extension"),
    ],
)
def test_doctor_exits_by_what_it_finds(
    core: _Core | None, expected: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_build_info", lambda: {"targets": "sm_90", "nvcc": "13.0.88"})
    monkeypatch.setattr(doctor, "_tables", lambda _: iter(()))
    if core is None:
        monkeypatch.delattr(kvbm, "_core", raising=False)
        monkeypatch.setitem(sys.modules, "kvbm._core", None)
    else:
        monkeypatch.setattr(kvbm, "_core", core, raising=False)
    result = call("doctor", "--json")
    told = json.loads(result.output)
    assert result.exit_code == expected, result.output
    assert told[0]["text"].startswith(first or doctor._version("kvbm-layouts") or "not installed")
    assert sum("no NVIDIA driver found" in one["text"] for one in told) == bool(first)
    text = call("doctor")
    assert text.exit_code == expected and len(text.output.splitlines()) == len(told), "a record a line"


@pytest.mark.parametrize(("driver", "nvcc", "note"), [
    (12080, "13.0.88", "need a driver for CUDA 13 (release 580 or newer)"),
    (12080, "14.1.2", "need a driver for CUDA 14: update"),
    (13000, "13.2.1", ""),
    (13000, "12.9.86", ""),
])  # fmt: skip
def test_doctor_on_a_driver_of_an_older_cuda(driver: int, nvcc: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_tables", lambda _: iter(()))
    told = list(doctor._gpus(_Core(driver, [(9, 0)]), "sm_90", nvcc))
    assert told[0] == ("ok", "driver", f"CUDA {driver // 1000}.{driver % 1000 // 10}")
    notes = [text for mark, _, text in told if mark == "note"]
    assert [nvcc in text and note in text for text in notes] == ([True] if note else [])


@pytest.mark.parametrize("overwrites", [False, True])
def test_doctor_on_the_other_kvbm(overwrites: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the same name is a note; if its files are in kvbm's folder, it is an error."""
    info = tmp_path / "kvbm-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbm\nVersion: 9.9\n", encoding="utf-8")
    ours = os.path.relpath(Path(doctor.__file__).parent / "__init__.py", tmp_path)
    (info / "RECORD").write_text(f"{ours if overwrites else 'kvbm/__init__.py'},,\n", encoding="utf-8")
    monkeypatch.setattr(kvbm, "_core", _Core(), raising=False)
    assert not [what for _, what, _ in doctor.findings() if what == "conflict"]
    monkeypatch.syspath_prepend(tmp_path)
    found = list(doctor.findings())
    [(mark, text)] = [(mark, text) for mark, what, text in found if what == "conflict"]
    assert "9.9" in text and "pip uninstall kvbm" in text
    assert (mark, doctor.exit_code(found)) == (("broken", 16) if overwrites else ("note", 0))


def test_doctor_on_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists installed transports without importing them."""

    def told(**versions: str) -> dict[str, tuple[str, str]]:
        here = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(doctor, "_version", here.get)
        return {what: (mark, text) for mark, what, text in doctor._transports()}

    files = [Path("x/libplugin_UCX.so"), Path("y/libplugin_UCX.so"), Path("x/libplugin_POSIX.so"), Path("x/other.so")]
    monkeypatch.setattr("importlib.metadata.files", lambda _: files)
    none = told()
    assert none["wire.memory"][0] == "ok" and none["wire.torch"][0] == none["wire.nixl"][0] == ""
    assert told(nixl="1.5.1")["wire.nixl"] == none["wire.nixl"] and "[nixl]" in none["wire.nixl"][1]
    assert told(nixl="1.5.1", nixl_cu13="1.5.1")["wire.nixl"] == ("ok", "1.5.1 (nixl-cu13): POSIX, UCX")
    assert told(torch="2.13")["wire.torch"][0] == "ok"


# ---- convert -------------------------------------------------------------------------------------------------------


def _source(path: Path, name: str, text: str, blocks: int, metadata: dict[str, str] | None = None) -> oracle.Placed:
    """A safetensors file of coded blocks, written without kvbm."""
    shape = kvbm.load_shape(text)
    where = placed(matrix.orders()[name], shape, blocks)
    codes = {
        "bfloat16": "BF16",
        "float16": "F16",
        "float8_e4m3fn": "F8_E4M3",
        "float32": "F32",
        "uint8": "U8",
        "int64": "I64",
    }
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for i, space in enumerate(where.spaces):
        header[f"alloc_{i:05d}"] = {
            "dtype": codes[shape.dtype],
            "shape": space.shape,
            "data_offsets": [at, at + space.nbytes],
        }
        at += space.nbytes
    body = np.zeros(at, np.uint8)
    oracle.scatter(body, _flat(where), oracle.coded(where, range(blocks), 0))
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body.tobytes())
    return where


def _flat(where: oracle.Placed) -> np.ndarray:
    """Byte positions of adjacent allocations."""
    starts = np.cumsum([0] + [space.nbytes for space in where.spaces])[:-1]
    entry, offset = where.address(range(where.num_blocks))
    return starts[entry] + offset


def _check(path: Path, name: str, text: str, blocks: int) -> dict[str, str]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    shape = kvbm.load_shape(text)
    where = placed(matrix.orders()[name], shape, blocks)
    body = np.frombuffer(raw[8 + length :], np.uint8)
    digests = [header.pop(name) for name in [*header] if name.startswith("kvbm.digests")]
    body = body[max(each["data_offsets"][1] for each in digests) :]
    assert [header[f"alloc_{i:05d}"]["shape"] for i in range(len(where.spaces))] == [
        list(s.shape) for s in where.spaces
    ]
    assert len(header) == len(where.spaces) and body.size == sum(s.nbytes for s in where.spaces)
    got = oracle.gather(body, _flat(where), shape.itemsize)
    assert np.array_equal(got, oracle.coded(where, range(blocks), 0))
    return metadata


@pytest.mark.parametrize(
    ("src", "dst", "dtype"),
    [
        ("vllm/LBHNC", "universal", "bfloat16"),
        ("nhd", "vllm/paged_attn_v0", "float8_e4m3fn"),
        ("hf/dynamic_cache", "nhd", "float32"),
        ("universal", "vllm/BHLNC", "int64"),
    ],
)
@pytest.mark.slow  # 0.4 s
def test_convert(tmp_path: Path, src: str, dst: str, dtype: str) -> None:
    text = SHAPE.replace("bfloat16", dtype)
    _source(tmp_path / "in.safetensors", src, text, 5)
    before = (tmp_path / "in.safetensors").read_bytes()
    ok(
        "convert",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        "--from",
        src,
        "--to",
        dst,
        "--shape",
        text,
    )
    metadata = _check(tmp_path / "out.safetensors", dst, text, 5)
    assert metadata["kvbm.layout"] == dst and metadata["kvbm.fingerprint"] == kvbm.load(dst).fingerprint
    assert (tmp_path / "in.safetensors").read_bytes() == before
    # The file says what it is: back without --from and --shape.
    ok("convert", tmp_path / "out.safetensors", tmp_path / "back.safetensors", "--to", src)
    _check(tmp_path / "back.safetensors", src, text, 5)
    assert {p.name for p in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors", "back.safetensors"}


def test_converted_files_are_safetensors(tmp_path: Path, torch: Any) -> None:
    safetensors = pytest.importorskip("safetensors")
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    ok(
        "convert",
        tmp_path / "in.safetensors",
        tmp_path / "out.safetensors",
        "--from",
        "nhd",
        "--to",
        "universal",
        "--shape",
        SHAPE,
    )
    with safetensors.safe_open(tmp_path / "out.safetensors", framework="pt") as file:
        tensor = file.get_tensor("alloc_00001")
        assert tensor.shape == (4, 2, 2, 16, 32) and tensor.dtype == torch.bfloat16
        where = placed(matrix.orders()["universal"], kvbm.load_shape(SHAPE), 3)
        want = oracle.coded(where, [1], 0)[0].transpose(2, 0, 1, 3, 4, 5)  # h l o t d
        assert np.array_equal(tensor.contiguous().view(torch.uint8).numpy().reshape(want.shape), want)


def _fails(tmp_path: Path, error: type[kvbm.KvbmError] | int, *args: str | Path) -> str:
    result = call("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *args)
    code = error if isinstance(error, int) else error.exit_code
    assert result.exit_code == code, result.output
    assert not (tmp_path / "out.safetensors").exists(), "nothing half-written"
    assert {p.name for p in tmp_path.iterdir()} == {"in.safetensors"}
    return result.output


def test_convert_refuses(tmp_path: Path) -> None:
    meta = {"kvbm.layout": "nhd", "kvbm.fingerprint": kvbm.load("hnd").fingerprint}
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    _fails(tmp_path, kvbm.BindError, "--to", "universal", "--shape", SHAPE)  # which layout?
    _fails(tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal")  # which shape?
    _fails(tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal", "--shape", SHAPE.replace("nl=2", "nl=5"))
    _fails(tmp_path, kvbm.BindError, "--from", "hnd", "--to", "universal", "--shape", SHAPE)
    _fails(
        tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal", "--shape", SHAPE.replace("bfloat16", "float16")
    )
    _fails(tmp_path, kvbm.SpecError, "--from", "nhd", "--to", "no/such", "--shape", SHAPE)
    _fails(tmp_path, 2, "--from", "nhd", "--to", "universal", "--shape", SHAPE, "--device", "tpu")
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3, meta)
    text = _fails(tmp_path, kvbm.BindError, "--from", "nhd", "--to", "universal", "--shape", SHAPE)
    assert kvbm.load("hnd").fingerprint in text, "a stored fingerprint is never ignored"
    _source(tmp_path / "in.safetensors", "operational", SHAPE, 3)
    _fails(tmp_path, kvbm.PlanError, "--from", "operational", "--to", "universal", "--shape", SHAPE)


def test_convert_refuses_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    args = ("--from", "nhd", "--to", "universal", "--shape", SHAPE)
    for data in (b"", b"\x01", b"\xff" * 100, struct.pack("<Q", 4) + b"{}  ", struct.pack("<Q", 1 << 40) + b"{}"):
        path.write_bytes(data)
        _fails(tmp_path, kvbm.BindError, *args)
    _source(path, "nhd", SHAPE, 3)
    path.write_bytes(path.read_bytes()[:-1])
    _fails(tmp_path, kvbm.BindError, *args)


def test_convert_keeps_what_is_there(tmp_path: Path) -> None:
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"mine")
    args = ("convert", tmp_path / "in.safetensors", out, "--from", "nhd", "--to", "universal", "--shape", SHAPE)
    assert call(*args).exit_code == 2 and out.read_bytes() == b"mine"
    ok(*args, "--force")
    _check(out, "universal", SHAPE, 3)
    same = call("convert", out, out, "--to", "nhd", "--force")
    assert same.exit_code == 2
    _check(out, "universal", SHAPE, 3)


# ---- digests of files ------------------------------------------------------------------------------------------------


def _held(side: Side) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in side.pool.arrays]


def test_convert_casts(tmp_path: Path) -> None:
    src = Side("nhd", (2, 2, 3, 4, 64), "bfloat16", 3)
    dst = Side("record/per_token_head_fp8_planes", (2, 2, 3, 4, 64), "bfloat16", 3)
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    store.save(one, src.pool)
    said = ok("convert", one, two, "--to", dst.layout.name, "--cast", "amax")
    assert "verified before the cast; data: float8_e4m3fn, one float32 for each token and head (64 elements), from bfloat16" in said
    dst.put(casting.expected(src, dst, [0, 1, 2], [0, 1, 2]))
    assert casting.tensors(two) == _held(dst)
    assert "all as they were" in ok("verify", two)
    said = ok("convert", two, three, "--to", "universal", "--cast", "amax", "--no-verify", "--blocks", "2,0")
    assert "verified" not in said and "bfloat16, from float8_e4m3fn" in said
    back = Side("universal", (2, 2, 3, 4, 64), "bfloat16", 2, dst=True)
    back.put(casting.expected(dst, back, [2, 0], [0, 1]))
    assert casting.tensors(three) == _held(back)
    # A scale of the caller stays with the file.
    ok("convert", one, three, "--to", "universal", "--cast", "0.5", "--dtype", "float8_e4m3fn", "--force")
    codes = Side("universal", (2, 2, 3, 4, 64), "float8_e4m3fn", 3, dst=True)
    codes.put(casting.expected(src, codes, [0, 1, 2], [0, 1, 2], 0.5))
    assert casting.tensors(three) == _held(codes)
    assert "verified" in ok("convert", three, tmp_path / "moved", "--to", "hnd") and "all as they were" in ok("verify", three)
    for cast in ("amax", "0.5", "[0.5,0.5]", '{"k": 0.5, "v": [0.5, 0.5]}'):
        ok("convert", tmp_path / "moved", two, "--to", "nhd", "--cast", cast, "--force")
        values = Side("nhd", (2, 2, 3, 4, 64), "bfloat16", 3, dst=True)
        values.put(casting.expected(codes, values, [0, 1, 2], [0, 1, 2], 0.5, source=codes.after.copy()))
        assert casting.tensors(two) == _held(values)


def test_convert_refuses_casts(tmp_path: Path) -> None:
    side = Side("nhd", (2, 2, 3, 4, 64), "bfloat16", 3)
    store.save(tmp_path / "in.safetensors", side.pool, dtype="float8_e4m3fn", cast=kvbm.Scale(0.5))
    for error, args, words in (
        (kvbm.BindError, ("hnd", "--cast", "0.25"), "cast with Scale(0.5), so Scale(0.25) would give other values"),
        (kvbm.BindError, ("hnd", "--dtype", "bfloat16"), "only a cast makes it bfloat16"),
        (kvbm.PlanError, ("record/mxfp8_tensors", "--cast", "amax"), "expected the same planes on both sides"),
        (kvbm.PlanError, ("record/mxfp8_tensors",), "expected the same planes on both sides; cast='amax' (--cast amax) quantises"),
        (2, ("hnd", "--cast", "max"), "--cast': expected amax, a number, or JSON: a list with one for each layer, or an object of"),
        (2, ("hnd", "--cast", "nan"), "expected a number from 2**-100 to 2**100"),
        (2, ("hnd", "--cast", "-1"), "expected a number from 2**-100 to 2**100"),
        (2, ("hnd", "--cast", "1e40"), "expected a number from 2**-100 to 2**100"),
        (kvbm.DTypeError, ("hnd", "--cast", "amax", "--dtype", "f7"), "dtype"),
    ):
        said = _fails(tmp_path, error, "--to", *args)
        assert words in " ".join(said.split()), said


def _flip(path: Path, tensor: str, at: int) -> None:
    from kvbm import store

    raw = bytearray(path.read_bytes())
    raw[store.read(path).tensors[tensor].begin + at] ^= 16
    path.write_bytes(raw)


def _two_files(tmp_path: Path) -> tuple[Path, Path]:
    """The same blocks in two layouts."""
    _source(tmp_path / "bare", "nhd", SHAPE, 5)
    one, other = tmp_path / "one", tmp_path / "other"
    said = ok("convert", tmp_path / "bare", one, "--from", "nhd", "--to", "vllm/LBHNC", "--shape", SHAPE)
    assert said.endswith("on cpu, verified\n")
    ok("convert", one, other, "--to", "universal")
    return one, other


def test_digest(tmp_path: Path) -> None:
    one, other = _two_files(tmp_path)
    pool = kvbm.Pool(kvbm.load("nhd"), kvbm.load_shape(SHAPE), _arrays(tmp_path / "bare"))
    want = [f"{value:016x}" for value in pool.digest().tolist()]
    assert ok("digest", one) == "".join(f"{text}  {one}:{block}\n" for block, text in enumerate(want))
    args = ("--from", "nhd", "--shape", SHAPE)
    for text in (ok("digest", "--json", one, other), ok("digest", "--json", tmp_path / "bare", *args)):
        told = json.loads(text)
        assert told.keys() == {"digest", "files"} and told["digest"] == "kvbm-digest-1"
        for file in told["files"]:
            assert file.keys() == {"path", "error", "blocks"} and file["error"] is None
            assert file["blocks"] == [{"block": block, "digest": text} for block, text in enumerate(want)]
    assert [line.split()[0] for line in ok("digest", other, "--blocks", "4,1-2").splitlines()] == [want[i] for i in (4, 1, 2)]
    assert ok("digest", "--write", tmp_path / "bare", *args).split()[0::2] == want
    assert "5 blocks compared, all as they were" in ok("verify", tmp_path / "bare")
    again = call("digest", "--write", tmp_path / "bare")
    assert again.exit_code == kvbm.BindError.exit_code and "the file has digests" in again.stderr
    assert call("digest", "--write", other, "--blocks", "1").exit_code == 2


def _arrays(path: Path) -> list[np.ndarray]:
    from kvbm import store

    return list(store.read(path).pool(kvbm.load("nhd"), kvbm.load_shape(SHAPE)).arrays)


def test_verify(tmp_path: Path) -> None:
    """Errors in every file are reported; the exit code for digests takes precedence."""
    one, other = _two_files(tmp_path)
    assert ok("verify", one, other).splitlines() == [f"{path}: 5 blocks compared, all as they were" for path in (one, other)]
    _flip(one, "alloc_00000", (1 * 5 + 1) * 4 * 16 * 64 * 2 + 70)  # l b h n c: K and V of a token side by side
    result = call("verify", tmp_path / "bare", other, one)
    assert result.exit_code == kvbm.DigestError.exit_code == 21 and "bare: the file has no digests" in result.stderr
    first, line, last = result.stdout.splitlines()
    assert first.startswith(str(other)) and last == f"{one}: 5 blocks compared, 1 wrong"
    assert line.startswith(f"{one}: block 1: layer 1, token 0: digest 0x"), line
    told = json.loads(call("verify", "--json", one, tmp_path / "bare").stdout)
    assert told["digest"] == "kvbm-digest-1" and [file["path"] for file in told["files"]] == [str(one), str(tmp_path / "bare")]
    wrong, bare = told["files"]
    assert wrong.keys() == {"path", "error", "num_blocks", "compared", "wrong"} and bare.keys() == {"path", "error"}
    assert wrong["error"] is None and "no digests" in bare["error"] and (wrong["num_blocks"], wrong["compared"]) == (5, 5)
    (damage,) = wrong["wrong"]
    assert damage | {"stored": "", "found": ""} == {
        "block": 1, "what": "data", "layers": [1], "tokens": [0], "stored": "", "found": ""
    }  # fmt: skip
    assert damage["stored"] == ok("digest", other).split()[2] != damage["found"]
    assert call("verify", one, "--blocks", "0,2-4").exit_code == 0
    assert call("verify", one, "--blocks", "0-1").exit_code == 21
    assert call("verify", tmp_path / "bare").exit_code == kvbm.BindError.exit_code


def test_convert_verifies(tmp_path: Path) -> None:
    one, other = _two_files(tmp_path)
    _flip(one, "alloc_00000", 0)
    before = other.read_bytes()
    result = call("convert", one, other, "--to", "hnd", "--force")
    assert result.exit_code == kvbm.DigestError.exit_code and f"error: {one}: block 0: layer 0, token 0: digest" in result.stderr
    assert other.read_bytes() == before
    ok("convert", one, other, "--to", "hnd", "--force", "--blocks", "1-4")
    assert "4 blocks compared, all" in ok("verify", other)
    assert "verified" not in ok("convert", one, other, "--to", "hnd", "--force", "--no-verify")
    assert f"{other}: block 0: layer 0, token 0" in call("verify", other).stdout
    ok("convert", tmp_path / "bare", other, "--from", "nhd", "--to", "hnd", "--shape", SHAPE, "--force", "--no-verify")
    assert "no digests" in call("verify", other).stderr


@pytest.mark.parametrize("text", ["", "x", "1-", "3-1", "-1", "1,,2", "1;2", "9" * 5000, "1-99999999999", "²"])
def test_blocks_that_are_no_numbers(tmp_path: Path, text: str) -> None:
    one, _ = _two_files(tmp_path)
    result = call("verify", one, "--blocks", text)
    assert result.exit_code == 2 and "numbers of blocks such as 3,7-9" in result.stderr and len(result.stderr) < 1000


def test_blocks_that_there_are_not(tmp_path: Path) -> None:
    one, _ = _two_files(tmp_path)
    for text in ("5", "0-5", "0-4000000000"):
        result = call("verify", one, "--blocks", text)
        assert result.exit_code == kvbm.BindError.exit_code and str(one) in result.stderr, result.output
    assert call("verify", one, "--blocks", "1,0-2").exit_code == 2


@pytest.mark.gpu
def test_convert_on_a_gpu(tmp_path: Path) -> None:
    _source(tmp_path / "in.safetensors", "vllm/LBHNC", SHAPE, 70)
    args = ("--from", "vllm/LBHNC", "--to", "vllm/paged_attn_v0", "--shape", SHAPE, "--device", "cuda:0")
    ok("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *args)
    _check(tmp_path / "out.safetensors", "vllm/paged_attn_v0", SHAPE, 70)


def test_convert_on_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    args = ("--from", "nhd", "--to", "universal", "--shape", SHAPE, "--device", "cuda:99")
    result = call("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", *args)
    assert result.exit_code in (kvbm.CudaError.exit_code, kvbm.CudaUnavailableError.exit_code), result.output
    assert not (tmp_path / "out.safetensors").exists()


def test_numpy_dtype_agrees() -> None:
    from kvbm.memory import array_info

    for dtype in oracle.ITEMSIZE:
        assert array_info.numpy_dtype(dtype).itemsize == numpy_dtype(dtype).itemsize


def test_exactly_one_of_four_makes_a_new_file(tmp_path: Path) -> None:
    """Red: all four said that they had."""
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    code = (
        "import sys, time; from kvbm.cli.app import main\nfrom kvbm import store\nfrom kvbm.copy import transfer\n"
        "at = float(sys.argv.pop())\nwhile time.time() < at: time.sleep(0.001)\nmain()"
    )
    args = ["convert", "in.safetensors", "out.safetensors", "--from", "nhd", "--to", "universal", "--shape", SHAPE]
    command = [sys.executable, "-c", code, *args, str(time.time() + 2)]
    four = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(4)
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in four]
    assert sorted(process.returncode == 0 for process in four) == [False, False, False, True], said
    assert sum("already there" in each for each in said) == 3
    _check(tmp_path / "out.safetensors", "universal", SHAPE, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"in.safetensors", "out.safetensors"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    """Red: SIGTERM and SIGHUP left the hidden file, at full size."""
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    code = (
        "import time, kvbm.cli as cli\nfrom kvbm.store import blocks\n"
        "def move(*_, **__):\n    print('moving', flush=True)\n    time.sleep(60)\n"
        "blocks.convert_blocks = move\ncli.main()"
    )
    args = ["convert", "in.safetensors", "out.safetensors", "--from", "nhd", "--to", "universal", "--shape", SHAPE]
    with subprocess.Popen([sys.executable, "-c", code, *args], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"moving\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_convert_writes_files_only(tmp_path: Path) -> None:
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    args = ("--from", "nhd", "--to", "universal", "--shape", SHAPE, "--force")
    os.mkfifo(tmp_path / "fifo")
    for out in (tmp_path / "fifo", Path("/dev/null")):
        done = call("convert", tmp_path / "in.safetensors", out, *args)
        assert done.exit_code == 2 and "is no regular file: it is not replaced" in done.stderr
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode) and Path("/dev/null").is_char_device()
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store/out.safetensors")
    for _ in range(2):
        ok("convert", tmp_path / "in.safetensors", tmp_path / "link", *args)
        _check(tmp_path / "store" / "out.safetensors", "universal", SHAPE, 3)
    assert (tmp_path / "link").is_symlink()
    done = call("convert", tmp_path / "fifo", tmp_path / "out", *args)
    assert done.exit_code == kvbm.BindError.exit_code and "expected a regular file" in done.stderr
    ok("convert", tmp_path / "in.safetensors", tmp_path / ("n" * 255), *args)
    done = call("convert", tmp_path / "in.safetensors", tmp_path / ("n" * 256), *args)
    assert done.exit_code == 1 and f"{'n' * 256}: File name too long" in done.stderr


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"kvbm.layout": "nhd"}, "without a fingerprint"),
        ({"kvbm.layout": "MINE.yaml", "kvbm.fingerprint": "0"}, "'MINE.yaml' (?), which is not a shipped layout"),
        ({"kvbm.layout": "../layouts/nhd", "kvbm.fingerprint": "0"}, "which is not a shipped layout"),
        ({"kvbm.layout": "n" * 5000, "kvbm.fingerprint": "0"}, "which is not a shipped layout"),
        ({"kvbm.layout": "a\0b", "kvbm.fingerprint": "0"}, "which is not a shipped layout"),
        ({"kvbm.layout": "nhd", "kvbm.fingerprint": "0"}, "fingerprint 0)"),
    ],
)
def test_names_in_files_are_not_believed(tmp_path: Path, metadata: dict[str, str], said: str) -> None:
    """Red: a name in a file that ends in .yaml was opened, and one without a fingerprint was accepted."""
    mine = tmp_path / "mine.yaml"
    mine.write_text('order: "[b l o] t h d"\n', encoding="utf-8")
    metadata = {key: value.replace("MINE.yaml", str(mine)) for key, value in metadata.items()}
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3, metadata)
    args = ("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--to", "universal", "--shape", SHAPE)
    done = call(*args)
    assert done.exit_code == kvbm.BindError.exit_code and said.replace("MINE.yaml", str(mine)) in done.stderr, (
        done.output
    )
    if "kvbm.fingerprint" not in metadata:
        ok(*args, "--from", "nhd")


@pytest.mark.slow  # half a second
@pytest.mark.quick
def test_a_terminal_without_arrows(tmp_path: Path) -> None:
    """Red: OUT was written, and then a traceback was printed."""
    _source(tmp_path / "in.safetensors", "nhd", SHAPE, 3)
    args = ["convert", "in.safetensors", "out.safetensors", "--from", "nhd", "--to", "universal", "--shape", SHAPE]
    command = [sys.executable, "-m", "kvbm", *args]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0 and "(nhd) ? out.safetensors (universal): 3 blocks" in done.stdout, done.stderr


LONG = "9" * 5000


@pytest.mark.parametrize(
    "args",
    [
        ("show", "nhd", "--shape", f"llama-3.1-8b,nt={LONG}"),
        ("show", "nhd", "--shape", f"llama-3.1-8b/tp{LONG}"),
        ("show", "nhd", "--shape", "llama-3.1-8b,nt=" + "9" * 18),
        ("show", "nhd", "--shape", "llama-3.1-8b", "--num-blocks", LONG),
        ("show", "nhd", "--shape", "llama-3.1-8b", "--num-blocks", "9" * 400),
        ("show", "n" * 5000, "--shape", "llama-3.1-8b"),
        ("show", "nhd", "--shape", "n" * 5000),
        ("show", "a\0b", "--shape", "llama-3.1-8b"),
        ("show", "nhd", "--shape", "a\0b"),
        ("show", "a\0b.yaml", "--shape", "llama-3.1-8b"),
        ("plan", "nhd", "universal", "--shape", "llama-3.1-8b", "--num-blocks", LONG),
        ("layouts", "--aliases", "--shape", "llama-3.1-8b", "--num-blocks", LONG),
        ("convert", __file__, "out", "--to", "nhd", "--device", f"cuda:{LONG}"),
        ("convert", __file__, "out", "--to", "nhd", "--num-blocks", LONG),
        ("tune", "--device", LONG),
        ("smoke", "--gpu", LONG),
        ("smoke", "--iters", LONG),
        ("demo", "--device", f"cuda:{LONG}"),
        ("demo", "--seed", LONG),
    ],
    ids=lambda args: " ".join(args)[:40],
)
def test_numbers_and_names_that_are_far_too_long(args: tuple[str, ...]) -> None:
    done = call(*args)
    assert done.exit_code not in (0, 1) and isinstance(done.exception, SystemExit), done.exception
    assert "rror:" in done.stderr


def test_many_blocks_are_shown_at_once() -> None:
    """Red: it listed every allocation."""
    for name in ("nhd", "vllm/nvfp4", "record/nvfp4_tensors"):
        shape = GQA if "/" in name else SHAPE
        assert "100,000,000,000" in ok("show", name, "--shape", shape, "--num-blocks", "100000000000")


def test_one_element_an_allocation(tmp_path: Path) -> None:
    """Red: IndexError."""
    path = tmp_path / "all.yaml"
    path.write_text('order: "[b l o h t d]"\n', encoding="utf-8")
    assert "one element of 2 B" in ok("show", path, "--shape", SHAPE)


@pytest.mark.slow  # 0.6 s
def test_one_bad_file_does_not_end_a_check(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"order: \xff\n")
    os.mkfifo(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").mkdir()
    (tmp_path / "d.yaml").write_text("[" * 5000)
    (tmp_path / "e.yaml").write_text('order: "[b l o] t h d"\n')
    done = call("check", tmp_path)
    assert done.exit_code == kvbm.SpecError.exit_code
    assert done.stdout.startswith(f"ok  {tmp_path}/e.yaml") and done.stderr.count("error:") == 4, done.output
    for file, said in (("a", "expected UTF-8"), ("b", "expected a regular file"), ("d", "nested too deeply")):
        assert f"{tmp_path}/{file}.yaml: {said}" in done.stderr
    assert "expected a regular file" in call("show", tmp_path / "b.yaml", "--shape", SHAPE).stderr


# ---- planes --------------------------------------------------------------------------------------------------------

MLA, V4 = "nl=2,no=1,nh=1,nt=8,hd=576,dtype=bfloat16", "nl=2,no=1,nh=1,nt=64,hd=512,dtype=bfloat16"
GQA = "nl=2,no=2,nh=4,nt=128,hd=128,dtype=bfloat16"


@pytest.mark.slow  # 0.8 s
def test_planes_are_listed_and_shown() -> None:
    text = ok("layouts", "vllm/")
    assert "latent: t c float8_e4m3fn" in text and "rope: t r bfloat16 at 448 B" in text
    for name in kvbm.layouts():
        layout = kvbm.load(name)
        if layout.planes:
            shape = kvbm.layout.spec.example_shape(layout)
            text = ok("show", name, "--shape", shape)
            each = layout.resolve(kvbm.load_shape(shape), 1024)
            for plane, part in zip(layout.planes, each.parts, strict=True):
                assert f"plane {plane.name}" in text and part.shape.dtype in text and f"address of {plane.name}" in text
    text = ok("show", "vllm/fp8_ds_mla", "--shape", MLA)
    assert "10.25 KiB" in text and 2 * 8 * 656 == 10.25 * 1024, "a block is what its planes hold"
    assert "address of rope = table[l] + id*5248 + t*656 + r*2 + 528" in text
    assert "t0 latent" in text and "0           512        528       656" in text


def test_gaps_of_a_page_are_shown() -> None:
    text = ok("show", "vllm/deepseek_v4", "--shape", V4)
    assert "64 B of padding" in text and "128 B between" in text and "0.2 % of the pool is padding" in text


@pytest.mark.slow
def test_planes_are_checked(tmp_path: Path) -> None:
    path = matrix.LAYOUTS / "vllm"
    text = ok("check", path / "fp8_ds_mla.yaml", path / "deepseek_v4.yaml", path / "nvfp4.yaml")
    assert text.count("ok ") == 3 and "not at deepseek-v3, " in text, "latents of 576 are not those of 512"
    text = ok("check", matrix.LAYOUTS / "swizzle" / "128x4.yaml")
    assert "one-to-one at nl=1,no=1,nh=1,nt=256,hd=16,dtype=float8_e4m3fn, which is no shipped" in text
    assert ok("check", matrix.LAYOUTS).count("ok ") == len(kvbm.layouts())
    copy = tmp_path / "mine.yaml"
    copy.write_text((path / "dsa_indexer.yaml").read_text("utf-8").replace("{order: t, dt", "{order: t,  dt"), "utf-8")
    assert "means the same as the shipped layout 'vllm/dsa_indexer'" in ok("check", copy)
    text = ok("check", path / "dsa_indexer.yaml", "--ambiguous")
    (line,) = [line for line in text.splitlines() if "record/dsa_indexer_tokens" in line]
    assert "same arrays as" in line and "deepseek-v3.2-indexer" in line and "name the layout explicitly" in line
    copy.write_text('order: "[l] b <x y>"\nplanes: {x: {order: t d}, y: {order: t, offset: 8}}\n', "utf-8")
    result = call("check", copy)
    assert (
        result.exit_code == kvbm.LayoutError.exit_code and "planes 'x'" in result.output and "overlap" in result.output
    )
    copy.write_text('order: "[l] b <x y>"\nplanes: {x: {order: t d}, y: {order: t, dtype: float7}}\n', "utf-8")
    assert call("check", copy).exit_code == kvbm.SpecError.exit_code


def test_aliases_of_planes(tmp_path: Path) -> None:
    text = (matrix.LAYOUTS / "vllm" / "nvfp4.yaml").read_text("utf-8")
    (tmp_path / "mine.yaml").write_text("\n".join(line for line in text.splitlines() if "title" not in line), "utf-8")
    text = ok("layouts", "--aliases", "--layouts", tmp_path)
    (line,) = [line for line in text.splitlines() if "mine" in line]
    assert line.replace(",", "").split() == ["vllm/nvfp4", "mine"]


def test_plan_of_planes() -> None:
    text = ok("plan", "vllm/nvfp4", "record/nvfp4_universal", "--shape", GQA)
    made = kvbm.plan(kvbm.load("vllm/nvfp4"), kvbm.load("record/nvfp4_universal"), kvbm.load_shape(GQA))
    assert str(made) in text and "In scale V" in text and made.nbytes == made.src.block_bytes
    result = call("plan", "vllm/nvfp4", "vllm/mla", "--shape", GQA)
    assert result.exit_code in (kvbm.PlanError.exit_code, kvbm.LayoutError.exit_code)


def _filled(path: Path, name: str, text: str, blocks: int) -> kvbm.Pool:
    """A file of blocks with noise in every byte, including padding, and the pool through which it was written."""
    from kvbm import store

    shape = kvbm.load_shape(text)
    near = kvbm.Pool.allocate(kvbm.load(name), shape, blocks)
    rng = np.random.default_rng(7)
    with store.create(path, near.layout, shape, blocks) as pool:
        for array, into in zip(near.arrays, pool.arrays, strict=True):
            array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
            into[...] = array
    return near


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("vllm/fp8_ds_mla", "record/mla_fp8_tensors", MLA),
        ("record/mla_fp8_tensors", "record/mla_fp8_planes", MLA),
        ("vllm/nvfp4", "record/nvfp4_tensors", GQA),
        ("sglang/mxfp8", "record/mxfp8_universal", GQA),
        ("record/mxfp8_universal", "sglang/mxfp8", GQA),
        ("vllm/deepseek_v4", "record/deepseek_v4_tokens", V4),
        ("vllm/dsa_indexer_mxfp4", "record/dsa_indexer_mxfp4_tokens", V4.replace("512", "128")),
        ("vllm/per_token_head_int8", "record/per_token_head_int8_planes", GQA),
        ("flashinfer/mla_split", "record/mla_joined", MLA),
    ],
)
def test_convert_planes(tmp_path: Path, torch: Any, src: str, dst: str, shape: str) -> None:
    """From file to file and back; the library reads both, and every tensor is as its metadata describe."""
    safetensors = pytest.importorskip("safetensors")
    paths = [tmp_path / f"{name}.safetensors" for name in ("in", "out", "back")]
    near = _filled(paths[0], src, shape, 5)
    said = ok("convert", paths[0], paths[1], "--to", dst)
    assert f"5 blocks, {5 * near.resolved.block_bytes / 2**20:,.1f} MiB" in said
    ok("convert", paths[1], paths[2], "--to", src)
    want = kvbm.Pool.allocate(kvbm.load(dst), near.shape, 5)
    kvbm.convert(near, want)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8, "int8": torch.int8}
    dtypes |= {name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e8m0fnu")}
    dtypes["float4_e2m1fn"] = torch.float4_e2m1fn_x2
    for path, pool in ((paths[1], want), (paths[2], near)):
        layout, each = pool.layout, pool.resolved
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            assert metadata["kvbm.layout"] == layout.name and metadata["kvbm.fingerprint"] == layout.fingerprint
            planes = json.loads(metadata["kvbm.planes"])
            assert {name: plane["dtype"] for name, plane in planes.items()} == {
                p.plane: p.shape.dtype for p in each.parts
            }
            where = "table" if each.has_separate_planes else "byte"
            assert {name: plane[where] for name, plane in planes.items()} == {
                p.plane: p.bases[0][each.has_separate_planes] for p in each.parts
            }
            blocks = [name for name in file.keys() if not name.startswith("kvbm.digests")]  # noqa: SIM118
            assert len(blocks) == each.table_size and file.get_tensor("kvbm.digests").shape == (5,)
            for number, (allocation, array) in enumerate(zip(each.allocations, pool.arrays, strict=True)):
                tensor = file.get_tensor(f"alloc_{number:05d}")
                assert tensor.dtype == dtypes[allocation.dtype], allocation
                got = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
                if got.size != array.view(np.uint8).size:  # with padding, of which only what holds elements is compared
                    assert got.size == allocation.nbytes
                    got = np.ndarray(array.shape, array.dtype, got, strides=array.strides).reshape(-1)
                assert np.array_equal(got, array.view(np.uint8).reshape(-1)), (path.name, allocation.label)


def test_convert_planes_without_a_code(tmp_path: Path) -> None:
    """Integers of four bits are bytes in a file, which its metadata say; wide planes are aligned even after narrow ones."""
    from kvbm import store

    safetensors = pytest.importorskip("safetensors")
    text = 'order: "[<x y> l] b"\nplanes: {x: {order: t d, dtype: int4}, y: {order: t, dtype: float64}}\n'
    mine = kvbm.layout.spec.parse(text, name="mine")
    shape = kvbm.load_shape("nl=1,no=1,nh=1,nt=3,hd=6")
    with store.create(tmp_path / "a.safetensors", mine, shape, 5) as pool:
        for number, array in enumerate(pool.arrays):
            array[...] = number + 1
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert json.loads(file.metadata()["kvbm.planes"])["x"] == {"dtype": "int4", "table": 0}
        x, y = (file.get_tensor(f"alloc_{number:05d}") for number in range(2))
        assert (x.shape, x.dtype.name, y.shape, y.dtype.name) == ((5, 3, 3), "uint8", (5, 3), "float64")
        assert (x == 1).all() and (y == 2).all()
    stored = store.read(tmp_path / "a.safetensors")
    assert stored.tensors["alloc_00001"].begin % 8 == 0 and stored.pool(mine).num_blocks == 5
    other = kvbm.layout.spec.parse(text.replace("int4", "uint4"), name="other")
    with pytest.raises(kvbm.BindError, match="the file is in layout 'mine'"):
        stored.pool(other)


def test_convert_planes_refuses(tmp_path: Path) -> None:
    from kvbm import store

    path = tmp_path / "in.safetensors"
    _filled(path, "vllm/fp8_ds_mla", MLA, 3)
    text = _fails(tmp_path, kvbm.PlanError, "--to", "vllm/mla")
    assert "plane" in text
    _fails(tmp_path, kvbm.PlanError, "--to", "record/mla_v41_tokens")
    assert "not in 'record/mla_fp8_pages'" in _fails(
        tmp_path, kvbm.BindError, "--from", "record/mla_fp8_pages", "--to", "vllm/fp8_ds_mla"
    )
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header["alloc_00001"]["dtype"], header["__metadata__"] = "I8", {}
    bare = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(bare)) + bare + raw[8 + length :])
    said = _fails(
        tmp_path, kvbm.BindError, "--from", "vllm/fp8_ds_mla", "--shape", MLA, "--to", "record/mla_fp8_planes"
    )
    assert "expected U8 [3, 8, 656] (axes b t bytes), got I8 [3, 8, 656]" in said
    header["alloc_00001"]["dtype"] = "U8"
    bare = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(bare)) + bare + raw[8 + length :])
    assert store.read(path).pool(kvbm.load("vllm/fp8_ds_mla"), kvbm.load_shape(MLA)).num_blocks == 3, "by its size"
    said = _fails(
        tmp_path,
        kvbm.BindError,
        "--from",
        "vllm/fp8_ds_mla",
        "--shape",
        MLA.replace("nl=2", "nl=5"),
        "--to",
        "record/mla_fp8_planes",
    )
    assert "not a multiple of the 26,240 bytes of a block" in said


def test_ctrl_c_ends_every_command_with_130() -> None:
    import click

    from kvbm.cli.click_classes import Group

    for group in (Group("kvbm"), Group("outer")):
        @group.command("stopped")
        def stopped() -> None:
            raise KeyboardInterrupt

        @group.command("refused")
        def refused() -> None:
            raise click.Abort

        for name, code in (("stopped", 130), ("refused", 1)):
            with pytest.raises(SystemExit) as ended:
                group.main([name])
            assert ended.value.code == code, name


def test_no_frame_is_as_wide_as_a_pipe() -> None:
    """In a pipe the console has 10,000 columns: whatever expands to its width, such as a panel, must not."""
    for source in Path(kvbm.__file__).parent.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        for word in ("Panel(", "Columns(", "Rule(", ".rule(", "expand=True"):
            assert word not in text or (word == "Panel(" and "expand=False" in text), (source.name, word)
