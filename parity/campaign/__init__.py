"""Random trials without end: `python -m parity campaign`.

A module for each part. `ops` draws calls of ops, `transformations` nests JAX's around them, `shardings` spreads
their operands, `exports` gives them symbolic sizes; `models` draws configs, `encoders` calls of `Encoder`;
`checkpoints` damages weights, `files` and `folders` what else is read; `kills` ends writers, `jobs` runs two at
once or ends one. Each has an endless `cases(seed) -> Iterator[Case]`, whose I-th depends on `seed` and I alone; to
make a case is cheap, its `run` does the work. A part whose import lacks a package is left out.
"""
