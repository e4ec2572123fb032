"""kvbm smoke on this machine, and on another one, which is a real SSH server on the loopback address."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import sshd
from few import in_full
from kvbm import errors
from kvbm.cli.app import main
from kvbm.testing import remote, smoke
from ports import free_ports

pytestmark = pytest.mark.usefixtures("torch", "small_caches")

#: In the process of a kernel: see `small_caches`.
SMALL = "from kvbm.system import machine; machine.cache_bytes = lambda place: 64 << 10\n"
RIGHT = "from kvbm.testing.nvfp4 import ref_kernel as mine\n"
WRONG = "def mine(data):\n    c = data[-1]\n    c.zero_()\n    return c\n"
NAMES = ["tiny_single", "small_batch", *(f"{src} → {dst}" for src, dst in smoke.PAIRS)]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["smoke", *map(str, arguments)])


# ---- here ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # every suite
def test_smoke() -> None:
    done = call("--cpu", "--iters", 2)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line[7:39].strip() for line in lines[:-1]] == NAMES
    assert all(line.startswith("ok ") and " ms  " in line for line in lines[:-1])
    assert "128×256×1" in lines[0] and "256×512×2" in lines[1] and "64 blocks of nl=3" in lines[2]
    assert lines[-1].startswith(f"{len(NAMES)} of {len(NAMES)} correct in ") and "(cpu), kvbm 0" in lines[-1]


@pytest.mark.slow
def test_python_m_and_json() -> None:
    code = f"{SMALL}import runpy; runpy.run_module('kvbm.testing.smoke', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-W", "error", "-c", code, "--cpu", "--iters", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    said = json.loads(done.stdout)
    assert (said["correct"], said["total"], said["device"]) == (len(NAMES), len(NAMES), "cpu")
    assert [test["name"] for test in said["tests"]] == NAMES
    assert all(test["correct"] and test["avg_time_ms"] > 0 and test["error"] is None for test in said["tests"])
    assert said["tests"][0]["dimensions"] == "128×256×1" and said["tests"][0]["timing"] == "clock"


@pytest.mark.slow  # a whole suite
def test_a_kernel_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG, encoding="utf-8")
    report = tmp_path / "report.json"
    done = call("--cpu", "--iters", 2, "--kernel", f"{tmp_path / 'mine.py'}:mine", "--report", report)
    assert done.exit_code == 1 and json.loads(report.read_text("utf-8"))["correct"] == len(NAMES) - 2
    lines = done.stdout.splitlines()
    assert lines[0].startswith("WRONG  tiny_single") and "wrong at (" in lines[1] and "got 0.0" in lines[1]
    assert lines[-1].startswith(f"{len(NAMES) - 2} of {len(NAMES)} correct")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('no luck')", "the kernel raised RuntimeError: no luck (line 2 of mine.py)"),
        ("import time; time.sleep(1)", "the kernel hangs: it did not return within its limit of 0.1 s"),
        ("return data[-1].fill_(float('nan'))", "NaN at (0, 0, 0), where "),
    ],
)
def test_a_kernel_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    """The run continues with the next test."""
    monkeypatch.setattr("kvbm.testing.limits.GRACE", 0.01)
    monkeypatch.setattr(smoke, "PAIRS", ())
    (tmp_path / "mine.py").write_text(f"def mine(data):\n    {body}\n", encoding="utf-8")
    arguments = ("--kernel", f"{tmp_path / 'mine.py'}:mine", "--report", tmp_path / "report.json")
    done = call("--cpu", "--limit", 0.1, *arguments, "--json")
    tests = json.loads(done.stdout)["tests"]
    assert done.exit_code == 1 and [test["name"] for test in tests] == NAMES[:2]
    assert all(said in test["error"] and test["avg_time_ms"] is None and not test["correct"] for test in tests)


@pytest.mark.slow  # a process each
@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (f"{SMALL}from kvbm.testing.nvfp4 import ref_kernel as mine", 0, ""),
        ("def mine(data):\n    import os; os._exit(0)", 1, "the process ended with exit code 0 before the last test"),
        (
            "def mine(data):\n    import os; os.kill(os.getpid(), 9)",
            1,
            "the process ended by SIGKILL before the last test",
        ),
        in_full(("def mine(data):\n    import os; os._exit(11)", 1, "the process ended with exit code 11 before the last test")),
        in_full(("import os; os._exit(1)", 1, "the process ended with exit code 1 before the last test")),
        ("import sys; sys.exit(0)", 11, "it cannot be loaded: SystemExit: 0 (line 1 of mine.py)"),
        in_full(("def mine(:", 11, "it cannot be loaded: SyntaxError")),
    ],
)
def test_a_kernel_that_ends_the_process(tmp_path: Path, capfd: Any, body: str, code: int, said: str) -> None:
    """Red: exit code 0, and no output."""
    (tmp_path / "mine.py").write_text(body, encoding="utf-8")
    done = call("--cpu", "--iters", 1, "--kernel", f"{tmp_path / 'mine.py'}:mine")
    seen = capfd.readouterr()
    assert done.exit_code == code and said in done.stderr + seen.err, (done.output, seen)
    assert code or seen.out.splitlines()[-1].startswith(f"{len(NAMES)} of {len(NAMES)} correct")


@pytest.mark.slow  # 0.5 s
def test_a_wrong_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies by kvbm are also checked."""
    from kvbm.copy import transfer
    from kvbm.testing import nvfp4

    assert nvfp4.convert is transfer.convert  # bound before it is replaced: the example stays right
    copy = transfer.convert

    def shifted(src: Any, dst: Any, src_ids: Any, dst_ids: Any) -> None:
        copy(src, dst, src_ids[::-1], dst_ids)

    monkeypatch.setattr(transfer, "convert", shifted)
    report = smoke.run(num_runs=1)
    assert [test.correct for test in report.tests] == [True, True, False, False, False, False]
    assert "wrong at l=0 o=0 h=0 t=0 d=0 of block" in str(report.tests[2].error)


