# cython: language_level=3, embedsignature=True, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled half: kernels by name, pointers, streams and status codes.  It has no knowledge of layouts.

Callers have validated their arguments.  The checks here only prevent memory errors.  The C functions are ``noexcept
nogil``, and every status that they return passes through `check`.
"""

import sys
import weakref

cimport cython
from cpython.exc cimport PyErr_Clear
from cpython.object cimport Py_TYPE, PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.weakref cimport PyWeakref_GetObject
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.number cimport PyNumber_Index
from cpython.long cimport PyLong_AsLongLong, PyLong_AsUnsignedLongLong
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memmove, memset

from kvbm.errors import BindError, CudaError, CudaUnavailableError, MissingKernelError, PlanError

__all__ = [
    "Copy",
    "DefaultArithmetic",
    "Done",
    "Expected",
    "Foreseen",
    "Latch",
    "Loans",
    "MAX_INNER",
    "MAX_OUTER",
    "MAX_PARTS",
    "Mail",
    "Pairs",
    "Ring",
    "Route",
    "Table",
    "Watch",
    "MAIL_BYTES",
    "MAIL_NOTE",
    "MAIL_SLOTS",
    "add_kernel",
    "alloc_device",
    "blocks_fit",
    "check_pairs",
    "chunk_tensors",
    "copy_now",
    "copy_pairs",
    "device_count",
    "device_info",
    "driver_version",
    "find_device",
    "fence",
    "find_ungranted",
    "enable_peer",
    "finished",
    "free_device",
    "has_memcpy_batch",
    "host_register",
    "host_touch",
    "host_unregister",
    "ipc_close",
    "ipc_handle",
    "ipc_open",
    "kernel_index",
    "kernel_names",
    "know_torch",
    "memcpy_batch",
    "num_images",
    "memory_range",
    "pointer_device",
    "spread",
    "stream_handle",
    "synchronize",
    "tables_clash",
    "warm",
    "whole_tensors",
]


include "core/abi.pxi"
include "core/ids.pxi"
include "core/tensors.pxi"
include "core/watch.pxi"
include "core/kernels.pxi"
include "core/pairs.pxi"
include "core/streams.pxi"
include "core/routes.pxi"
include "core/memory.pxi"
include "core/foreseen.pxi"
include "core/mail.pxi"
include "core/arithmetic.pxi"
