"""Random trials without end: `python -m parity campaign`.

A module for each part: `ops` draws calls of ops, `checkpoints` damages weights, `files` every other file that is read,
`kills` ends writers. Each has `cases(seed) -> Iterator[Case]`, endless, whose I-th case depends on nothing but `seed`
and I; to make a case is cheap, its `run` does the work.
"""
