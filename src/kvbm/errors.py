"""Every exception of kvbm, and the exit code of the command line for it; `printable` for texts of others in messages.

A message says where the error is, what was expected, what was found, and what to do next.  The class gives the kind of error.
Each class is also a subclass of a built-in exception, so callers can catch it without importing kvbm.
"""

from __future__ import annotations

import contextlib
import logging

__all__ = [
    "AuthenticationError", "BindError", "BuildError", "CoverageError", "CudaError", "CudaUnavailableError",
    "DTypeError", "DeviceNotFoundError", "DigestError", "HostKeyError", "KvbmError", "LayoutError",
    "MissingKernelError", "MissingPackageError", "NotEnoughMemoryError", "PeerLostError", "PlanError", "RemoteError",
    "SpecError", "TransferError", "TransferTimeoutError", "UnreachableError",
]  # fmt: skip


class KvbmError(Exception):
    """The base class of all errors that kvbm raises on purpose."""

    exit_code = 10


class SpecError(KvbmError, ValueError):
    """A layout, shape or placement file is wrong: ``layouts/x.yaml:7: axis 'h': expected …, got …``."""

    exit_code = 11


class LayoutError(KvbmError, ValueError):
    """A layout is not one-to-one for the shape: a split does not divide, bytes overlap, or an axis is missing."""

    exit_code = 12


class PlanError(KvbmError, ValueError):
    """There is no copy between the two layouts: ``nhd → universal: axes {'o'} only in the source``."""

    exit_code = 13


class CoverageError(PlanError):
    """In a resharding, a part of the destination is missing, is written twice, or comes from the wrong place."""

    exit_code = 20


class TransferError(KvbmError, RuntimeError):
    """A transfer between processes failed.  None of its blocks may be used."""

    exit_code = 22


class PeerLostError(TransferError, ConnectionError):
    """The peer is gone: its process ended, its connection broke, or one side has dropped the other.

    Attributes
    ----------
    peer : str
        Name of the peer, as `Wire.connect` returned it.
    """

    exit_code = 23

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class TransferTimeoutError(TransferError, TimeoutError):
    """The deadline passed before the peer answered."""

    exit_code = 24


class DigestError(TransferError, ValueError):
    """Blocks are wrong: their digest differs from that of the source, or from the digest that was stored with them.

    Attributes
    ----------
    pairs : tuple of int
        Positions of the wrong blocks in the batch, or their numbers in a file.
    """

    exit_code = 21

    def __init__(self, message: str, *, pairs: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.pairs = pairs


class BindError(KvbmError, ValueError):
    """Arrays or block ids do not fit their layout: shape, strides, device, count, range or overlap."""

    exit_code = 14


class DTypeError(KvbmError, TypeError):
    """A dtype is unknown, is not that of the shape, or differs between arrays."""

    exit_code = 15


class NotEnoughMemoryError(KvbmError, MemoryError):
    """The machine does not have the memory.  The message says how many bytes are needed, and how many are available."""

    exit_code = 25


class MissingPackageError(KvbmError, ImportError):
    """An optional package is not installed, or is too old.  The message has the line that installs it."""

    exit_code = 26


class BuildError(KvbmError, RuntimeError):
    """A compiler is missing, or failed.

    Attributes
    ----------
    command : str
        The command line that was run; empty if none was.
    log : str
        Output of the compiler.
    """

    exit_code = 16

    def __init__(self, message: str, *, command: str = "", log: str = "") -> None:
        super().__init__(message)
        self.command = command
        self.log = log


class MissingKernelError(KvbmError, LookupError):
    """There is no kernel of this name, or a plan would need thousands of launches.  The message says what to do."""

    exit_code = 17


class CudaError(KvbmError, RuntimeError):
    """A CUDA call failed.

    Attributes
    ----------
    code : int
        The ``CUresult``.  Negative codes are kvbm's own, see ``cuda/kvbm.h``.
    name : str
        Name of the code, e.g. ``CUDA_ERROR_INVALID_VALUE``.
    """

    exit_code = 18

    def __init__(self, message: str, *, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class CudaUnavailableError(CudaError):
    """There is no GPU, no driver, or no CUDA in this build.  The message says which, and what to do."""

    exit_code = 19


class RemoteError(KvbmError, RuntimeError):
    """Another machine was reached but cannot do the task: no Python, no pip, or a wheel that does not fit."""

    exit_code = 30


class UnreachableError(KvbmError, ConnectionError):
    """Another machine does not answer: wrong name, wrong port, or a network failure."""

    exit_code = 31


class HostKeyError(KvbmError, ConnectionError):
    """The host key of another machine is unknown, or has changed.  Nothing was sent to it."""

    exit_code = 32


class AuthenticationError(KvbmError, PermissionError):
    """Another machine refuses this user with this key, or a peer has another secret than this side."""

    exit_code = 33


class DeviceNotFoundError(KvbmError, LookupError):
    """There is no GPU of the given number."""

    exit_code = 34


def printable(text: str, most: int = 200) -> str:
    """A text of another program, as it may stand in a message or a log: control characters, line breaks and marks of direction as escapes, at most `most` characters."""  # noqa: E501
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


class _Printable(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):  # a message that cannot be formatted: the handler reports it
            record.msg, record.args = printable(record.getMessage(), 10_000), ()
        return True


_PRINTABLE = _Printable()


def escaping(logger: logging.Logger) -> logging.Logger:
    """The logger, of which every line is `printable`: what a peer, a file or a card says writes no other line, and no colour."""
    logger.addFilter(_PRINTABLE)  # once, however often it is added
    return logger