@pytest.mark.slow  # 2 s
def test_suites_have_their_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "PAIRS", ())
    monkeypatch.setattr("kvbm.testing.cases.TestCase.data", lambda case, **_: case)
    monkeypatch.setattr("kvbm.testing.nvfp4.ref_kernel", lambda case: case.m)
    names = {
        suite: [test.name for test in smoke.run(suite, kernel=lambda case: case.m, num_runs=1).tests]
        for suite in ("smoke", "correctness", "performance", "all")
    }
    assert names["correctness"] == ["min_size", "medium", "large", "xlarge"]
    assert names["performance"] == ["perf_medium", "perf_large"]
    assert names["all"] == names["smoke"] + names["correctness"] + names["performance"]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm import _core

    done = call("--gpu", 99)
    assert done.exit_code == 34
    assert done.stderr.startswith("error: --gpu 99: no such GPU: this machine has ")
    monkeypatch.setattr(_core, "device_count", lambda: 2)
    assert call("--gpu", 2).stderr == "error: --gpu 2: no such GPU: this machine has 2 of them, from 0 on\n"


def test_a_torch_that_cannot_use_the_gpu(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.CudaUnavailableError, match="cannot use cuda:0: expected a torch built for CUDA"):
        smoke.run(device="cuda:0")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--cpu", "--gpu", "0"], 2, "expected one of them"),
        (["--keep", "--python", "x"], 2, "--python, --keep: expected together with --ssh"),
        (["--limit", "0"], 2, "expected a number above 0, got '0'"),
        (["--kernel", "mine"], 11, "--kernel mine: expected MODULE:FUNCTION or FILE.py:FUNCTION"),
        (["--kernel", "nowhere:f"], 11, "--kernel nowhere:f: No module named 'nowhere'"),
        (["--kernel", "/nowhere/x.py:f"], 11, "No such file or directory"),
        (["--kernel", "math:nothing"], 11, "has no attribute 'nothing'"),
        (["--kernel", "math:pi"], 11, "expected a function, got a float"),
    ],
)
def test_refused(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    done = call(*arguments, *(["--cpu", "--report", tmp_path / "report"] if "--kernel" in arguments else []))
    assert done.exit_code == code and said in done.stderr


def test_help_needs_neither_numpy_nor_torch() -> None:
    code = (
        "import sys\nfrom kvbm.cli import main\n"
        "try: main(['smoke', '--help'])\nexcept SystemExit: print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert "--ssh-key FILE" in done.stdout
    for name in ("numpy", "torch", "fabric", "kvbm.testing.cases"):
        assert f"'{name}'" not in done.stdout, name


# ---- the wheel -----------------------------------------------------------------------------------------------------


def test_the_installed_kvbm_is_packed_again(tmp_path: Path) -> None:
    """The same files to the byte, in pip's format, without files of the installer."""
    import csv
    import io

    import kvbm

    if not list(Path(kvbm.__file__).parents[1].glob("kvbm_layouts-*.dist-info")):
        pytest.skip("an editable installation is built anew")
    lines: list[str] = []
    wheel = remote.installed_wheel(tmp_path, lines.append)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        rows = {row[0]: row for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert set(rows) == set(names) and rows[record][1:] == ["", ""]
        root = Path(kvbm.__file__).parents[1]
        assert all(archive.read(name) == (root / name).read_bytes() for name in names if name != record)
        assert b"kvbm = kvbm.__main__:main" in archive.read(record.replace("RECORD", "entry_points.txt"))
    assert {"kvbm/__init__.py", "kvbm/_core.abi3.so", "kvbm/layouts/nhd.yaml"} <= set(names)
    assert not [name for name in names if name.startswith(("bin", "..")) or "INSTALLER" in name or "pycache" in name]
    assert wheel.name.startswith("kvbm_layouts-0.1.0-cp311-abi3-linux_")
    assert all("edited since" in line for line in lines)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small distribution of that name, in a separate folder."""
    info = tmp_path / "site" / "kvbm_layouts-9.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "a.py").write_text("a = 1\n", encoding="ascii")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvbm-layouts\nVersion: 9\n", encoding="ascii")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py2-none-any\nTag: py3-none-any\n", encoding="ascii")
    rows = ["a.py,sha256=xDe0jGvZ04iSoHYfLG5vCYkMgPyMjBvAO8qBB2CQHmk,6", "../../bin/kvbm,,", "__pycache__/a.pyc,,"]
    rows += [f"{info.name}/{name},," for name in ("METADATA", "WHEEL", "RECORD", "INSTALLER")]
    (info / "RECORD").write_text("\n".join(rows) + "\n", encoding="ascii")
    import importlib.metadata

    found = importlib.metadata.PathDistribution(info)
    monkeypatch.setattr(importlib.metadata, "distribution", {"kvbm-layouts": found}.__getitem__)
    return tmp_path / "site"


def test_edited_files_are_named(installed: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    wheel = remote.installed_wheel(tmp_path, lines.append)
    assert wheel.name == "kvbm_layouts-9-py2.py3-none-any.whl"
    assert sorted(zipfile.ZipFile(wheel).namelist()) == [
        "a.py", *(f"kvbm_layouts-9.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL")),
    ]  # fmt: skip
    assert lines == ["edited since it was installed, and carried as it is now: a.py"]


def test_nothing_to_pack(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (installed / "a.py").unlink()
    with pytest.raises(
        errors.RemoteError, match=r"a\.py of kvbm-layouts cannot be read .*: reinstall it, or give --wheel"
    ):
        remote.installed_wheel(tmp_path)
    (installed / "kvbm_layouts-9.dist-info" / "WHEEL").unlink()
    with pytest.raises(errors.RemoteError, match="no RECORD or no WHEEL"):
        remote.installed_wheel(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(remote, "DISTRIBUTION", "kvbm-nowhere")
    with pytest.raises(errors.RemoteError, match="is not installed, so there is nothing to pack"):
        remote.installed_wheel(tmp_path)


def test_an_editable_installation_is_built(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = {"url": "file:///some/tree", "dir_info": {"editable": True}}
    (installed / "kvbm_layouts-9.dist-info" / "direct_url.json").write_text(json.dumps(origin), encoding="ascii")
    asked: list[list[str]] = []

    def fake(command: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        (tmp_path / "out" / "kvbm_layouts-9-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, len(asked) - 1, "", "no compiler\n")

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(remote.subprocess, "run", fake)
    assert remote.installed_wheel(tmp_path / "out").name == "kvbm_layouts-9-py3-none-any.whl"
    assert asked[0][1:4] == ["-m", "pip", "wheel"] and asked[0][-1] == "/some/tree"
    with pytest.raises(errors.RemoteError, match="no wheel of /some/tree could be built: no compiler"):
        remote.installed_wheel(tmp_path / "out")


# ---- the other machine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Server]:
    pytest.importorskip("fabric")
    with sshd.serve(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def over(server: sshd.Server, *arguments: object, key: Path | None = None, hosts: Path | None = None) -> Result:
    known = ("--known-hosts", hosts or server.known_hosts)
    return call("--ssh", server.target, "--ssh-key", key or server.user_key, *known, *arguments)


@pytest.fixture
def machine(server: sshd.Server) -> Iterator[Any]:
    options = remote.Options(server.target, key=server.user_key, known_hosts=server.known_hosts, python=sys.executable)
    with remote._Machine.connect(remote.Target.parse(server.target), options) as connected:
        yield connected


def made(done: Result) -> Path:
    """The folder that was created on the other machine."""
    (home,) = re.findall(r"making an environment in (/\S*kvbm-smoke\.\w+)$", done.stderr, re.MULTILINE)
    return Path(home)


@pytest.mark.timeout(300)
def test_all_the_way(server: sshd.Server, tmp_path: Path) -> None:
    """The installed kvbm, in a new environment on the other machine, with a kernel of this one; nothing is left there."""
    (tmp_path / "mine.py").write_text(RIGHT, encoding="utf-8")
    kernel = f"{tmp_path / 'mine.py'}:mine"
    done = over(server, "--cpu", "--iters", 2, "--python", sys.executable, "--kernel", kernel)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line[7:39].strip() for line in lines[:-1]] == NAMES
    assert f"(cpu of {server.target})" in lines[-1] and lines[-1].startswith("6 of 6 correct")
    for said in ("carrying kvbm_layouts-0.1.0-", "making an environment in /", "running"):
        assert f"{server.target}: {said}" in done.stderr
    assert not made(done).exists()


def test_an_unreachable_host(server: sshd.Server) -> None:
    target = f"me@127.0.0.1:{free_ports()}"
    done = call("--ssh", target, "--known-hosts", server.known_hosts)
    assert done.exit_code == 31
    assert done.stderr.startswith(f"error: ssh {target}: the machine cannot be reached (")
    assert "check name, port and network" in done.stderr


def test_a_name_that_nobody_has(server: sshd.Server) -> None:
    done = call("--ssh", "me@nowhere.invalid", "--known-hosts", server.known_hosts)
    assert done.exit_code == 31 and "ssh me@nowhere.invalid:22: the machine cannot be reached (" in done.stderr


def test_something_else_answers(server: sshd.Server) -> None:
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"220 mail\r\n" * 200)

        thread = threading.Thread(target=answer)
        thread.start()
        done = call("--ssh", f"me@127.0.0.1:{listener.getsockname()[1]}", "--known-hosts", server.known_hosts)
        thread.join()
    assert done.exit_code == 31, done.output


def test_a_wrong_key(server: sshd.Server) -> None:
    done = over(server, key=server.other_key)
    assert done.exit_code == 33
    assert f"error: ssh {server.target}: the machine does not let " in done.stderr
    assert f"with the key {server.other_key}" in done.stderr and "name it with --ssh-key" in done.stderr


def test_a_key_that_is_none(server: sshd.Server, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("not a key\n", encoding="ascii")
    done = over(server, key=tmp_path / "key")
    assert done.exit_code == 33 and "name it with --ssh-key" in done.stderr


def test_an_unknown_host_key(server: sshd.Server) -> None:
    done = over(server, hosts=server.empty_hosts)
    assert done.exit_code == 32
    assert f"the key of [127.0.0.1]:{server.port} is not in {server.empty_hosts}" in done.stderr
    assert "got ssh-ed25519 SHA256:" in done.stderr
    assert server.empty_hosts.read_text() == "", "it is not added"


def test_another_host_key_than_the_known_one(server: sshd.Server) -> None:
    done = over(server, hosts=server.wrong_hosts)
    assert done.exit_code == 32 and "the machine's key is not the one that is known: expected SHA256:" in done.stderr


def test_a_gpu_that_is_not_there_over_there(server: sshd.Server) -> None:
    done = over(server, "--gpu", 99, "--python", sys.executable)
    assert done.exit_code == 34 and f"error: --gpu 99: {server.target} has no such GPU: " in done.stderr
    assert "carrying" not in done.stderr, "nothing was carried there"


def test_gpus_are_named(server: sshd.Server, tmp_path: Path) -> None:
    """The machine's driver is asked; here it is a fake one with two GPUs."""
    import shutil

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a driver to ask")
    source = Path(__file__).parents[1] / "programs" / "two_gpus.c"
    subprocess.run([compiler, "-shared", "-o", tmp_path / "libcuda.so.1", source], check=True)
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH={tmp_path} exec {sys.executable} "$@"\n', encoding="ascii"
    )
    (tmp_path / "python").chmod(0o755)
    done = over(server, "--gpu", 2, "--python", tmp_path / "python")
    assert done.exit_code == 34
    assert done.stderr.endswith("has no such GPU: it has 0: First GPU, 1: Second GPU\n")


@pytest.mark.parametrize(
    ("name", "built", "said"),
    [
        (
            "py3-none-any",
            {"nvcc": "", "why_not": "built with KVBM_CUDA=0"},
            r"has no CUDA kernels \(built with KVBM_CUDA=0\)",
        ),
        (
            "cp311-abi3-linux_aarch64",
            {"nvcc": "13.0"},
            "me@there is a linux-x86_64: expected a wheel for it, got kvbm_layouts",
        ),
        ("cp311-abi3-linux_x86_64", {"nvcc": "13.0"}, None),
        ("cp311-abi3-manylinux_2_28_x86_64", None, None),
    ],
)
def test_a_wheel_that_would_be_carried_in_vain(tmp_path: Path, name: str, built: Any, said: str | None) -> None:
    wheel = tmp_path / f"kvbm_layouts-1-{name}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        if built is not None:
            archive.writestr("kvbm/_build.json", json.dumps(built))
    if said is None:
        remote._require_fit(wheel, "linux-x86_64", True, "me@there")
        return
    with pytest.raises(errors.RemoteError, match=said):
        remote._require_fit(wheel, "linux-x86_64", True, "me@there")
    if built["nvcc"] == "":
        remote._require_fit(wheel, "linux-x86_64", False, "me@there")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "does not run ("),
        ("echo what >&2; exit 3", "does not run (what); expected Python 3.11 or newer: name one with --python"),
        (
            """echo 'kvbm:{"version": [3, 9], "platform": "x", "gpus": [], "why": ""}'""",
            "is Python 3.9; expected 3.11 or newer",
        ),
    ],
)
def test_a_python_that_will_not_do(server: sshd.Server, tmp_path: Path, script: str | None, said: str) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        python.chmod(0o755)
    done = over(server, "--python", python)
    assert done.exit_code == 30 and f"{server.target}: {python} {said}" in done.stderr


