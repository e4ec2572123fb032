"""kvbm for PyTorch: operators that behave like torch's own.

They work under ``torch.compile(fullgraph=True)``, ``torch.export`` and ``torch.cuda.graph``, and `convert` has gradients.

Examples
--------
>>> import kvbm.torch  # doctest: +SKIP
>>> (stored,) = kvbm.torch.convert(cache, "vllm/LBHNC", "vllm/BLHNC", shape="llama-3.1-8b")  # doctest: +SKIP
"""

from __future__ import annotations

from .batches import AcceleratorError
from .fences import after, before, fence, keep
from .functions import convert, convert_, reinterpret, tensors
from .operators import check_ids

__all__ = [
    "AcceleratorError", "after", "before", "check_ids", "convert", "convert_", "fence", "keep", "reinterpret",
    "tensors",
]  # fmt: skip
