"""A plan is the coalesced difference of two address maps: loop nests in bytes, and the kernels that run them."""
