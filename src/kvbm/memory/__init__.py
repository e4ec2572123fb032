"""Memory as it is: arrays of any framework described and checked, allocations, streams, and whether memory still lives."""
