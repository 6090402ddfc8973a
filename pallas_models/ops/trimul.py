"""Triangle multiplicative update: each pair (i, j) of a sequence learns from every third position k."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_models._implementation import Implementation
from pallas_models.dispatch.legacy import Op, run
from pallas_models.dispatch.records import Backward, Kernel
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.mosaic import trimul_product as mosaic_product
from pallas_models.kernels.mosaic import trimul_project as mosaic_project
from pallas_models.kernels.mosaic import trimul_project_wide as mosaic_project_wide
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.triton import trimul_bounds, trimul_output, trimul_product, trimul_project
from pallas_models.ops import _checks, _half_precision, norm
from pallas_models.ops._channel_exchange import AxisNames, ByChannels
from pallas_models.ops._checks import Array
from pallas_models.target import AMPERE_ON, HOPPER, Target
from pallas_models.tuning import Chooser

Direction = Literal["outgoing", "incoming"]
_EQUATIONS: dict[Direction, str] = {"outgoing": "hbik,hbjk->hbij", "incoming": "hbki,hbkj->hbij"}
_WEIGHTS = (
    "norm_scale",
    "norm_bias",
    "w_in",
    "b_in",
    "out_norm_scale",
    "out_norm_bias",
    "w_gate",
    "b_gate",
    "w_out",
    "b_out",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configs of the three Triton kernels, or what chooses them; None for the tables and the heuristic."""

    project: trimul_project.Config | Chooser | None = None
    product: trimul_product.Config | Chooser | None = None
    output: trimul_output.Config | Chooser | None = None


