"""Every exception of kvbm and the exit code its command line ends with.

A message says where, what was expected, what was found and what to do next; the class says what kind of mistake it was.
Each class is also a built-in exception, so that callers can catch it without importing kvbm.
"""

from __future__ import annotations

__all__ = [
    "AuthenticationError",
    "BindError",
    "BuildError",
    "CoverageError",
    "CudaError",
    "CudaUnavailableError",
    "DTypeError",
    "DeviceNotFoundError",
    "DigestError",
    "HostKeyError",
    "KvbmError",
    "LayoutError",
    "MissingKernelError",
    "PeerLostError",
    "PlanError",
    "RemoteError",
    "SpecError",
    "TransferError",
    "TransferTimeoutError",
    "UnreachableError",
]


class KvbmError(Exception):
    """The root: catch this to catch everything that kvbm raises on purpose."""

    exit_code = 10


class SpecError(KvbmError, ValueError):
    """A layout or shape file that does not say what it must: ``layouts/x.yaml:7: axis 'h': expected …, got …``."""

    exit_code = 11


class LayoutError(KvbmError, ValueError):
    """A layout that is not a one-to-one map for the shape: a split that does not divide, an overlap, a missing axis."""

    exit_code = 12


class PlanError(KvbmError, ValueError):
    """Two layouts between which there is no copy: ``nhd → universal: axes {'o'} only in the source``."""

    exit_code = 13


class CoverageError(PlanError):
    """A resharding in which something of the destination is missing, written twice, or comes from the wrong place."""

    exit_code = 20


class TransferError(KvbmError, RuntimeError):
    """Blocks that did not arrive as they should: the peer, the deadline or the bytes; nothing of them is visible."""

    exit_code = 22


class PeerLostError(TransferError, ConnectionError):
    """A peer that is no more: its process ended, its connection broke, or one side has dropped the other.

    Attributes
    ----------
    peer : str
        Its name, as `Wire.connect` returned it.
    """

    exit_code = 23

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class TransferTimeoutError(TransferError, TimeoutError):
    """A deadline that passed before the peer had answered."""

    exit_code = 24


class DigestError(TransferError, ValueError):
    """Blocks that are not what they should be: their digest differs from the source's, or from the one that was stored with them.

    Attributes
    ----------
    pairs : tuple of int
        Positions in the batch, or numbers of blocks in a file.
    """

    exit_code = 21

    def __init__(self, message: str, *, pairs: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.pairs = pairs


class BindError(KvbmError, ValueError):
    """Arrays or block ids that do not fit their layout: shape, strides, device, count, range, overlap."""

    exit_code = 14


class DTypeError(KvbmError, TypeError):
    """A dtype that is unknown, mixed, or not the one the shape names."""

    exit_code = 15


class BuildError(KvbmError, RuntimeError):
    """A compiler that is missing or failed.

    Attributes
    ----------
    command : str
        The command line that was run, empty if none was.
    log : str
        What it printed.
    """

    exit_code = 16

    def __init__(self, message: str, *, command: str = "", log: str = "") -> None:
        super().__init__(message)
        self.command = command
        self.log = log


class MissingKernelError(KvbmError, LookupError):
    """There is no kernel of this name, or a plan would take thousands of launches; the message says what to do."""

    exit_code = 17


class CudaError(KvbmError, RuntimeError):
    """A CUDA call that failed.

    Attributes
    ----------
    code : int
        The ``CUresult`` (negative: one of kvbm's own, see ``cuda/kvbm.h``).
    name : str
        Its name, e.g. ``CUDA_ERROR_INVALID_VALUE``.
    """

    exit_code = 18

    def __init__(self, message: str, *, code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.name = name


class CudaUnavailableError(CudaError):
    """No GPU, no driver, or built without CUDA: the message says which, and what to do."""

    exit_code = 19


class RemoteError(KvbmError, RuntimeError):
    """Another machine was reached, and cannot do what it is asked: no Python, no pip, a wheel that does not fit it."""

    exit_code = 30


class UnreachableError(KvbmError, ConnectionError):
    """Another machine that does not answer: its name, its port, the network."""

    exit_code = 31


class HostKeyError(KvbmError, ConnectionError):
    """Another machine whose key is not known, or is not the one that is: it was not talked to."""

    exit_code = 32


class AuthenticationError(KvbmError, PermissionError):
    """Another machine that does not let this user in with this key."""

    exit_code = 33


class DeviceNotFoundError(KvbmError, LookupError):
    """A GPU that was asked for by its number, and is not there."""

    exit_code = 34
