"""What every command does: groups and examples in the help, completion, exit codes, widths, quiet, colours, pipes and signals."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result
from test_link_cli import Process

import kvbm
import kvbm.errors
from kvbm import store
from kvbm.cli.app import main
from kvbm.cli.click_classes import GLOBAL
from processes import cli

ROOT = Path(__file__).resolve().parents[2]
SMALL = "nl=2,no=2,nh=4,nt=16,hd=32,dtype=bfloat16"


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and group, with its words after `kvbm`."""

    def below(name: str, command: click.Command, above: click.Context | None) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        context = click.Context(command, parent=above, info_name=name or "kvbm")
        if isinstance(command, click.Group):
            for one in command.list_commands(context):
                found = command.get_command(context, one)
                assert found is not None
                yield from below(f"{name} {one}".strip(), found, context)

    return below("", main, None)


COMMANDS = dict(commands())


def call(*words: str | Path, **env: str) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], env={"COLUMNS": "80", **env})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv").mkdir()
    (tmp_path / "mine.yaml").write_text('title: mine\norder: "[b l o] t h d"\n', encoding="utf-8")
    (tmp_path / "config.json").write_bytes((ROOT / "tests/data/models/llama-3.1-8b.json").read_bytes())
    with store.create(tmp_path / "in.safetensors", kvbm.load("vllm/LBHNC"), kvbm.load_shape(SMALL), 4) as pool:
        for array in pool.arrays:
            array[...] = 1
    return tmp_path


# ---- the help ----------------------------------------------------------------------------------------------------------


def test_every_command_is_in_one_group_of_the_help() -> None:
    named = [name for names in main.sections.values() for name in names]
    assert sorted(named) == main.list_commands(click.Context(main))
    titles = re.findall(r"^([A-Z].*):$", call("--help").output, re.MULTILINE)
    assert titles == [*main.sections, "Options", "Global options", "Examples"]


#: Examples that need a GPU, another machine, or a minute: they are only parsed here.
PARSED = {
    "kvbm bench --direction d2d,h2d --pair vllm/LBHNC:universal --out gpu.csv": "a GPU",
    "kvbm demo --device cpu": "a minute",
    "kvbm gallery --out pictures": "a minute",
    "kvbm link send 127.0.0.1": "test_examples_of_link",
    "kvbm link send 127.0.0.1:29600 --bytes 1MiB,64MiB --json": "test_examples_of_link",
    "kvbm link serve": "test_examples_of_link",
    "kvbm link serve --listen 127.0.0.1:29600 --layout vllm/LBHNC --once": "test_examples_of_link",
    "kvbm smoke": "a minute",
    "kvbm smoke --ssh me@gpu-box": "another machine",
    "kvbm tune": "a GPU",
    "kvbm tune --show --json": "a GPU",
}


def _parse(command: click.Command, words: list[str], above: click.Context | None = None) -> None:
    """Parse a command line to its end, and run nothing."""
    context = command.make_context(words[0], words[1:], parent=above)
    if isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
        found = command.get_command(context, rest[0])
        assert found is not None, rest
        _parse(found, rest, context)


@pytest.mark.slow  # 8 s
@pytest.mark.usefixtures("small_caches")
def test_the_examples_of_the_help_run(folder: Path) -> None:
    """In one folder, in the order of the help: some use what others wrote."""
    seen = []
    for name, command in COMMANDS.items():
        examples = getattr(command, "examples", ())
        assert examples or name in ("link", "store"), f"{name}: no example"
        for line in examples:
            assert line in call(*name.split(), "--help").output, "whole, to be copied"
            assert line.startswith(f"kvbm {name}"), line
            words = shlex.split(line)
            if line in PARSED:
                seen.append(line)
                _parse(main, words)
                continue
            if name == "":
                (folder / "out.safetensors").unlink(missing_ok=True)
            done = call(*words[1:])
            assert done.exit_code == 0, (line, done.output)
            if "out.safetensors" in words and name == "":
                (folder / "out.safetensors").unlink()
    assert set(seen) == set(PARSED)


@pytest.mark.slow  # two processes with torch
def test_examples_of_link() -> None:
    """On another port than the printed ones, which may be in use here."""
    pytest.importorskip("torch")
    serve, send = (COMMANDS[f"link {name}"].examples[1] for name in ("serve", "send"))  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [shlex.split(line.replace("29600", port))[2:] for line in (serve, send)]
    server = Process(*words[0])
    server.wait_for(1, text="listening on 127.0.0.1")
    sent = Process(*words[1], "--iters", "2")
    assert (sent.end(), server.end()) == (0, 0), sent.said
    assert len(json.loads("\n".join(sent.lines["stdout"]))["rows"]) == 2


# ---- completion --------------------------------------------------------------------------------------------------------

