"""Benchmarks: our kernels and models against XLA and torch, measured side by side in one run.

`python -m bench --help` lists what there is. How it measures: `bench.timing`; what a result file holds:
`bench.results`.
"""
