"""Digests of blocks: the place of each cell in the model's order, and the kernels that sum up the cells."""