def test_an_environment_that_cannot_be_made(server: sshd.Server, tmp_path: Path) -> None:
    (tmp_path / "kvbm_layouts-0.1.0-py3-none-any.whl").write_bytes(b"no zip")
    done = over(server, "--python", sys.executable, "--wheel", tmp_path / "kvbm_layouts-0.1.0-py3-none-any.whl")
    assert done.exit_code == 30 and f"error: {server.target}: no environment could be made: " in done.stderr
    assert "name another interpreter with --python" in done.stderr and not made(done).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--wheel", "/nowhere.whl"], "--wheel /nowhere.whl: expected a file named kvbm_layouts-….whl"),
        (["--kernel", "math:sqrt"], "expected FILE.py:FUNCTION with --ssh"),
        (["--known-hosts", "/nowhere"], "--known-hosts /nowhere: no such file"),
        (["--ssh-key", "/nowhere"], "--ssh-key /nowhere: no such file"),
        (["--ssh", "a b"], "--ssh 'a b': expected USER@HOST:PORT"),
        (["--ssh", "host:99999"], "expected USER@HOST:PORT"),
        (["--ssh", "-oProxyCommand=x"], "expected USER@HOST:PORT"),
    ],
)
def test_refused_before_anything_is_asked(arguments: list[str], said: str) -> None:
    pytest.importorskip("fabric")
    done = call(*([] if "--ssh" in arguments else ["--ssh", "me@127.0.0.1:9"]), *arguments)
    assert done.exit_code == 11 and said in done.stderr


