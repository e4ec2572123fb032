"""Sizes of blocks: `BlockShape`, the sizes of models, and a rank's share of the heads."""

from .layout.shapes import BlockShape, heads_of_rank, load_shape, shape_names

__all__ = ["BlockShape", "heads_of_rank", "load_shape", "shape_names"]
