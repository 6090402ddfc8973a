"""Hand-written Pallas GPU kernels and the models made from them."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_models import (
        compilation_cache,
        corpus,
        exporting,
        files,
        gpt2,
        minilm,
        modernbert,
        ops,
        quantization,
        qwen3,
        ray,
        target,
        training,
        trimul,
        tuning,
    )

__all__ = [
    "compilation_cache",
    "corpus",
    "exporting",
    "files",
    "gpt2",
    "minilm",
    "modernbert",
    "ops",
    "quantization",
    "qwen3",
    "ray",
    "target",
    "training",
    "trimul",
    "tuning",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports a module where it is first asked for: a program needs few of them."""
    if name in __all__:
        return importlib.import_module(f"pallas_models.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
