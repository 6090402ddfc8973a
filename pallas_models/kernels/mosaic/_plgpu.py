"""`jax.experimental.pallas.mosaic_gpu`, imported when a kernel first wants something of it.

It takes as long to import as the rest of this library, and most processes have no Hopper GPU.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("jax.experimental.pallas.mosaic_gpu"), name)
