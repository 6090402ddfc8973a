"""The parameters of a block of GPT-2 small in one flat buffer."""

import math

import jax

from pallas_models._modules import Params
from pallas_models.ops import _checks

# The parameters in their order in the buffer, matrices (in, out) row by row.
_FLAT_LAYOUT: dict[str, tuple[int, ...]] = {
    "attention_norm.scale": (768,),
    "attention_norm.bias": (768,),
    "attention.qkv.kernel": (768, 2304),
    "attention.qkv.bias": (2304,),
    "attention.out.kernel": (768, 768),
    "attention.out.bias": (768,),
    "mlp_norm.scale": (768,),
    "mlp_norm.bias": (768,),
    "mlp.up.kernel": (768, 3072),
    "mlp.up.bias": (3072,),
    "mlp.down.kernel": (3072, 768),
    "mlp.down.bias": (768,),
}
FLAT_SIZE = sum(math.prod(shape) for shape in _FLAT_LAYOUT.values())  # 7,087,872


def unpack(flat_weights: jax.Array) -> Params:
    """Unpacks the parameters of a block of GPT-2 small from one flat buffer, for `block`.

    Args:
      flat_weights: (7087872,), any float dtype: scale and bias of the first layer norm, kernel and bias of
        queries, keys and values (768 x 2304, in x out) and of the projection after attention (768 x 768),
        scale and bias of the second layer norm, kernel and bias of the MLP's 768 x 3072 and 3072 x 768.

    Returns:
      A nested dict as `init_block` returns it, of slices of the buffer, in its dtype.

    Raises:
      TypeError: the buffer is not floating point.
      ValueError: it is of another size.
    """
    _checks.check_float("flat_weights", flat_weights)
    _checks.check_shape("flat_weights", flat_weights, (FLAT_SIZE,), "a block of GPT-2 small")
    params: Params = {}
    start = 0
    for name, shape in _FLAT_LAYOUT.items():
        *modules, leaf = name.split(".")
        node = params
        for module in modules:
            node = node.setdefault(module, {})
        end = start + math.prod(shape)
        node[leaf] = flat_weights[start:end].reshape(shape)
        start = end
    return params
