"""Programs in separate processes do not affect each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import processes


@pytest.fixture(scope="module")
def server() -> Iterator[processes.Server]:
    server = processes.Server(A_VARIABLE="of the server")
    yield server
    server.close()


def test_a_program_is_a_main_program(server: processes.Server) -> None:
    assert (
        server.run("import os, sys; os.write(1, b'one '); print(__name__, 'numpy' in sys.modules)")
        == "one __main__ True\n"
    )
    assert server.run("import atexit; atexit.register(print, 'at the end')") == "at the end\n"
    assert server.run("import sys; print(repr(sys.stdin.read()))") == "''\n"
    assert server.run("raise SystemExit") == ""


def test_no_program_sees_another_one(server: processes.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's variables, modules and folder end with it; its environment is the caller's current one."""
    server.run("import os, numpy; os.chdir('/tmp'); os.environ['A_VARIABLE'] = '1'; numpy.mine = 1; other = 1")
    monkeypatch.setenv("ANOTHER_VARIABLE", "of now")
    code = (
        "import os, numpy; print(os.getcwd(), hasattr(numpy, 'mine'), 'other' in globals(), os.environ['A_VARIABLE'], "
    )
    assert server.run(code + "os.environ['ANOTHER_VARIABLE'])") == "/ False False of the server of now\n"
    monkeypatch.delenv("ANOTHER_VARIABLE")
    assert (
        server.run("import os; print(os.environ.get('ANOTHER_VARIABLE'), os.environ['KNOB'])", KNOB="3") == "None 3\n"
    )


def test_a_module_stays_for_the_programs_that_follow(server: processes.Server) -> None:
    code = "import sys; print('colorsys' in sys.modules)"
    assert [server.run(code), server.run(code, "colorsys"), server.run(code)] == ["False\n", "True\n", "True\n"]
    assert server.run("print(1)", "no_such_module") == "1\n", "the program's own import of it fails"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("assert 1 == 2, 'not so'", "exit status 1\n *Traceback(.|\n)*AssertionError: not so"),
        ("raise SystemExit(7)", "exit status 7"),
        ("import ctypes; ctypes.string_at(0)", "exit status -11"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_program_that_fails(server: processes.Server, code: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        server.run(code)
    assert server.run("print('the next one runs')") == "the next one runs\n"


@pytest.mark.slow
def test_a_program_that_does_not_end(server: processes.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMIT", 1)
    with pytest.raises(AssertionError, match="exit status -14"):
        server.run("import time; time.sleep(100)")
    assert server.run("print(1)") == "1\n"


def test_a_server_that_is_gone() -> None:
    """The test fails, and the next one gets a new server."""
    server = processes.Server()
    server.process.kill()
    server.process.wait()
    with pytest.raises((OSError, ValueError)):
        server.run("print(1)")
