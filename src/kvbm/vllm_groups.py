"""Groups of layers, layouts, sizes and ranks, read from vLLM's config objects."""

from .engines.vllm import Group, groups, number_of_layer

__all__ = ["Group", "groups", "number_of_layer"]
