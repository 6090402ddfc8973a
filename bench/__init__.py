"""Benchmarks: our kernels and models against XLA and torch, measured side by side in one run.

`python -m bench --help` lists what there is. How it measures: `bench.measuring.timing`; what a result file holds:
`bench.measuring.results`.
"""
