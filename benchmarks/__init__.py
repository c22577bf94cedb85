"""Benchmarks: each workload beside its peers in the same run. README.md says how to run, read and repeat them."""