def triangle_update(
    x: Array,
    norm_scale: Array,
    norm_bias: Array,
    w_in: Array,
    out_norm_scale: Array,
    out_norm_bias: Array,
    w_gate: Array,
    w_out: Array,
    *,
    direction: Direction,
    mask: Array | None = None,
    b_in: Array | None = None,
    b_gate: Array | None = None,
    b_out: Array | None = None,
    gate_after: bool = False,
    epsilon: float = 1e-5,
    compute_dtype: DTypeLike = jnp.float16,
    precision: jax.lax.PrecisionLike = None,
    out_dtype: DTypeLike | None = None,
    rows_over: AxisNames = (),
    columns_over: AxisNames = (),
    config: Config | Chooser | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes AlphaFold's triangle multiplicative update of a pair representation.

    With z = layer_norm(x) and the four projections z @ w_in[:, g] + b_in[g], which are p_left, g_left, p_right
    and g_right:

        left = mask * p_left * sigmoid(g_left);  right = mask * p_right * sigmoid(g_right)
        outgoing:  y[b, i, j, h] = sum_k left[b, i, k, h] * right[b, j, k, h]
        incoming:  y[b, i, j, h] = sum_k left[b, k, i, h] * right[b, k, j, h]
        gate = sigmoid(z @ w_gate + b_gate)
        out = (layer_norm(y) * gate) @ w_out + b_out         where not gate_after
        out = (layer_norm(y) @ w_out + b_out) * gate         where gate_after

    Algorithms 11 and 12 of [AlphaFold 2](https://doi.org/10.1038/s41586-021-03819-2), whose gate comes after
    the output projection, as in AlphaFold 3, OpenFold, Boltz and Protenix; it comes before in lucidrains'
    module and in GPU MODE's TriMul.

    Products, those of gradients too, take operands of `compute_dtype` and accumulate in float32; norms and
    sigmoids are float32. Left and right are scaled by powers of two from the norm, the weights and the largest
    factor of a float mask, so that neither they nor their sums leave the range of float16, whatever x is; the
    layer norm of y takes the scales out again. What has no such scale, as normalised channels or weights beyond
    `compute_dtype` and in float16 masks of more than 1024 may have none, comes out as infinity or NaN.

    A position whose mask is 0 adds exactly nothing to other positions, even where its x is not finite.

    Args:
      x: (..., N, N, C), float16, bfloat16 or float32.
      norm_scale: (C,), scale of the layer norm of x, any float dtype, as all that follow.
      norm_bias: (C,), its bias.
      w_in: (C, 4, H), projections: left, gate of left, right, gate of right.
      out_norm_scale: (H,), scale of the layer norm of y.
      out_norm_bias: (H,), its bias.
      w_gate: (C, H), or (C, C) where `gate_after`.
      w_out: (H, C).
      direction: `"outgoing"` or `"incoming"`.
      mask: (..., N, N), bool, integer or float, factors of left and right; all 1 when None.
      b_in: (4, H) or None.
      b_gate: (H,), or (C,) where `gate_after`, or None.
      b_out: (C,) or None.
      gate_after: whether the gate is applied to the output and not to the hidden channels.
      epsilon: added to the variances.
      compute_dtype: of the operands of products: float16, bfloat16, or float32 for float32 end to end.
      precision: of products of float32 operands, as in `matmul`.
      out_dtype: dtype of the result; that of `x` when None.
      rows_over: names of the axes of the mesh over which a `jax.shard_map` around this call has split the first
        axis N of x, mask and result, which then are a device's part. Under `jax.jit` there is no need of it.
      columns_over: those over which it has split the second.
      config: tile sizes of the Triton kernels; chosen as `pallas_models.tuning` says when None.
      implementation: as `pallas_models.ops` has it; None for the best available. `"mosaic"` serves a
        `compute_dtype` of 16 bits.

    Returns:
      (..., N, N, C) in `out_dtype`.

    Raises:
      TypeError: an operand is not floating point.
      ValueError: shapes do not fit, or an option is unknown.
      NotImplementedError: the kernel that `implementation` names does not serve the call.
    """
    weights = (norm_scale, norm_bias, w_in, b_in, out_norm_scale, out_norm_bias, w_gate, b_gate, w_out, b_out)
    rows_over, columns_over = tuple(rows_over), tuple(columns_over)
    _check(x, mask, weights, direction, gate_after, compute_dtype, (rows_over, columns_over))
    batch = math.prod(x.shape[:-3])
    out = run(
        _OP,
        x.reshape(batch, *x.shape[-3:]),
        None if mask is None else mask.reshape(batch, *mask.shape[-2:]),
        *weights,
        config=config,
        implementation=implementation,
        direction=direction,
        gate_after=gate_after,
        epsilon=epsilon,
        compute_dtype=jnp.dtype(compute_dtype),
        precision=_checks.as_precision(precision),
        out_dtype=jnp.dtype(x.dtype if out_dtype is None else out_dtype),
        rows_over=rows_over,
        columns_over=columns_over,
    )
    return out.reshape(x.shape)


def reference(
    x: jax.Array,
    mask: jax.Array | None,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    w_in: jax.Array,
    b_in: jax.Array | None,
    out_norm_scale: jax.Array,
    out_norm_bias: jax.Array,
    w_gate: jax.Array,
    b_gate: jax.Array | None,
    w_out: jax.Array,
    b_out: jax.Array | None,
    *,
    direction: Direction,
    gate_after: bool,
    epsilon: float,
    compute_dtype: DTypeLike,
    precision: jax.lax.Precision,
    out_dtype: DTypeLike,
    rows_over: AxisNames = (),
    columns_over: AxisNames = (),
) -> jax.Array:
    """The same in plain XLA, for x (B, N, N, C).

    Hidden channels come first, as the products over k want them: neither they nor the projections are transposed,
    nor are gradients of either.
    """

    def product(equation: str, a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if compute_dtype == jnp.float32:
            y = jnp.einsum(equation, a, b, precision=precision)
        else:
            y = _half_precision.rounded_einsum(equation, jnp.dtype(compute_dtype), a, b)
        return y if bias is None else y + bias.astype(jnp.float32)

    def half(projection: jax.Array, gate: jax.Array) -> jax.Array:
        y = projection * jax.nn.sigmoid(gate)
        if mask is None:
            return y
        factor = mask.astype(jnp.float32)
        return jnp.where(factor == 0, 0.0, factor * y)  # 0 times what is not finite would be NaN

    z = norm.normalize(x.astype(jnp.float32), norm_scale, norm_bias, None, epsilon=epsilon)
    projections = product("cgh,bijc->ghbij", w_in, z, None if b_in is None else b_in[..., None, None, None])
    left, right = half(*projections[:2]), half(*projections[2:])
    by_channels = ByChannels.over(rows_over, columns_over)
    if compute_dtype == jnp.float16:
        factors = mask if mask is not None and jnp.issubdtype(mask.dtype, jnp.floating) else None
        weights = (factors, norm_scale, norm_bias, w_in.astype(compute_dtype), b_in)
        largest = _bounds(*jax.lax.stop_gradient(weights))
        if factors is not None:
            largest = by_channels.largest(largest)
        scales = trimul_bounds.scales(jnp.unstack(largest), compute_dtype)
        sides = left * scales[0], right * scales[1]
        y = by_channels.apply(functools.partial(product, _EQUATIONS[direction]), *sides) / scales[0] / scales[1]
    else:
        y = by_channels.apply(functools.partial(product, _EQUATIONS[direction]), left, right)
    y = norm.normalize(y, out_norm_scale, out_norm_bias, None, epsilon=epsilon, axis=0)
    gate = jax.nn.sigmoid(product("bijc,cg->bijg", z, w_gate, b_gate))
    if gate_after:
        out = product("hbij,hc->bijc", y, w_out, b_out) * gate
    else:
        out = product("bijh,hc->bijc", jnp.moveaxis(y, 0, -1) * gate, w_out, b_out)
    return out.astype(out_dtype)


def _triton(*arrays: Any, precision: jax.lax.Precision, config: Any, **options: Any) -> jax.Array:
    """The update in Triton kernels."""
    configs = config if isinstance(config, Config) else Config(project=config, product=config, output=config)
    return _update(
        *arrays,
        project=functools.partial(trimul_project.project, precision=precision, config=configs.project),
        product=functools.partial(trimul_product.product, precision=precision, config=configs.product),
        output=functools.partial(trimul_output.output, precision=precision, config=configs.output),
        by_rows=False,
        **options,
    )


_BY_ROWS = 2048  # the largest N at which channels of a row side by side are faster, measured on an H200


def _mosaic(
    x: jax.Array,
    mask: jax.Array | None,
    *weights: Any,
    precision: jax.lax.Precision,
    config: Any,
    **options: Any,
) -> jax.Array:
    """The update with projections and product for Hopper GPUs, where they serve; Triton's kernels do the rest."""
    n, project = x.shape[1], _mosaic_projection(x, mask, *weights, **options)
    split = bool(options["rows_over"] or options["columns_over"])
    by_rows = n <= _BY_ROWS and not split
    # Rows that are copied a tile at a time are whole tiles long. The projections make them so, if they can.
    if not split and (padding := -n % (8 if by_rows and project is not None else 64)):
        pad = functools.partial(jnp.pad, pad_width=((0, 0), (0, padding), (0, padding)))
        mask = pad(jnp.ones(x.shape[:3], bool) if mask is None else mask)
        x = jnp.pad(x, ((0, 0), (0, padding), (0, padding), (0, 0)))
    if project is None:
        project = functools.partial(trimul_project.project, precision=precision, config=config)
    update = _batchable(
        functools.partial(
            _update,
            project=project,
            product=functools.partial(mosaic_product.product, by_rows=by_rows, config=config),
            output=functools.partial(trimul_output.output, precision=precision, config=config),
            by_rows=by_rows,
            peers=_peers(x, *weights, project=project, **options),
            **options,
        )
    )
    return update(x, mask, *weights)[:, :n, : x.shape[2] if split else n]


def _batchable(update: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`update(x, mask, *weights)` for vmap: operands have as many axes as a copy to shared memory can take.

    The pairs of equal weights become a batch; for several sets of weights there is a call each.
    """
    function = jax.custom_batching.custom_vmap(update)

    @function.def_vmap
    def _(size: int, mapped: Any, x: jax.Array, mask: jax.Array | None, *weights: Any) -> tuple[jax.Array, bool]:
        if any(jax.tree.leaves(mapped[2:])):
            arrays = (x, mask, *weights)
            leaves, tree = jax.tree.flatten(arrays)
            axes = jax.tree.leaves(mapped)

            def one(some: list[jax.Array]) -> jax.Array:
                given = iter(some)
                each = [next(given) if m else leaf for leaf, m in zip(leaves, axes, strict=True)]
                return function(*jax.tree.unflatten(tree, each))

            return jax.lax.map(one, [leaf for leaf, m in zip(leaves, axes, strict=True) if m]), True

        def fold(y: jax.Array, mapped: bool) -> jax.Array:
            y = y if mapped else jnp.broadcast_to(y, (size, *y.shape))
            return y.reshape(-1, *y.shape[2:])

        out = function(fold(x, mapped[0]), None if mask is None else fold(mask, mapped[1]), *weights)
        return out.reshape(size, -1, *out.shape[1:]), True

    return function


def _mosaic_projection(
    x: jax.Array, *arrays: Any, compute_dtype: DTypeLike, rows_over: AxisNames, columns_over: AxisNames, **_: Any
) -> Callable[..., tuple[jax.Array, jax.Array | None]] | None:
    """The projections for Hopper GPUs that serve a call, if any do."""
    b, rows, columns, c = x.shape
    w_in, w_gate = arrays[3], arrays[7]
    h = w_in.shape[2] // (_GROUPS if rows_over or columns_over else 1)
    operands: list[Any] = [
        jax.ShapeDtypeStruct((b, rows * columns, c), x.dtype),
        *(jax.ShapeDtypeStruct(shape, compute_dtype) for shape in ((c, 4, h), w_gate.shape)),
    ]
    if mosaic_project.unsupported(*operands) is None:
        return mosaic_project.project
    return mosaic_project_wide.project if mosaic_project_wide.unsupported(*operands) is None else None


def _peers(
    x: jax.Array,
    *weights: Any,
    project: Any,
    rows_over: AxisNames,
    columns_over: AxisNames,
    target: Target,
    **options: Any,
) -> Peers | None:
    """The GPUs that share the pairs, where the kernels can store to them what each needs."""
    names = (*rows_over, *columns_over)
    if not target.has_peers or len(names) != 1 or project is not mosaic_project.project or not _in_tiles(x):
        return None
    peers = Peers(axis=names[0], count=jax.lax.axis_size(names[0]))
    if x.shape[1] * x.shape[2] * peers.count < _STORED_FROM:
        return None
    h = weights[2].shape[2]
    all_at_once = dict(compute_dtype=options["compute_dtype"], rows_over=(), columns_over=())
    if (
        2 * h % (peers.count * mosaic_project.COLUMNS)
        or _mosaic_projection(x, None, *weights, **all_at_once) is not project
    ):
        return None
    return peers


def _unsupported_by_mosaic(
    x: jax.Array, *_: Any, compute_dtype: DTypeLike, rows_over: AxisNames, columns_over: AxisNames, **__: Any
) -> str | None:
    if (rows_over or columns_over) and not _in_tiles(x):
        return f"takes a part of the pairs in multiples of {_TILE}, not {x.shape[1:3]}"
    return mosaic_product.unsupported(compute_dtype)


_GROUPS = 2  # of hidden channels: one is on its way between devices while the other is multiplied
_SENDERS = 32  # multiprocessors that are left to what sends; 16 are too few
_STORED_FROM = 2048**2  # pairs, of which stores of the kernels to other GPUs are measured to be faster
_TILE = 256  # the largest of a product: pieces of so many rows and columns need not be put together


def _in_tiles(x: jax.Array) -> bool:
    return x.shape[1] % _TILE == 0 and x.shape[2] % _TILE == 0


def _backward(
    *arrays: Any,
    wanted: tuple[bool, ...],
    config: Any,
    target: Target,
    interpret: bool,
    **static: Any,
) -> list[Any]:
    """The gradients of the reference, of what a device has."""
    del config, target, interpret
    *operands, cotangent = arrays

    def of_wanted(*some: jax.Array) -> jax.Array:
        given = iter(some)
        return reference(*(next(given) if w else x for x, w in zip(operands, wanted, strict=True)), **static)

    found = iter(jax.vjp(of_wanted, *(x for x, w in zip(operands, wanted, strict=True) if w))[1](cotangent))
    return [next(found) if w else None for w in wanted]


_OP = Op(
    name="triangle_update",
    reference=reference,
    kernels=(
        Kernel(backend="mosaic", architectures=HOPPER, call=_mosaic, config=None, refuses=_unsupported_by_mosaic),
        Kernel(backend="triton", architectures=AMPERE_ON, call=_triton, config=Config),
    ),
    backward=(Backward(backend="xla", call=_backward),),
    sharding=Sharding(
        equation="b i j C, b i j, C, C, C P H, P H, H, H, C G, G, H C, C -> b i j C",
        over={"i": "rows_over", "j": "columns_over"},
    ),
)


def _update(
    x: jax.Array,
    mask: jax.Array | None,
    *weights: Any,
    project: Callable[..., tuple[jax.Array, Any]],
    product: Callable[..., jax.Array],
    output: Callable[..., jax.Array],
    by_rows: bool,
    peers: Peers | None = None,
    direction: Direction,
    gate_after: bool,
    epsilon: float,
    compute_dtype: DTypeLike,
    out_dtype: DTypeLike,
    rows_over: AxisNames,
    columns_over: AxisNames,
    target: Target,
    interpret: bool,
) -> jax.Array:
    """The update of x (B, N, N, C), with tensors of the compute dtype between its kernels.

    Args:
      project: normalises x and writes left, right and the gate, each once.
      product: sums over third positions.
      output: normalises the sums, gates and projects them.
      by_rows: whether the first two have the channels of a row side by side, (B, N, channels, N), and not
        (B, channels, N, N).
      peers: the GPUs that share the pairs, where the first two can store to them.
    """
    b, rows, columns, c = x.shape
    lead, size = (b * rows, columns) if by_rows else (b, rows * columns)
    by_channels = ByChannels.over(rows_over, columns_over)
    n, devices = rows * by_channels.grid[0], by_channels.devices
    dtypes = (compute_dtype if name.startswith("w_") else jnp.float32 for name in _WEIGHTS)
    converted: Any = (None if w is None else w.astype(dtype) for w, dtype in zip(weights, dtypes, strict=True))
    norm_scale, norm_bias, w_in, b_in, out_norm_scale, out_norm_bias, w_gate, b_gate, w_out, b_out = converted
    weighted = mask is not None and jnp.issubdtype(mask.dtype, jnp.floating)
    if mask is not None:
        mask = mask.astype(mask.dtype if weighted else compute_dtype).reshape(lead, size)
    bounds = trimul_bounds.bounds(
        mask if weighted else None, norm_scale, norm_bias, w_in, b_in, interpret=interpret
    )
    if weighted:
        bounds = by_channels.largest(bounds)
    scales = trimul_bounds.scales(jnp.unstack(jnp.max(bounds, axis=0)), compute_dtype)
    factors = jnp.stack([scales[0], jnp.float32(1.0), scales[1], jnp.float32(1.0)])[:, None]
    w_in = (w_in * factors).astype(compute_dtype)
    if b_in is not None:
        b_in = b_in * factors
    runs: dict[str, Any] = dict(target=target, interpret=interpret)
    # Sums of N products are as large as left and right.
    factor = 2.0 ** -(trimul_bounds.LOG2_LARGEST + math.ceil(math.log2(n)))
    project = functools.partial(project, x.reshape(lead, size, c), mask, norm_scale, norm_bias, epsilon=epsilon)
    product = functools.partial(product, incoming=direction == "incoming", factor=factor)

    def alone() -> tuple[list[jax.Array], Any]:
        sides, gate = project(w_in, b_in, w_gate, b_gate, **runs)
        sides = sides.reshape((b, n, -1, sides.shape[-1]) if by_rows else (b, -1, n, n))
        y = product(sides, channels=w_in.shape[2], **runs)
        return [y.reshape(lead, -1, y.shape[-1] if by_rows else size)], gate

    def with_others() -> tuple[list[jax.Array], Any]:
        """Groups of channels, one on its way while others are projected or multiplied; the gate stays here."""
        # Kernels that take every multiprocessor and what sends would wait for each other.
        beside = runs | dict(target=dataclasses.replace(target, num_cores=max(target.num_cores - _SENDERS, 1)))
        arrived, sums = [], []
        biases: Any = [None] * _GROUPS if b_in is None else by_channels.grouped(b_in, _GROUPS)
        for i, (w, bias) in enumerate(zip(by_channels.grouped(w_in, _GROUPS), biases, strict=True)):
            gates = (w_gate, b_gate) if i == _GROUPS - 1 else (w_gate[:, :0], None)
            sides, gate = project(w, bias, *gates, **(beside if i else runs))
            sides = sides.reshape(b, 2, -1, size)[:, :, : w.shape[2]].reshape(b, -1, size)
            arrived.append(by_channels.swap(sides, 1).reshape(-1, 2 * w.shape[2] // devices, rows, columns))
        for sides in arrived:
            whole = not _in_tiles(x)
            y = product(
                by_channels.joined(sides) if whole else sides,
                channels=sides.shape[1] // 2,
                pieces=(1, 1) if whole else by_channels.grid,
                **beside,
            )
            y = by_channels.pieces(y) if whole else y
            sums.append(by_channels.swap(y.reshape(b, -1, size), 1))
        if sum(y.shape[1] for y in sums) > w_in.shape[2]:
            sums = [jnp.concatenate(sums, axis=1)[:, : w_in.shape[2]]]
        return sums, gate

    def by_stores() -> tuple[list[jax.Array], Any]:
        """The projections store left and right where they are multiplied, the products sums where they belong."""
        biases = [None] if b_in is None else by_channels.grouped(b_in, 1)
        sides, gate = project(*by_channels.grouped(w_in, 1), *biases, w_gate, b_gate, peers=peers, **runs)
        each = w_in.shape[2] // devices
        sides = sides.reshape(-1, 2 * each, rows, columns)
        y = product(sides, channels=each, pieces=by_channels.grid, peers=peers, **runs)
        return [y.reshape(b, -1, size)], gate

    ys, gate = alone() if devices == 1 else with_others() if peers is None else by_stores()
    out = output(
        ys,
        gate,
        bounds,
        out_norm_scale,
        out_norm_bias,
        w_out,
        b_out,
        gate_after=gate_after,
        factor=factor,
        epsilon=epsilon,
        out_dtype=out_dtype,
        size=size,
        **runs,
    )
    return out.reshape(x.shape)


def _bounds(
    mask: jax.Array | None,
    norm_scale: jax.Array,
    norm_bias: jax.Array,
    w_in: jax.Array,
    b_in: jax.Array | None,
) -> jax.Array:
    """The bounds of `trimul_bounds` in plain XLA: (5,)."""
    w = jnp.abs(w_in[:, ::2].astype(jnp.float32))
    scaled, shifted = (jnp.abs(p.astype(jnp.float32))[:, None, None] * w for p in (norm_scale, norm_bias))
    bound = jnp.sqrt(len(w) * jnp.sum(jnp.square(scaled), axis=0)) + jnp.sum(shifted, axis=0)
    if b_in is not None:
        bound += jnp.abs(b_in[::2])
    factor = jnp.ones(1, jnp.float32)
    if mask is not None:
        size = jnp.abs(mask.astype(jnp.float32))
        factor = jnp.max(jnp.where(size < jnp.inf, size, 1.0), keepdims=True).ravel()
    return jnp.concatenate([jnp.max(bound, axis=1), jnp.max(w, axis=(0, 2)), factor])


def _check(
    x: Array,
    mask: Array | None,
    weights: tuple[Any, ...],
    direction: str,
    gate_after: bool,
    compute_dtype: DTypeLike,
    over: tuple[AxisNames, AxisNames],
) -> None:
    if direction not in _EQUATIONS:
        raise ValueError(f"{direction=} is unknown; expected one of {tuple(_EQUATIONS)}")
    _checks.check_float("x", x)
    grid = ByChannels.over(*over).grid
    if x.ndim < 3 or x.shape[-3] * grid[0] != x.shape[-2] * grid[1]:
        parts = "" if grid == (1, 1) else f", of which a device has one of {grid[0]} x {grid[1]} parts"
        raise ValueError(f"x has shape {x.shape}; expected (..., N, N, C){parts}")
    if mask is not None:
        floating = getattr(mask, "dtype", None) in _checks.FLOAT_DTYPES
        check = _checks.check_shape if floating else _checks.check_mask
        check("mask", mask, x.shape[:-1], "(..., N, N)")
    if jnp.dtype(compute_dtype) not in _checks.FLOAT_DTYPES:
        raise ValueError(f"{compute_dtype=} is not supported; expected float16, bfloat16 or float32")
    out_norm_scale = weights[4]
    _checks.check_float("out_norm_scale", out_norm_scale)
    _checks.check_rank("out_norm_scale", out_norm_scale, 1, "(H,)")
    (c,), (h,) = x.shape[-1:], out_norm_scale.shape
    g, gate_axis = (c, "C") if gate_after else (h, "H")
    expected = {
        "norm_scale": ((c,), "(C,)"),
        "norm_bias": ((c,), "(C,)"),
        "w_in": ((c, 4, h), "(C, 4, H)"),
        "b_in": ((4, h), "(4, H)"),
        "out_norm_scale": ((h,), "(H,)"),
        "out_norm_bias": ((h,), "(H,)"),
        "w_gate": ((c, g), f"(C, {gate_axis}) with {gate_after=}"),
        "b_gate": ((g,), f"({gate_axis},) with {gate_after=}"),
        "w_out": ((h, c), "(H, C)"),
        "b_out": ((c,), "(C,)"),
    }
    for name, weight in zip(_WEIGHTS, weights, strict=True):
        shape, axes = expected[name]
        if weight is not None or not name.startswith("b_"):
            _checks.check_float(name, weight)
            _checks.check_shape(name, weight, shape, axes)
