"""``kvbm smoke --ssh``: copy a wheel to another machine, create an environment there, run, fetch the report, clean up.

It uses fabric (the extra ``remote``).  The machine's key must be in known_hosts: an unknown key is refused and never added.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

from ..errors import (
    AuthenticationError,
    DeviceNotFoundError,
    HostKeyError,
    KvbmError,
    MissingPackageError,
    RemoteError,
    SpecError,
    UnreachableError,
)
from .report import Report

DISTRIBUTION = "kvbm-layouts"

#: Timeouts in seconds for a connection and for a small command.
CONNECT_S, COMMAND_S = 10, 60

Note = Callable[[str], object]


def _say_nothing(line: str) -> None:
    """The default for `note`: ignore the line."""


@dataclass(frozen=True)
class Target:
    """``user@host:port``.  The defaults of user and port are ssh's settings.

    Examples
    --------
    >>> Target.parse("me@gpu7:2222")
    Target(host='gpu7', user='me', port=2222)
    >>> Target.parse("[::1]")
    Target(host='::1', user=None, port=None)
    """

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        match = re.fullmatch(
            r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:@\[\]\s-][^:@\[\]\s]*))(?::(?P<port>\d{1,5}))?",
            text,
        )
        if not match or not 0 < int(match["port"] or 22) < 65536:
            raise SpecError(f"--ssh {text!r}: expected USER@HOST:PORT, such as me@gpu7:2222 (user and port may be left out)")
        return cls(match["six"] or match["host"], match["user"], int(match["port"]) if match["port"] else None)


@dataclass(frozen=True)
class Options:
    """The options of ``kvbm smoke --ssh``.

    The `kernel` is ``FILE.py:FUNCTION``; the file is copied, too.  The `gpu` is numbered as nvidia-smi counts on the other
    machine, where `python` is the interpreter, and `arguments` are further ones for ``kvbm smoke`` there.
    """

    target: str
    key: Path | None = None
    known_hosts: Path | None = None
    wheel: Path | None = None
    python: str = "python3"
    gpu: int | None = None
    cpu: bool = False
    kernel: str | None = None
    keep: bool = False
    arguments: Sequence[str] = ()


def run(options: Options, note: Note = _say_nothing) -> Report:
    """Run ``kvbm smoke`` on another machine.  `note` is called with one line of text per step.

    Raises `UnreachableError`, `HostKeyError` or `AuthenticationError` if the machine does not answer, its key is unknown or
    wrong, or it refuses the login; `DeviceNotFoundError` if it does not have this GPU; `RemoteError` if it has no suitable
    Python, its environment cannot be created, or the run gave no report.
    """
    target = Target.parse(options.target)
    kernel_file, kernel = _kernel(options.kernel)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-wheel-")))
        if options.wheel is not None:
            wheel = _given(options.wheel)
        machine = stack.enter_context(_Machine.connect(target, options))
        platform = machine.require_python_and_gpu(options)
        if options.wheel is None:
            wheel = installed_wheel(folder, note)
        _require_fit(wheel, platform, options.gpu is not None, str(machine))
        home = stack.enter_context(machine.home(options.keep, note))
        note(f"{machine}: carrying {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
        for file in filter(None, (wheel, kernel_file)):
            machine.put(file, f"{home}/{file.name}")
        note(f"{machine}: making an environment in {home}")
        machine.make_environment(home, wheel.name)
        note(f"{machine}: running")
        return machine.smoke(home, [*options.arguments, *(["--kernel", kernel] if kernel else [])], options)


def _kernel(text: str | None) -> tuple[Path | None, str]:
    """The file to copy, and the value of ``--kernel`` on the other machine."""
    if text is None:
        return None, ""
    module, _, name = text.rpartition(":")
    path = Path(module)
    if not module.endswith(".py") or not path.is_file():
        raise SpecError(f"--kernel {text}: expected FILE.py:FUNCTION with --ssh, a file that can be carried there")
    return path, f"{path.name}:{name}"


# ---- the wheel -----------------------------------------------------------------------------------------------------


def _given(path: Path) -> Path:
    if not path.is_file() or not re.fullmatch(r"kvbm_layouts-[^-]+(-[^-]+){3,4}\.whl", path.name):
        raise SpecError(f"--wheel {path}: expected a file named kvbm_layouts-….whl; `pip wheel --no-deps .` makes one")
    return path


def installed_wheel(folder: Path, note: Note = _say_nothing) -> Path:
    """A wheel of the running kvbm in a folder, packed from the files that its installation has recorded.

    The files are packed in their current state.  `note` is called with the names of files that were edited since the
    installation.  For an editable installation, which has recorded no files, the source tree is built.

    Raises `RemoteError` if kvbm is not installed, its installation is incomplete, or its source tree cannot be built.
    """
    try:
        dist = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise RemoteError(f"{DISTRIBUTION} is not installed, so there is nothing to pack: give a wheel with --wheel") from None
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return _built(Path(origin["url"].removeprefix("file://")), folder, note)
    wheel = Parser().parsestr(dist.read_text("WHEEL") or "")
    tags = [tag.split("-") for tag in wheel.get_all("Tag", [])]
    if not tags or dist.files is None:
        raise RemoteError(f"the installation of {DISTRIBUTION} has no RECORD or no WHEEL file: give a wheel with --wheel")
    tag = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))
    path = folder / f"{DISTRIBUTION.replace('-', '_')}-{dist.version}-{tag}.whl"
    edited, rows = [], []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(dist.files, key=str):
            name = file.as_posix()
            if not _belongs(name):
                continue
            try:
                data = Path(str(file.locate())).read_bytes()
            except OSError as error:
                raise RemoteError(
                    f"{name} of {DISTRIBUTION} cannot be read ({error.strerror}): reinstall it, or give --wheel"
                ) from None
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if file.hash is not None and file.hash.mode == "sha256" and file.hash.value != digest:
                edited.append(name)
            rows.append((name, f"sha256={digest}", len(data)))
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
        record = next(file.as_posix() for file in dist.files if file.as_posix().endswith(".dist-info/RECORD"))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        archive.writestr(zipfile.ZipInfo(record, (1980, 1, 1, 0, 0, 0)), text.getvalue())
    if edited:
        some = ", ".join(edited[:3]) + (f" and {len(edited) - 3} more" if len(edited) > 3 else "")
        note(f"edited since it was installed, and carried as it is now: {some}")
    return path


def _require_fit(wheel: Path, platform: str, for_gpu: bool, machine: str) -> None:
    """Raise an error for a wheel that cannot work on the machine, before it is copied."""
    tag = wheel.stem.rpartition("-")[2]
    processor = platform.partition("-")[2].replace("-", "_")
    if tag != "any" and not tag.endswith(processor):
        raise RemoteError(f"{machine} is a {platform}: expected a wheel for it, got {wheel.name}; give one with --wheel")
    try:
        with zipfile.ZipFile(wheel) as archive:
            built = json.loads(archive.read("kvbm/_build.json"))
    except (KeyError, ValueError, zipfile.BadZipFile):
        return  # pip will report the error
    if for_gpu and not built.get("nvcc"):
        raise RemoteError(
            f"{wheel.name} has no CUDA kernels ({built.get('why_not')}), and --gpu asks for them: rebuild kvbm with CUDA, or give "
            "another wheel with --wheel"
        )


def _belongs(name: str) -> bool:
    """True if a recorded file came with the wheel: not made by the installer, and not a script outside the package."""
    if name.startswith(("..", "/", "bin/")) or "__pycache__/" in name:
        return False
    return not re.search(r"\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json)$", name)


def _built(tree: Path, folder: Path, note: Note) -> Path:
    note(f"building a wheel of {tree}")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RemoteError(f"no wheel of {tree} could be built: {_last(done.stderr)}; give one with --wheel")
    return next(folder.glob("*.whl"))


# ---- the other machine ---------------------------------------------------------------------------------------------

#: Script for the interpreter there.  It prints its version, its platform, and the GPUs in the order of nvidia-smi.
PROBE = """
import ctypes, json, os, sys, sysconfig
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
gpus, why = [], ""
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    status, count = cuda.cuInit(0), ctypes.c_int()
    if status or cuda.cuDeviceGetCount(ctypes.byref(count)):
        why = "its driver finds none (status %d)" % status
    for index in range(count.value):
        name, device = ctypes.create_string_buffer(96), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, 96, device)
        gpus.append(name.value.decode())
