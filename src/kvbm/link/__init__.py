"""Links: sequences sent and received between the ranks of two engines, in chunks that digests verify."""
