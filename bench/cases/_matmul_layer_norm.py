"""Tiles of `ops.matmul_layer_norm`, which the benchmarks of models measure."""

from bench.measuring import tunable
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops


def tuned(dtype: str, m: int, n: int, k: int) -> Call:
    """A product, bias and residual and the norm of their sum."""
    x, w, scale, offset, bias, residual = tunable.operands(dtype, (m, k), (k, n), (n,), (n,), (n,), (m, n))
    return ops.matmul_layer_norm, (x, w, scale, offset), {"bias": bias, "residual": residual}


TUNABLES = {
    "matmul_layer_norm": Tunable(
        axes="MxNxK",
        shapes=tuple((m, 384, k) for m in (16, 128, 1024, 8192, 32768) for k in (384, 1536)),
        call=tuned,
        dtypes=("fp16",),
    ),
}
