"""Runs programs, each in a process of its own that costs a fork and not a start.

    python server.py

Every line of the standard input is a JSON object: the program's ``code``, a ``module`` that is imported first and stays, the
program's ``variables`` (its whole environment) and ``limit`` (seconds; a program that takes longer is killed by SIGALRM).  A child
runs it as ``__main__`` and ends as any Python process does; the answer is a line of JSON: ``returncode``, ``stdout``, ``stderr``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from typing import Any

import kvbm
from kvbm.compile import prepare


def next_program() -> str:
    """Answer one request after the other; return a program's text in the child that is to run it."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined]  # unbuffered: a child inherits no rest
        request: dict[str, Any] = json.loads(line)
        keep(request["module"])
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if not child:
                for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out.fileno(), err.fileno())):
                    os.dup2(file, number)
                answers.close()
                os.environ.clear()
                os.environ.update(request["variables"])
                signal.alarm(request["limit"])
                return str(request["code"])
            _, status = os.waitpid(child, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        answer = {"returncode": os.waitstatus_to_exitcode(status), "stdout": texts[0], "stderr": texts[1]}
        print(json.dumps(answer), file=answers, flush=True)
    raise SystemExit


def keep(name: str) -> None:
    """Import a module.  One that cannot be imported says so in the program."""
    if not name or name in sys.modules:
        return
    with contextlib.suppress(Exception):
        importlib.import_module(name)
    if "matrix" in sys.modules:
        sys.modules["matrix"].orders()  # reads all layouts, which would cost each child more than most programs
    gc.collect()
    gc.freeze()  # what is imported is no garbage: no child looks at it, and so copies its pages


for first in ("kvbm.copy.autotune", "kvbm.copy.transfer", "numpy.ma", "platformdirs"):  # what a first copy imports
    importlib.import_module(first)
for name in kvbm.layouts():  # and reads
    kvbm.load(name)
prepare._digesting()
gc.freeze()
exec(compile(next_program(), "<program>", "exec"), {"__name__": "__main__"})
