"""All layers of a post-norm transformer encoder, such as BERT's."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from pallas_models._implementation import Implementation, Name
from pallas_models.dispatch.records import Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.matmul import Activation
from pallas_models.kernels.forms.post_norm_layers import Form, Layer
from pallas_models.kernels.mosaic import post_norm_layers as mosaic
from pallas_models.ops import _checks, activations
from pallas_models.ops._checks import Array
from pallas_models.ops.attention_post_norm_mlp import attention_post_norm_mlp
from pallas_models.ops.matmul import matmul
from pallas_models.target import HOPPER

# The arrays of a layer and their axes.
_AXES = {
    **{"w_up": "N F", "bias_up": "F", "w_down": "F N", "bias_down": "N", "scale": "N", "offset": "N"},
    **{"w_qkv": "N 3N", "bias_qkv": "3N", "w_out": "N N", "bias_out": "N", "scale_out": "N", "offset_out": "N"},
}


def post_norm_layers(
    x: Array,
    layers: Sequence[Mapping[str, Array]],
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
        x = attention_post_norm_mlp(qkv, x, ...)

    On Hopper one kernel computes all of it for the few tokens of a short sentence. Elsewhere, and where it is
    differentiated, it is `matmul` and `attention_post_norm_mlp`.

    Beside the weights the gradient keeps for each layer and token 8 N + 2 F numbers of the dtype of `x`, and
    6 + `num_heads` in float32: the input, `qkv` and what `attention_post_norm_mlp` says.

    ```
    shapes = {"w_qkv": (64, 192), "w_out": (64, 64), "w_up": (64, 256), "w_down": (256, 64)}
    shapes |= {"bias_qkv": 192, "bias_out": 64, "bias_up": 256, "bias_down": 64}
    shapes |= dict.fromkeys(("scale_out", "offset_out", "scale", "offset"), 64)
    layer = {name: jnp.ones(shape) for name, shape in shapes.items()}
    y = ops.post_norm_layers(jnp.ones((2, 8, 64)), [layer, layer], num_heads=2)  # (2, 8, 64)
    ```

    Args:
      x: (B, S, N), float16, bfloat16 or float32.
      layers: one or more, each with all arrays by name. In the dtype of `x` are `w_qkv` (N, 3N), `w_out` (N, N),
        `w_up` (N, F) and `w_down` (F, N), in any float dtype their biases `bias_qkv`, `bias_out`, `bias_up` and
        `bias_down`, and of the norms `scale_out` and `offset_out`, `scale` and `offset`, (N,).
      num_heads: of attention; divides N.
      mask: as in `attention_post_norm_mlp`.
      bias: as in `attention_qkv`.
      segment_ids: as in `attention_qkv`.
      activation: as in `post_norm_mlp`.
      epsilon: as in `post_norm_mlp`.
      precision: as in `post_norm_mlp`.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves in one kernel,
        with JAX 0.11 or newer, half precisions, B * S up to 16, heads of 32, N of 128, 256 or 384, F of 4 N,
        float32 vectors, up to 12 layers, and at most a `mask`. It rounds to the dtype of `x` the terms of each
        head and of each 128 hidden values, and their sum before it is normalised; `"mosaic_interpret"` runs up to
        8 heads. Other calls are served in those that it stands for, by default those under `vmap` too.

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
    form = Form(
        x=x,
        mask=mask,
        bias=bias,
        segment_ids=segment_ids,
        layers=tuple(Layer(**layer) for layer in layers),
        num_heads=num_heads,
        activation=activation,
        epsilon=epsilon,
        precision=_checks.as_precision(precision),
    )
    out: jax.Array = run(_OP, form, implementation=implementation)
    return out


def _check_layer(name: str, layer: Mapping[str, Array], x: Array) -> None:
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


def _layer_by_layer(form: Form[jax.Array], names: tuple[Name, ...]) -> jax.Array:
    """For each layer its projection, and all that follows; layers that are alike are traced and lowered once."""
    x, options = form.x, form.options
    traced = {name: options.pop(name) for name in [*options] if isinstance(options[name], jax.Array)}
    # A CUDA graph is told anew where an argument lies, for each kernel that reads it: one kernel reads the mask.
    mask = None if form.mask is None else form.mask != 0
    masks = dict(mask=mask, bias=form.bias, segment_ids=form.segment_ids)
    for layer in form.layers:
        x = _layer(x, masks, layer, traced, names=names, **options)
    return x


@functools.partial(jax.jit, static_argnames=("num_heads", "activation", "epsilon", "precision", "names"))
def _layer(
    x: jax.Array,
    masks: dict[str, jax.Array | None],
    layer: Layer[jax.Array],
    traced: dict[str, jax.Array],
    *,
    names: tuple[Name, ...],
    num_heads: int,
    precision: jax.lax.Precision,
    **norms: Any,
) -> jax.Array:
    options: dict[str, Any] = dict(precision=precision, implementation=names or None)
    weights: dict[str, Any] = layer._asdict()
    qkv = matmul(x, weights.pop("w_qkv"), bias=weights.pop("bias_qkv"), **options)
    options |= dict(num_heads=num_heads, **masks, **norms, **traced)
    return attention_post_norm_mlp(qkv, x, **options, **weights)


def _sharding(form: Form[jax.ShapeDtypeStruct]) -> Sharding:
    """Sequences can be split."""
    axes = [_AXES[name] for name in Layer._fields] * len(form.layers)
    return Sharding(equation=f"b S N, b S, b H S S, b S, {', '.join(axes)} -> b S N")


_OP: Op[Form[Any]] = Op(
    name="post_norm_layers",
    kernels=(
        Kernel(
            backend="mosaic",
            architectures=HOPPER,
            call=mosaic.post_norm_layers,
            config=None,
            refuses=mosaic.unsupported,
        ),
    ),
    stands_for=_layer_by_layer,
    maps=False,  # a cluster has a sentence, and few clusters run at once: many sentences are faster apart
    sharding=_sharding,
)