def test_without_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fabric", None)
    done = call("--ssh", "me@127.0.0.1:9")
    assert done.exit_code == 26 and "pip install 'kvbm-layouts[remote]'" in done.stderr


REPORT = (
    '{"kvbm": "1", "device": "cuda:0", "machine": "$CUDA_VISIBLE_DEVICES", "driver": "", "seconds": 1, "tests": []}'
)


def pretend(home: str, script: str) -> None:
    """An environment whose interpreter is a shell script."""
    (Path(home) / "env" / "bin").mkdir(parents=True)
    python = Path(home) / "env" / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)


def test_the_gpu_is_chosen_by_its_number(machine: Any) -> None:
    options = remote.Options("x", gpu=3)
    with machine.home(False, print) as home:
        words = '\\"'.join(REPORT.split('"'))
        pretend(home, f'echo "$*" > said; echo "{words}"')
        report = machine.smoke(home, ["--iters", "2"], options)
        said = (Path(home) / "said").read_text()
    assert (report.machine, report.device, report.host) == ("3", "cuda:3", str(machine))
    assert said == "-m kvbm.testing.smoke --json --iters 2 --gpu 0\n"


def test_a_run_without_a_report(machine: Any) -> None:
    with machine.home(False, print) as home:
        pretend(home, "echo hello; echo error: no kernel image >&2; exit 18")
        with pytest.raises(errors.RemoteError, match="the run gave no report: error: no kernel image"):
            machine.smoke(home, [], remote.Options("x"))


