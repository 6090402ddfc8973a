"""Random trials without end: `python -m parity campaign`.

A module for each part: `ops` draws calls of ops, `checkpoints` damages weights, `files` every other file that is
read, `kills` ends writers. Each has an endless `cases(seed) -> Iterator[Case]`, whose I-th depends on `seed` and I
alone; to make a case is cheap, its `run` does the work.
"""
