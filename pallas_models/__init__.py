"""Hand-written Pallas GPU kernels and the models made from them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_models import (
        bert,
        compilation_cache,
        corpus,
        cuequivariance,
        exporting,
        files,
        gpt2,
        minilm,
        modernbert,
        ops,
        pairformer,
        quantization,
        qwen3,
        ray,
        sentence,
        target,
        training,
        trimul,
        tuning,
    )

__all__ = [
    "bert",
    "compilation_cache",
    "corpus",
    "cuequivariance",
    "exporting",
    "files",
    "gpt2",
    "minilm",
    "modernbert",
    "ops",
    "pairformer",
    "quantization",
    "qwen3",
    "ray",
    "sentence",
    "target",
    "training",
    "trimul",
    "tuning",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The modules above, imported when they are wanted: `python -m pallas_models --help` needs no JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
