"""Benchmarks: each workload beside its peers in the same run. `python -m benchmarks NAME`; README.md says how to read them."""