@pytest.mark.parametrize("keep", [False, True])
def test_what_is_left_behind(machine: Any, keep: bool) -> None:
    """Nothing, also if the run is interrupted while a process of it still runs; unless it was requested."""
    lines: list[str] = []

    def interrupted() -> str:
        with machine.home(keep, lines.append) as home:
            machine.sh(f"cd {home} && (sh -c 'echo $$ > pid; exec sleep 100' > /dev/null 2>&1 &)")
            for _ in range(100):
                if (Path(home) / "pid").is_file() and (Path(home) / "pid").read_text().strip():
                    break
                time.sleep(0.02)
            found.append((home, int((Path(home) / "pid").read_text())))
            raise KeyboardInterrupt
        return home

    found: list[tuple[str, int]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    ((home, pid),) = found
    assert (Path(home).stat().st_mode & 0o077 == 0) if keep else not Path(home).exists()
    assert lines == ([f"{machine}: kept {home}"] if keep else [])
    if keep:
        os.kill(pid, 15)
        subprocess.run(["rm", "-rf", home], check=True)
    else:
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
                break
            time.sleep(0.02)
        else:
            pytest.fail("the process still runs")


def test_each_error_has_an_exit_code_of_its_own() -> None:
    known = [
        error for error in vars(errors).values() if isinstance(error, type) and issubclass(error, errors.KvbmError)
    ]
    assert len({error.exit_code for error in known}) == len(known)


def test_targets() -> None:
    parse = remote.Target.parse
    assert parse("host") == remote.Target("host") and parse("me@10.0.0.1:22") == remote.Target("10.0.0.1", "me", 22)
    assert parse("me@[fe80::1]:2222") == remote.Target("fe80::1", "me", 2222)


def test_probe_is_python_that_old_interpreters_read() -> None:
    """So that Python 3.8 prints the required version instead of a syntax error."""
    import ast

    ast.parse(textwrap.dedent(remote.PROBE), feature_version=(3, 6))
