"""Studies of kvbm's speed: programs that run in a checkout, as ``python -m benchmarks NAME``; see README.md."""
