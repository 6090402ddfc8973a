"""All layers of a post-norm transformer encoder, such as BERT's."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_models._implementation import Implementation, check_implementation
from pallas_models.dispatch.derivatives import differentiated_as
from pallas_models.dispatch.legacy import Op, run, serves
from pallas_models.dispatch.records import Kernel
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.mosaic import post_norm_layers as mosaic
from pallas_models.ops import _checks, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.activations import Activation
from pallas_models.ops.matmul import matmul
from pallas_models.ops.post_norm_mlp import post_norm_mlp
from pallas_models.target import HOPPER

Layer = Mapping[str, Array]
# The arrays of a layer and their axes.
_AXES = {
    **{"w_up": "N F", "bias_up": "F", "w_down": "F N", "bias_down": "N", "scale": "N", "offset": "N"},
    **{"w_qkv": "N 3N", "bias_qkv": "3N", "w_out": "N N", "bias_out": "N", "scale_out": "N", "offset_out": "N"},
}


def post_norm_layers(
    x: Array,
    layers: Sequence[Layer],
    *,
    num_heads: int,
    mask: Array | None = None,
    bias: Array | None = None,
    segment_ids: Array | None = None,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes for one layer after another, with its own weights,

        qkv = x @ w_qkv + bias_qkv
        x = post_norm_mlp(qkv, x, attention=...)

    On Hopper one kernel computes all of it for the few tokens of a short sentence. Elsewhere, and where it is
    differentiated, it is `matmul` and `post_norm_mlp` again.

    Args:
      x: (B, S, N), float16, bfloat16 or float32.
      layers: one or more, each with all arrays by name. In the dtype of `x` are `w_qkv` (N, 3N), `w_out` (N, N),
        `w_up` (N, F) and `w_down` (F, N), in any float dtype their biases `bias_qkv`, `bias_out`, `bias_up` and
        `bias_down`, and of the norms `scale_out` and `offset_out`, `scale` and `offset`, (N,).
      num_heads: of attention; divides N.
      mask, bias, segment_ids: as in `attention`; what comes for tokens that the mask rules out has no meaning.
      activation, epsilon, precision: as in `post_norm_mlp`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves in one kernel,
        with JAX 0.11 or newer, half precisions, B * S up to 16, heads of 32, N of 128, 256 or 384, F of 4 N,
        float32 vectors, up to 12 layers, and at most a `mask`. It rounds to the dtype of `x` what each head and
        each 128 hidden values add, and the sum before it is normalised. Other calls are served in those that it
        stands for, by default those under `vmap` too.

    Returns:
      (B, S, N) in the dtype of `x`.

    Raises:
      TypeError: an operand is not floating point, weights differ from `x` in dtype, or `layers` is no sequence.
      ValueError: there are no layers, names or shapes do not fit, `activation` is unknown, or as in `attention`.
      NotImplementedError: the kernels that `implementation` names do not serve the call.
    """
    _checks.check_float("x", x)
    _checks.check_rank("x", x, 3, "(B, S, N)")
    if num_heads < 1 or x.shape[-1] % num_heads:
        raise ValueError(f"x has shape {x.shape}; expected its last axis to be a multiple of {num_heads=}")
    if isinstance(layers, Mapping):
        raise TypeError("layers is one layer; expected a sequence of them")
    layers = tuple(dict(layer) for layer in layers)
    if not layers:
        raise ValueError("layers is empty; expected one or more")
    for i, layer in enumerate(layers):
        _check_layer(f"layers[{i}]", layer, x)
    if mask is not None:
        _checks.check_mask("mask", mask, x.shape[:2], "(B, S)")
        mask = _checks.as_int32(mask)
    activations.check_activation(activation)
    names = check_implementation(implementation)
    static: dict[str, Any] = dict(num_heads=num_heads, activation=activation, epsilon=epsilon)
    static["precision"] = _checks.as_precision(precision)
    traced: dict[str, Any] = {"epsilon": static.pop("epsilon")} if isinstance(epsilon, jax.Array) else {}

    def apart(x: Any, mask: Any, layers: Any) -> jax.Array:
        # A CUDA graph is told anew where an argument lies, for each kernel that reads it: of the mask that is one.
        masks = dict(mask=None if mask is None else mask != 0, bias=bias, segment_ids=segment_ids)
        for layer in layers:
            x = _apart(x, masks, layer, traced, names=names, **static)
        return x

    arrays, plain = (x, mask, layers), bias is None and segment_ids is None
    if not plain or not serves(_OP, *arrays, implementation=implementation, **static, **traced):
        return apart(*arrays)

    def one(*arrays: Any) -> jax.Array:
        return run(_OP, *arrays, implementation=implementation, **static)

    together = jax.custom_batching.custom_vmap(one)

    @together.def_vmap
    def _(_: int, mapped: Any, *arrays: Any) -> tuple[jax.Array, bool]:
        """A cluster has a sentence, and few clusters run at once: of many sentences layers are faster apart."""
        of_all = jax.vmap(one if names else apart, jax.tree.map(lambda m: 0 if m else None, mapped))
        return of_all(*arrays), True

    return differentiated_as(together, apart)(*arrays)


def _check_layer(name: str, layer: Layer, x: Array) -> None:
    if layer.keys() != _AXES.keys():
        raise ValueError(f"{name} has {sorted(layer)}; expected {sorted(_AXES)}")
    sizes = {"N": x.shape[-1], "3N": 3 * x.shape[-1]}
    for key, axes in _AXES.items():
        own, array = f"{name}[{key!r}]", layer[key]
        _checks.check_float(own, array)
        if key == "w_up":
            _checks.check_rank(own, array, 2, "(N, F)")
            sizes["F"] = array.shape[1]
        if key[0] == "w" and array.dtype != x.dtype:
            raise TypeError(f"x has dtype {x.dtype} and {own} has dtype {array.dtype}; expected the same")
        _checks.check_shape(own, array, tuple(sizes[axis] for axis in axes.split()), f"{axes} for x {x.shape}")


@functools.partial(jax.jit, static_argnames=("num_heads", "activation", "epsilon", "precision", "names"))
def _apart(
    x: jax.Array,
    masks: dict[str, Any],
    layer: Layer,
    traced: dict[str, Any],
    *,
    names: Sequence[Any],
    num_heads: int,
    precision: jax.lax.Precision,
    **norms: Any,
) -> jax.Array:
    """A layer, of operations one after the other; those that are alike are traced and lowered once."""
    options: dict[str, Any] = dict(precision=precision, implementation=names or None)
    rest: dict[str, Any] = dict(layer)
    qkv = matmul(x, rest.pop("w_qkv"), bias=rest.pop("bias_qkv"), **options)
    attention = dict(num_heads=num_heads, **masks)
    return post_norm_mlp(qkv, x, **rest, attention=attention, **norms, **traced, **options)


def reference(x: jax.Array, mask: jax.Array | None, layers: Sequence[Layer], **static: Any) -> jax.Array:
    """The same in plain XLA."""
    for layer in layers:
        x = _apart(x, dict(mask=mask), layer, {}, names=("xla",), **static)
    return x


def _sharding(x: jax.Array, mask: jax.Array | None, layers: Sequence[Layer], **_: Any) -> Sharding:
    """Sequences can be split."""
    leaves = [_AXES[name] for name in sorted(_AXES)] * len(layers)
    return Sharding(equation=f"b S N, b S, {', '.join(leaves)} -> b S N")


_OP = Op(
    name="post_norm_layers",
    reference=reference,
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.post_norm_layers,
            config=None,
            refuses=mosaic.unsupported,
        ),
    ),
    sharding=_sharding,
)