#: What takes any text: nothing can be completed.
FREE = {
    "HOST:PORT", "HOST[:PORT]", "USER@HOST:PORT", "MODULE:FUNCTION", "SIZE", "TIME", "SIZE,…", "N,…", "N,N,…", "LIST", "ARRAY...",
    "AXES", "TEXT",
}  # fmt: skip


def test_every_option_that_takes_a_name_completes() -> None:
    """Numbers, files and choices are click's to complete; lists of block ids are free, lists of names are not."""
    for name, command in COMMANDS.items():
        for param in command.get_params(click.Context(command)):
            is_known = isinstance(param.type, click.Choice | click.Path | click.IntRange | click.FloatRange)
            is_flag = isinstance(param, click.Option) and (param.is_flag or param.count)
            if is_known or is_flag or param.type is click.INT or param._custom_shell_complete is not None:
                continue
            assert param.metavar in FREE and (param.metavar != "LIST" or param.opts == ["--blocks"]), (name, param.opts)


@pytest.mark.parametrize(
    ("words", "incomplete", "some"),
    [
        (("serve-check", "--layout"), "LB", ["LBHNC", "LBNHC"]),
        (("serve-check", "--host-values"), "", ["fp8", "mxfp8", "nvfp4"]),
        (("serve-check", "--host-layout"), "pa", ["pages"]),
        (("serve-check", "--kv-cache-dtype"), "fp8_", ["fp8_e4m3", "fp8_e5m2"]),
        (("serve-check", "--to"), "tp1,lay", ["tp1,layout="]),
        (("which", "--engine"), "vl", ["vllm"]),
        (("which", "--dtype"), "bf", ["bfloat16"]),
        (("bench", "--direction"), "d2d,h", ["d2d,h2d", "d2d,h2h"]),
        (("bench", "--pattern"), "fc_", ["fc_to_fc", "fc_to_lw"]),
        (("bench", "--backend"), "direct,st", ["direct,staged"]),
        (("bench", "--pair"), "nhd:univ", ["nhd:universal"]),
        (("bench", "plot", "--format"), "png,", ["png,svg"]),
        (("convert", "--to"), "univ", ["universal"]),
        (("convert", "--device"), "cu", ["cuda:0", "cuda:1"]),
        (("plan", "--cast"), "a", ["amax"]),
        (("check", "--shape"), "llama-3.1-8b/", ["llama-3.1-8b/tp2", "llama-3.1-8b/tp4", "llama-3.1-8b/tp8"]),
        (("show", "--shape"), "llama-3.1-8b,n", [f"llama-3.1-8b,{key}=" for key in ("nl", "no", "nh", "nt")]),
        (("show", "--shape"), "llama-3.1-8b,dtype=bf", ["llama-3.1-8b,dtype=bfloat16"]),
        (("link", "send", "--wire"), "", ["torch", "nixl"]),
        (("layouts", "--color"), "a", ["auto", "always"]),
        (("layouts",), "--col", ["--color"]),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else None,
)
def test_completion(words: tuple[str, ...], incomplete: str, some: list[str]) -> None:
    complete = ShellComplete(main, {}, "kvbm", "_KVBM_COMPLETE")
    assert [item.value for item in complete.get_completions(list(words), incomplete)] == some


# ---- exit codes --------------------------------------------------------------------------------------------------------

TABLE = {
    int(code): name
    for code, name in re.findall(
        r"^\| (\d+) \| .* \| (?:`(\w+)`)? ?\|$", (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}


def _raised(name: str) -> Callable[[Path, pytest.MonkeyPatch], int]:
    """What a command ends with if the library raises this: for errors that need another machine, or a fault."""

    def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
        def fail(*_: Any) -> Any:
            raise getattr(kvbm.errors, name)("said")

        monkeypatch.setattr("kvbm.layout.spec.load", fail)
        done = call("show", "nhd")
        assert "error: said" in done.stderr
        return done.exit_code

    return run


def _with(*words: str) -> Callable[[Path, pytest.MonkeyPatch], int]:
    return lambda *_: call(*words).exit_code


def _without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    return call("show", "nhd", "--svg", "x.svg").exit_code


def _broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("kvbm.cli.doctor.findings", lambda: [("broken", "extension", "it does not import")])
    return call("doctor").exit_code


def _damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    assert call("convert", "in.safetensors", "out.safetensors", "--to", "universal").exit_code == 0
    data = bytearray((folder / "out.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "out.safetensors").write_bytes(data)
    return call("verify", "out.safetensors").exit_code


@contextlib.contextmanager
def _listener(*, is_silent: bool) -> Iterator[str]:
    """The address of something that closes each connection at once, or that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if not is_silent:
                        held.pop().close()

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in held:
            one.close()


def _sent_to(is_silent: bool) -> Callable[[Path, pytest.MonkeyPatch], int]:
    def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
        with _listener(is_silent=is_silent) as address:
            return call("link", "send", address, "--timeout", "0.5").exit_code

    return run


def _signalled(number: signal.Signals) -> Callable[[Path, pytest.MonkeyPatch], int]:
    def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
        server = Process("serve", "--listen", "127.0.0.1:0")
        server.wait_for(1, text="listening")
        server.send(number)
        code = server.end()
        assert "Traceback" not in server.said
        return code

    return run


CODES: dict[int, Callable[[Path, pytest.MonkeyPatch], int]] = {
    0: _with("layouts"),
    1: _with("codegen", "--layouts", "mine.yaml", "--out", "nothing", "--check"),
    2: _with("layouts", "--no-such-option"),
    10: _raised("KvbmError"),
    11: _with("show", "no/such"),
    12: _with("show", "vllm/paged_attn_v0", "--shape", SMALL.replace("hd=32", "hd=5")),
    13: _with("plan", "operational", "universal", "--shape", SMALL),
    14: _with("which", "3x7"),
    15: _with("show", "nhd", "--shape", "llama-3.1-8b,dtype=float7"),
    16: _broken,
    17: _raised("MissingKernelError"),
    18: _raised("CudaError"),
    19: _raised("CudaUnavailableError"),
    20: _raised("CoverageError"),
    21: _damaged,
    22: _raised("TransferError"),
    23: _sent_to(is_silent=False),
    24: _sent_to(is_silent=True),
    25: _raised("NotEnoughMemoryError"),
    26: _without_matplotlib,
    30: _raised("RemoteError"),
    31: _with("link", "send", "127.0.0.1:1"),
    32: _raised("HostKeyError"),
    33: _raised("AuthenticationError"),
    34: _with("smoke", "--gpu", "9999"),
    129: _signalled(signal.SIGHUP),
    130: _signalled(signal.SIGINT),
    141: lambda *_: cli("into_a_closed_pipe", "layouts").returncode,
    143: _signalled(signal.SIGTERM),
}


def test_the_table_of_exit_codes_has_every_class() -> None:
    classes = {getattr(kvbm.errors, name).exit_code: name for name in kvbm.errors.__all__}
    assert {code: name for code, name in TABLE.items() if name} == classes
    assert set(TABLE) == set(CODES)
    listed = dict(re.findall(r"^\| `(\w+)`.*\| (\d+) \|$", (ROOT / "docs/reference/errors.md").read_text("utf-8"), re.MULTILINE))
    assert {int(code): name for name, code in listed.items()} | {10: "KvbmError"} == classes


@pytest.mark.slow  # 6 s
@pytest.mark.parametrize("code", CODES)
def test_exit_codes(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CODES[code](folder, monkeypatch) == code


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("matplotlib", ("plan", "nhd", "universal", "--svg", "x.svg")),
        ("matplotlib", ("gallery", "--out", "pictures")),
        ("torch", ("smoke", "--cpu", "--suite", "smoke")),
        ("torch", ("demo",)),
        ("transformers", ("demo",)),
        ("fabric", ("smoke", "--ssh", "me@127.0.0.1:1")),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_a_missing_package_has_one_code(
    package: str, words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red: 1, 10 or 11, by command."""
    monkeypatch.setitem(sys.modules, package, None)
    done = call(*words)
    assert done.exit_code == kvbm.errors.MissingPackageError.exit_code, done.output
    assert "pip install" in done.stderr and not list(folder.glob("x.svg"))


@pytest.mark.slow  # 1 s
@pytest.mark.usefixtures("small_caches")
def test_smoke_without_torch_tests_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red: README's `pip install .` brings no torch, and the first command to try ended with an error."""
    monkeypatch.setitem(sys.modules, "torch", None)
    done = call("smoke", "--cpu", "--iters", "1")
    assert done.exit_code == 0, done.output
    assert "4 of 4 correct" in done.stdout and "torch is not installed" in done.stderr and "kvbm-layouts[testing]" in done.stderr


# ---- pipes and signals -------------------------------------------------------------------------------------------------


@pytest.mark.slow  # 4 s
@pytest.mark.parametrize("words", ["--help", "--version", "show --help", "shapes", "show nhd", "doctor", "plan nhd hnd --json"])
def test_a_closed_pipe_ends_quietly(words: str) -> None:
    """Red: `show` ended with 1, by rich; others with 1, by click."""
    done = cli("into_a_closed_pipe", *words.split())
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_ctrl_c_while_the_command_is_imported() -> None:
    """Red: a traceback of an import.  The signal itself ends it; a shell says 130."""
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import runpy; sys.argv = ['kvbm', 'layouts']; runpy.run_module('kvbm', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


# ---- -q, -v and --color ------------------------------------------------------------------------------------------------


def test_every_command_has_the_global_options() -> None:
    for name, command in COMMANDS.items():
        assert set(GLOBAL) <= set(command.get_params(click.Context(command))), name
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    assert all(f"`{option}`" in page for one in GLOBAL for option in one.opts)


def test_quiet(folder: Path) -> None:
    """Before and after the name of a command."""
    words = ("convert", "in.safetensors", "out.safetensors", "--to", "universal", "--force")
    assert "4 blocks" in call(*words).stdout
    for quiet in (call("-q", *words), call(*words, "--quiet")):
        assert (quiet.exit_code, quiet.output) == (0, "")
    assert "note: " in call("show", "flashinfer/mla").stderr
    quiet = call("show", "flashinfer/mla", "-q")
    assert quiet.stderr == "" and quiet.stdout == call("show", "flashinfer/mla").stdout
    assert "error: " in call("show", "no/such", "-q").stderr


def test_color(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of click.echo, tables and drawings of rich."""
    for words in (("show", "no/such"), ("shapes", "tp8"), ("show", "nhd"), ("check", "nhd")):
        assert "\x1b[" not in call(*words).output
        for coloured in (call("--color", "always", *words), call(*words, "--color", "always")):
            assert "\x1b[" in coloured.output, words
        plain = re.sub(r"\x1b\[[0-9;]*m", "", call(*words, "--color", "always").output)
        assert [line.rstrip() for line in plain.splitlines()] == [line.rstrip() for line in call(*words).output.splitlines()]
        for env in ({}, {"FORCE_COLOR": "1"}):
            assert "\x1b[" not in call(*words, "--color", "never", **env).output, (words, env)
    assert call("show", "nhd", "--color", "sometimes").exit_code == 2


def test_verbose_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    # The traceback is printed to the stderr of the process.
    for words, is_shown in ((("-v",), False), (("-vv",), True)):
        done = cli("run", "show", "no/such", *words)
        assert ("Traceback" in done.stderr) is is_shown and done.returncode == kvbm.SpecError.exit_code


# ---- widths ------------------------------------------------------------------------------------------------------------

#: Commands with text of every kind: tables, drawings, notes, lists and prose.
SHOWN = (
    "--help", "bench --help", "link send --help", "layouts", "layouts nhd --aliases --shape llama-3.1-8b", "shapes", "show nhd",
    "show vllm/deepseek_v4",
    "check vllm/LBHNC --ambiguous --shape gemma-2-27b --shape gemma-3-27b --shape phi-3.5-mini/tp2", "which 32x2,1024,16,8,128",
    "plan nhd universal", "plan nhd record/per_token_head_fp8_planes --cast amax",
    "reshard vllm:tp8 trtllm:tp2,cp4,nt32 --shape llama-3.1-70b",
    "reshard vllm vllm:tp4 --shape llama-3.1-8b,nh=1 --gather", "serve-check --vllm config.json --tp 2 --to tp1,nt64", "doctor",
    "digest in.safetensors",
)  # fmt: skip

#: What may be wider: a command to copy, a path, a row of a table, and what has no blank.
WHOLE = re.compile(r"^VLLM_KV|^  kvbm |^error: |\S {2,}\S|^\S+$")


@pytest.mark.slow  # 8 s
@pytest.mark.parametrize("words", SHOWN)
def test_output_fits_80_columns(words: str, folder: Path) -> None:
    """In a terminal of 80 columns.  Red: `layouts` had 270 in a pipe, and lines of `serve-check` 351 in a terminal."""
    done = cli("in_a_terminal", str(folder), *words.split())
    assert done.returncode == 0, done
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip() for line in done.stdout.splitlines()]
    assert len(lines) > 3
    wide = [line for line in lines if len(line) > 80 and not WHOLE.search(line.replace(str(folder), ""))]
    assert not wide
    if words in ("layouts", "shapes", "show nhd"):
        assert max(map(len, lines)) <= 82, "their tables fit, too"


@pytest.mark.slow  # 8 s
@pytest.mark.parametrize("words", SHOWN)
def test_nothing_is_wrapped_or_padded_in_a_pipe(words: str, folder: Path) -> None:
    """Whatever the width of the terminal; and no line is long because another one is."""
    narrow, wide = (call(*words.split(), COLUMNS=columns) for columns in ("40", "200"))
    if "--help" not in words:
        assert narrow.output == wide.output
        assert all(line == line.rstrip() for line in narrow.stdout.splitlines())
    if words in ("layouts", "shapes"):
        for line in narrow.stdout.splitlines():
            cells = re.split(r" {2,}", line)
            assert len(line) <= sum(max(len(cell), 36) + 2 for cell in cells[:-1]) + len(cells[-1])