except OSError:
    why = "it has no NVIDIA driver"
print("kvbm:" + json.dumps(dict(version=sys.version_info[:2], platform=sysconfig.get_platform(), gpus=gpus, why=why)))
"""

#: Script that creates the environment.  The environment sees the packages of the interpreter that creates it, also if that one is
#: in a virtual environment.  So an installed torch is not downloaded again.
SETUP = """
import os, subprocess, sys, sysconfig, venv
home, wheel = sys.argv[1:]
env = os.path.join(home, "env")
venv.create(env, system_site_packages=True, symlinks=True)
python = os.path.join(env, "bin", "python")
if sys.prefix != sys.base_prefix:
    paths = sysconfig.get_paths()
    where = sysconfig.get_path("purelib", "venv", vars={"base": env, "platbase": env})
    with open(os.path.join(where, "zz_parent.pth"), "w") as file:
        file.write("\\n".join(dict.fromkeys([paths["purelib"], paths["platlib"]])) + "\\n")
def run(*command):
    done = subprocess.run([python, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout[-4000:] or "python -m " + " ".join(command) + " failed")
try:
    import pip
except ImportError:
    run("ensurepip")
pip = ("pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--no-cache-dir", "--no-warn-script-location")
run(*pip, "--no-deps", "--ignore-installed", os.path.join(home, wheel))
run(*pip, os.path.join(home, wheel) + "[testing]")
"""


class _Machine:
    """A connection and its operations.  Commands run in `sh`, independent of the login shell."""

    def __init__(self, connection: Any, name: str, python: str) -> None:
        self._connection, self._name, self._python = connection, name, python

    def __str__(self) -> str:
        return self._name

    @classmethod
    @contextlib.contextmanager
    def connect(cls, target: Target, options: Options) -> Iterator[_Machine]:
        try:
            import fabric
            import paramiko
        except ImportError as error:
            raise MissingPackageError(f"--ssh needs fabric ({error}): pip install 'kvbm-layouts[remote]'") from None
        for option, path in (("--ssh-key", options.key), ("--known-hosts", options.known_hosts)):
            if path is not None and not path.exists():
                raise SpecError(f"{option} {path}: no such file")

        class Refuse(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
            def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:  # noqa: ARG002
                where = options.known_hosts or "~/.ssh/known_hosts"
                raise HostKeyError(
                    f"ssh {options.target}: the key of {hostname} is not in {where}: expected it to be known, got "
                    f"{key.get_name()} {key.fingerprint}; if that is the machine's, connect to it once with ssh, or add it"
                )

        mine = {"allow_agent": False, "look_for_keys": False, "key_filename": str(options.key)} if options.key else {}
        connection = fabric.Connection(
            target.host, user=target.user, port=target.port, connect_timeout=CONNECT_S, connect_kwargs=mine
        )
        name = f"{connection.user}@{connection.host}:{connection.port}"
        client = connection.client
        client.set_missing_host_key_policy(Refuse())
        with contextlib.suppress(OSError):
            client.load_system_host_keys("/etc/ssh/ssh_known_hosts")
        client.load_system_host_keys(str(options.known_hosts) if options.known_hosts else None)
        try:
            try:
                connection.open()
            except KvbmError:
                raise  # raised by our policy; some of these are OSErrors, too
            except paramiko.BadHostKeyException as error:
                raise HostKeyError(
                    f"ssh {name}: the machine's key is not the one that is known: expected {error.expected_key.fingerprint}, got "
                    f"{error.key.fingerprint}; it may be another machine: if it is not, correct known_hosts"
                ) from None
            except paramiko.AuthenticationException as error:
                with_key = f"the key {options.key}" if options.key else "any key of the agent or of ~/.ssh"
                raise AuthenticationError(
                    f"ssh {name}: the machine does not let {connection.user} in with {with_key} ({str(error).rstrip('.')}); "
                    "expected a key that it knows: name it with --ssh-key"
                ) from None
            except paramiko.SSHException as error:
                if "authentication methods" in str(error) or "key" in str(error).lower():
                    raise AuthenticationError(
                        f"ssh {name}: no key to log in with ({error}); expected a private key: name it with --ssh-key"
                    ) from None
                raise UnreachableError(f"ssh {name}: what answers there does not speak SSH as expected: {error}") from None
            except (OSError, EOFError) as error:
                why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise UnreachableError(
                    f"ssh {name}: the machine cannot be reached ({why}); expected an SSH server there: check name, port and network"
                ) from None
            connection.transport.set_keepalive(30)
            yield cls(connection, name, options.python)
        finally:
            connection.close()

    def sh(self, command: str, timeout: float | None = None) -> Any:
        """Run a command; its result has `return_code`, `stdout` and `stderr`."""
        import invoke

        try:
            return self._connection.run(
            f"sh -c {shlex.quote(command)}", hide=True, warn=True, in_stream=False, timeout=timeout
        )
        except invoke.exceptions.CommandTimedOut:
            raise RemoteError(f"{self}: a command did not end within {timeout:g} s: {command[:60]} …") from None
        except (OSError, EOFError) as error:
            raise UnreachableError(f"{self}: the connection was lost: {error}") from None

    def put(self, file: Path, there: str) -> None:
        try:
            self._connection.put(str(file), there)
        except OSError as error:
            raise RemoteError(f"{self}: {file.name} cannot be written to {there}: {error}") from None

    def require_python_and_gpu(self, options: Options) -> str:
        """Check Python and the GPU before files are copied; return the platform, such as ``linux-x86_64``."""
        done = self.sh(f"{shlex.quote(self._python)} -c {shlex.quote(PROBE)}", COMMAND_S)
        match = re.search(r"^kvbm:(.*)$", done.stdout, re.MULTILINE)
        if not match:
            raise RemoteError(
                f"{self}: {self._python} does not run ({_last(done.stderr) or f'exit code {done.return_code}'}); expected Python "
                "3.11 or newer: name one with --python"
            )
        answer = json.loads(match[1])
        version = ".".join(map(str, answer["version"]))
        if tuple(answer["version"]) < (3, 11):
            raise RemoteError(f"{self}: {self._python} is Python {version}; expected 3.11 or newer: name one with --python")
        if options.gpu is not None and options.gpu >= len(answer["gpus"]):
            names = ", ".join(f"{index}: {name}" for index, name in enumerate(answer["gpus"]))
            there = f"it has {names}" if names else answer["why"] or "it has none"
            raise DeviceNotFoundError(f"--gpu {options.gpu}: {self} has no such GPU: {there}")
        return str(answer["platform"])

    @contextlib.contextmanager
    def home(self, keep: bool, note: Note) -> Iterator[str]:
        """A folder on the machine.  At the end it is removed, and a process that still runs in it is stopped."""
        done = self.sh('umask 077; mktemp -d "${TMPDIR:-/tmp}/kvbm-smoke.XXXXXXXX"', COMMAND_S)
        home = str(done.stdout).strip().rpartition("\n")[2]
        if done.return_code or "/kvbm-smoke." not in home:
            raise RemoteError(f"{self}: no folder could be made: {_last(done.stderr)}")
        try:
            yield home
        finally:
            if keep:
                note(f"{self}: kept {home}")
            else:
                quoted = shlex.quote(home)
                stop = f'[ -f {quoted}/pid ] && kill "$(cat {quoted}/pid)" 2>/dev/null'
                try:
                    gone = self.sh(f"{stop}; rm -rf -- {quoted}", COMMAND_S)
                    left = (_last(gone.stderr) or "it cannot be removed") if gone.return_code else ""
                except KvbmError as error:
                    left = str(error)
                if left:
                    note(f"{self}: {home} is left behind: {left}")

    def make_environment(self, home: str, wheel: str) -> None:
        setup = f"{shlex.quote(self._python)} -c {shlex.quote(SETUP)} {shlex.quote(home)} {shlex.quote(wheel)}"
        done = self.sh(self._in(home, setup, ""))
        if done.return_code:
            raise RemoteError(
                f"{self}: no environment could be made: {_last(done.stderr) or _last(done.stdout)}; name another interpreter with "
                "--python, or another wheel with --wheel"
            )

    def smoke(self, home: str, arguments: Sequence[str], options: Options) -> Report:
        """Run ``kvbm smoke`` on the machine, and read its report."""
        chosen, there = "", ["--cpu"] if options.cpu else []
        if options.gpu is not None:
            chosen, there = f"CUDA_VISIBLE_DEVICES={options.gpu}", ["--gpu", "0"]
        command = shlex.join(["env/bin/python", "-m", "kvbm.testing.smoke", "--json", *arguments, *there])
        done = self.sh(self._in(home, f"{command} > report.json", chosen))
        text = io.BytesIO()
        with contextlib.suppress(OSError):
            self._connection.get(f"{home}/report.json", text)
        try:
            report = Report.from_json(text.getvalue().decode(), str(self))
        except (ValueError, KeyError, TypeError):
            why = _last(done.stderr) or f"exit code {done.return_code}"
            raise RemoteError(f"{self}: the run gave no report: {why}") from None
        device = f"cuda:{options.gpu}" if options.gpu is not None else report.device
        return dataclasses.replace(report, device=device)

    @staticmethod
    def _in(home: str, command: str, variables: str) -> str:
        """A command that runs in `home`, writes no files elsewhere, and records its process id."""
        keep = 'PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME="$PWD/cache" CUDA_CACHE_PATH="$PWD/cache" TMPDIR="$PWD/tmp"'
        inner = f"exec env -u PYTHONPATH -u PYTHONHOME CUDA_DEVICE_ORDER=PCI_BUS_ID {keep} {variables} {command}"
        return f"cd {shlex.quote(home)} && mkdir -p tmp && echo $$ > pid && {inner}"


def _last(text: str) -> str:
    """The last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
