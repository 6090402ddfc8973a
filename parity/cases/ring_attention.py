"""The case of `ops.ring_attention`, whose call is spread over devices or is not."""

from pallas_models import ops
from parity.cases._records import Case, Without

_RING = Without("it runs in a `shard_map` alone: `parity.dispatch.meshes` and test_meshes.py have its calls")

CASES = (
    Case(
        op=ops.ring_attention,
        products="kernels",
        calls=_RING,
        hopper_calls=_RING,
        large=_RING,
        empty=_RING,
        spread=_RING,
        formula=_RING,
        draw=_RING,
        torch=_RING,
    ),
)
