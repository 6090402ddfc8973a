"""The kernels that the triangle multiplicative update is made of, on one GPU and on several that share the pairs.

Bounds of left and right, projections, products over third positions, and the end of the update are a kernel each.
Mosaic has projections, products and an end for Hopper GPUs, and bounds for a JAX without Triton. Other kernels,
and those for sizes that Mosaic's do not serve, are Triton's, so that this lies above both backends. GPUs that
share the pairs exchange them by channels between kernels, or the kernels themselves store what they compute where
it is needed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from pallas_models import _jax
from pallas_models.kernels.common.channel_exchange import ByChannels
from pallas_models.kernels.common.trimul_scales import scales, sums_factor
from pallas_models.kernels.forms.trimul import Form, Output, Product, Projection
from pallas_models.kernels.mosaic import trimul_bounds as mosaic_bounds
from pallas_models.kernels.mosaic import trimul_output as mosaic_output
from pallas_models.kernels.mosaic import trimul_product as mosaic_product
from pallas_models.kernels.mosaic import trimul_project as mosaic_project
from pallas_models.kernels.mosaic import trimul_project_wide as mosaic_project_wide
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.schedules import trimul_slices
from pallas_models.kernels.schedules.trimul_kernels import Kernels, Project
from pallas_models.kernels.triton import trimul_bounds, trimul_output, trimul_product, trimul_project
from pallas_models.target import Target
from pallas_models.tuning import Chooser

_BY_ROWS = 2048  # the largest N at which channels of a row side by side are faster, measured on an H200
_GROUPS = 2  # of hidden channels: one is on its way between devices while the other is multiplied
_SENDERS = 32  # multiprocessors that are left to collectives; 16 are too few
_STORED_FROM = 2048**2  # pairs, from which on stores of the kernels to other GPUs are measured to be faster
ROW_TILE = 8, 64  # rows and columns of a tile of left and right in Mosaic's products
_TILE = 256  # the largest of a product: pieces of so many rows and columns need not be put together


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configs of three Triton kernels, or tables to ask first; None for installed tables and the heuristic."""

    project: trimul_project.Config | Chooser | None = None
    product: trimul_product.Config | Chooser | None = None
    output: trimul_output.Config | Chooser | None = None


def triton_kernels(config: Config | Chooser | None, *, by_rows: bool = False) -> Kernels:
    """Triton's kernels."""
    configs = config if isinstance(config, Config) else Config(project=config, product=config, output=config)
    return Kernels(
        bounds=trimul_bounds.bounds,
        project=functools.partial(trimul_project.project, config=configs.project),
        multiply=functools.partial(trimul_product.product, config=configs.product),
        finish=functools.partial(trimul_output.output, config=configs.output),
        by_rows=by_rows,
        norms_before=True,
    )


def mosaic_kernels(form: Form[Any], config: Chooser | None, target: Target, *, by_rows: bool) -> Kernels:
    """Bounds and products in Mosaic, and projections, if they serve, else Triton's; the end is Triton's."""
    kernels = triton_kernels(config, by_rows=by_rows)
    project = mosaic_projection(form, target, _GROUPS if form.is_split else 1)
    return dataclasses.replace(
        kernels,
        bounds=mosaic_bounds.bounds if _jax.since(0, 11) else kernels.bounds,  # JAX 0.10 does not lower it
        project=kernels.project if project is None else project,
        multiply=functools.partial(mosaic_product.product, config=config),
        # Products copy whole tiles. The projections fill them up, if they write row by row.
        tile=ROW_TILE if by_rows else (1, 1),
        norms_before=project is None,
    )


def triton(
    form: Form[jax.Array], *, config: Config | Chooser | None, target: Target, interpret: bool
) -> jax.Array:
    """The update in Triton kernels."""
    return _update(form, triton_kernels(config), target=target, interpret=interpret)


def unsupported(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why neither `triton` nor `mosaic` serves a call; None if one of them may."""
    del target
    if form.is_split and form.max_temporary_bytes is not None:
        return (
            f"has max_temporary_bytes={form.max_temporary_bytes} for a device with all pairs, not a part of them"
        )
    return None


def unsupported_by_mosaic(form: Form[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `mosaic` does not serve a call; None if it does."""
    if form.is_split and not _in_tiles(*form.x.shape[1:3]):
        return f"takes a part of the pairs in multiples of {_TILE}, not {form.x.shape[1:3]}"
    return (
        unsupported(form, target)
        or mosaic_product.unsupported(form.compute_dtype)
        or (None if _jax.has_triton() else unsupported_without_triton(form, target))
    )


def unsupported_without_triton(form: Form[Any], target: Target) -> str | None:
    """Why Mosaic's kernels do not serve a call without some of Triton's; None if they do."""
    missing = f"is Triton's, which JAX {jax.__version__} does not have"
    if form.is_split:
        return f"has a part of the pairs, whose end {missing}"
    if mosaic_projection(form, target, 1) is None:
        return f"has {form.x.shape[3]} channels and {form.hidden} hidden channels, whose projection {missing}"
    return mosaic_output.unsupported(form)


def mosaic(form: Form[jax.Array], *, config: Chooser | None, target: Target, interpret: bool) -> jax.Array:
    """The update with products for Hopper GPUs, and projections and an end where they serve, else Triton's."""
    n, peers = form.x.shape[1], _peers(form, target)
    by_rows = not form.is_split and (n <= _BY_ROWS or n % ROW_TILE[1] > 0)
    kernels = mosaic_kernels(form, config, target, by_rows=by_rows)
    if peers is not None:
        kernels = dataclasses.replace(
            kernels,
            project=functools.partial(mosaic_project.project, peers=peers),
            multiply=functools.partial(mosaic_product.product, config=config, peers=peers),
            store_to_peers=True,
        )
    if not form.is_split and mosaic_output.unsupported(form) is None:
        kernels = dataclasses.replace(kernels, finish_with_gate=mosaic_output.output)

    def update(*operands: Any) -> jax.Array:
        return _update(form.of(operands), kernels, target=target, interpret=interpret)

    return batchable(update)(*form.operands)


def batchable(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update(x, mask, *weights)` for vmap: operands have as many axes as a copy to shared memory can take.

    The pairs of equal weights become a batch; for several sets of weights there is a call each.
    """
    function = jax.custom_batching.custom_vmap(update)

    @function.def_vmap
    def _(size: int, mapped: Any, x: jax.Array, mask: jax.Array | None, *weights: Any) -> tuple[Any, Any]:
        def all_mapped(out: Any) -> tuple[Any, Any]:
            return out, jax.tree.map(lambda _: True, out)

        if any(jax.tree.leaves(mapped[2:])):
            arrays = (x, mask, *weights)
            leaves, tree = jax.tree.flatten(arrays)
            axes = jax.tree.leaves(mapped)

            def one(some: list[jax.Array]) -> Any:
                given = iter(some)
                each = [next(given) if m else leaf for leaf, m in zip(leaves, axes, strict=True)]
                return function(*jax.tree.unflatten(tree, each))

            return all_mapped(jax.lax.map(one, [leaf for leaf, m in zip(leaves, axes, strict=True) if m]))

        def fold(y: jax.Array, mapped: bool) -> jax.Array:
            y = y if mapped else jnp.broadcast_to(y, (size, *y.shape))
            return y.reshape(-1, *y.shape[2:])

        out = function(fold(x, mapped[0]), None if mask is None else fold(mask, mapped[1]), *weights)
        return all_mapped(jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), out))

    return function


def abstract_projection(form: Form[Any], groups: int = 1) -> Projection[jax.ShapeDtypeStruct]:
    """The projections of an update, for a group of its hidden channels."""
    b, rows, columns, c = form.x.shape
    shaped = jax.ShapeDtypeStruct
    return Projection(
        x=shaped((b, rows * columns, c), form.x.dtype),
        mask=None,
        norm_scale=form.norm_scale,
        norm_bias=form.norm_bias,
        w=shaped((c, 4, form.hidden // groups), form.compute_dtype),
        bias=None,
        w_gate=shaped(form.w_gate.shape, form.compute_dtype),
        b_gate=None,
        epsilon=form.epsilon,
        precision=form.precision,
    )


def mosaic_projection(form: Form[Any], target: Target, groups: int) -> Project | None:
    """Mosaic's projections that serve an update, a group of its hidden channels at a time; None if none do."""
    projection = abstract_projection(form, groups)
    modules = mosaic_project, mosaic_project_wide
    serving = (module.project for module in modules if module.unsupported(projection, target) is None)
    return next(serving, None)


def _peers(form: Form[Any], target: Target) -> Peers | None:
    """The GPUs that share the pairs, where projections and products can store to them and that is faster."""
    names = (*form.rows_over, *form.columns_over)
    if not target.has_peers or len(names) != 1 or not _in_tiles(*form.x.shape[1:3]):
        return None
    peers = Peers(axis=names[0], count=jax.lax.axis_size(names[0]))
    if form.x.shape[1] * form.x.shape[2] * peers.count < _STORED_FROM:
        return None
    if 2 * form.hidden % (peers.count * mosaic_project.COLUMNS):
        return None
    serving = {mosaic_projection(form, target, groups) for groups in (1, _GROUPS)}
    return peers if serving == {mosaic_project.project} else None


def _in_tiles(rows: int, columns: int) -> bool:
    """Whether tiles of every product divide pieces of so many rows and columns."""
    return rows % _TILE == 0 and columns % _TILE == 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What all schedules share: an update whose weights are converted and scaled.

    Attributes:
      form: the call with its matrices in the compute dtype, and the other weights in float32.
      by_channels: how the devices share the pairs.
      bounds: of left and right.
      scales: of left and of right, which follow from the bounds.
      projection: left, right and the gate of all hidden channels, scaled.
      target: the GPU.
      interpret: whether an interpreter runs the kernels.
    """

    form: Form[jax.Array]
    kernels: Kernels
    by_channels: ByChannels
    bounds: jax.Array
    scales: tuple[jax.Array, jax.Array]
    projection: Projection[jax.Array]
    target: Target
    interpret: bool

    @classmethod
    def of(cls, form: Form[jax.Array], kernels: Kernels, *, target: Target, interpret: bool) -> Self:
        """The update of x (B, N, N, C)."""
        b, rows, columns, c = form.x.shape
        lead, of_matrix, size = (b * rows, rows, columns) if kernels.by_rows else (b, 1, rows * columns)
        whole_tiles = (n + -n % t for n, t in zip((of_matrix, size), kernels.tile, strict=True))
        padded_rows, padded_size = form.padded or whole_tiles
        by_channels = ByChannels.over(form.rows_over, form.columns_over)
        form = _converted(form)
        mask, factors = form.mask, form.factors
        if mask is not None:
            mask = mask.astype(mask.dtype if factors is not None else form.compute_dtype).reshape(lead, size)
        bounds = kernels.bounds(
            None if factors is None else mask,
            form.norm_scale,
            form.norm_bias,
            form.w_in,
            form.b_in,
            interpret=interpret,
        )
        if factors is not None:
            bounds = by_channels.largest(bounds)
        left, right = scales(jnp.unstack(jnp.max(bounds, axis=0)), form.compute_dtype)
        by_projection = jnp.stack([left, jnp.float32(1.0), right, jnp.float32(1.0)])[:, None]
        w_in, b_in = (form.w_in * by_projection).astype(form.compute_dtype), form.b_in
        if b_in is not None:
            b_in = b_in * by_projection
        return cls(
            form=form,
            kernels=kernels,
            by_channels=by_channels,
            bounds=bounds,
            scales=(left, right),
            projection=Projection(
                x=form.x.reshape(lead, size, c),
                mask=mask,
                norm_scale=form.norm_scale,
                norm_bias=form.norm_bias,
                w=w_in,
                bias=b_in,
                w_gate=form.w_gate,
                b_gate=form.b_gate,
                epsilon=form.epsilon,
                precision=form.precision,
                rows=of_matrix,
                padded=None if (padded_rows, padded_size) == (of_matrix, size) else (padded_rows, padded_size),
            ),
            target=target,
            interpret=interpret,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, and the rows and columns that this device has."""
        b, rows, columns, _ = self.form.x.shape
        return b, rows, columns

    @property
    def factor(self) -> float:
        """The factor of the sums over third positions."""
        return sums_factor(self.form.x.shape[1] * self.by_channels.grid[0])

    def end(self, ys: Sequence[jax.Array], gate: jax.Array | None) -> Output[jax.Array]:
        """The end of the update, from the sums over third positions and the gate, if that was computed before."""
        form, projection = self.form, self.projection
        return Output(
            ys=tuple(ys),
            gate=gate,
            bounds=self.bounds,
            scale=form.out_norm_scale,
            shift=form.out_norm_bias,
            w=form.w_out,
            bias=form.b_out,
            gate_after=form.gate_after,
            factor=self.factor,
            epsilon=form.epsilon,
            precision=form.precision,
            out_dtype=form.out_dtype,
            size=projection.x.shape[1],
            rows=(projection.rows, projection.padded_rows),
        )

    def project(
        self, projection: Projection[jax.Array], target: Target | None = None
    ) -> tuple[Any, jax.Array | None]:
        """Left and right, and the gate; None for what has no channels."""
        return self.kernels.project(projection, target=target or self.target, interpret=self.interpret)

    def multiply(
        self, sides: jax.Array, channels: int, pieces: tuple[int, int] = (1, 1), target: Target | None = None
    ) -> jax.Array:
        """The sums over third positions."""
        incoming = self.form.direction == "incoming"
        product = Product(
            sides=sides,
            channels=channels,
            transpose_left=incoming,
            transpose_right=not incoming,
            factor=self.factor,
            precision=self.projection.precision,
            pieces=pieces,
            by_rows=self.kernels.by_rows,
        )
        return self.kernels.multiply(product, target=target or self.target, interpret=self.interpret)

    def finish(self, output: Output[jax.Array], gating: Projection[jax.Array]) -> jax.Array:
        """The result for the items of an `end`, whose gate `gating` computes, of x, if nothing did before."""
        run, output = self.kernels.finish, output.replace(residual=gating.x if self.form.residual else None)
        if output.gate is None:
            assert self.kernels.finish_with_gate is not None
            run = functools.partial(self.kernels.finish_with_gate, gating=gating)
        return run(output, target=self.target, interpret=self.interpret)

    def alone(self) -> tuple[list[jax.Array], jax.Array | None]:
        """The sums and the gate where this device has all pairs."""
        y, gate = self.sums(self.projection)
        return [y.reshape(*self.items(y), -1)], gate

    def sums(self, projection: Projection[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        """The sums of the hidden channels of a projection, (B, rows, H, columns) or (B, H, N, N); and the gate."""
        b, n, _ = self.shape
        if self.kernels.finish_with_gate is not None:
            projection = _without_gate(projection)
        sides, gate = self.project(projection)
        matrices = (b, projection.padded_rows, -1, sides.shape[-1]) if self.kernels.by_rows else (b, -1, n, n)
        return self.multiply(sides.reshape(matrices), projection.hidden), gate

    def items(self, y: jax.Array) -> tuple[int, int]:
        """The numbers of items and of channels of the sums."""
        b, *sizes = y.shape
        return (b * sizes[0], sizes[1]) if self.kernels.by_rows else (b, sizes[0])

    def in_slices(self, slices: trimul_slices.Slices) -> jax.Array:
        """The result, for a group of hidden channels and then for some rows at a time."""
        (b, n, _), whole, by_rows = self.shape, self.projection, self.kernels.by_rows

        def sums_of(take: trimul_slices.Take) -> jax.Array:
            bias = None if whole.bias is None else take(whole.bias, -1)
            return self.sums(_without_gate(whole).replace(w=take(whole.w, -1), bias=bias))[0]

        def end_of(take: trimul_slices.Take) -> jax.Array:
            x = take(self.form.x, 1)
            rows = x.shape[1]
            of_y = take(y, 1) if by_rows else take(y.reshape(b, -1, n * n), 2, n)
            kept, size = (rows, n) if by_rows else (1, rows * n)
            padded = (of_y.shape[1], of_y.shape[3]) if by_rows else (1, size)
            gate = whole.replace(
                x=x.reshape(b * kept, size, -1),
                mask=None,
                w=whole.w[:, :, :0],
                bias=None,
                rows=kept,
                padded=None if padded == (kept, size) else padded,
            )
            ys = of_y.reshape(b * padded[0], -1, padded[1])
            known = None if self.kernels.finish_with_gate is not None else self.project(gate)[1]
            end = self.end([ys], known).replace(rows=(kept, padded[0]), size=size)
            return self.finish(end, gate).reshape(x.shape)

        y = trimul_slices.in_parts(whole.hidden, slices.channels, 2 if by_rows else 1, sums_of)
        return trimul_slices.in_parts(n, slices.rows, 1, end_of)

    def with_others(self) -> tuple[list[jax.Array], jax.Array | None]:
        """The sums in groups of channels, one on its way while others are projected or multiplied; and the gate.

        Devices swap left and right, and then their sums, and keep the gate.
        """
        (b, rows, columns), by_channels, projection = self.shape, self.by_channels, self.projection
        size, in_tiles = rows * columns, _in_tiles(rows, columns)
        # A kernel that takes every multiprocessor and a collective would wait for each other.
        beside = dataclasses.replace(self.target, num_cores=max(self.target.num_cores - _SENDERS, 1))
        arrived, sums, gate = [], [], None
        for i, group in enumerate(self.grouped(_GROUPS)):
            if i < _GROUPS - 1:  # the gate comes with the last group
                group = _without_gate(group)
            sides, gate = self.project(group, beside if i else self.target)
            sides = sides.reshape(b, 2, -1, size)[:, :, : group.hidden].reshape(b, -1, size)
            sides = by_channels.swap(sides, 1)
            arrived.append(sides.reshape(-1, 2 * group.hidden // by_channels.devices, rows, columns))
        for sides in arrived:
            channels = sides.shape[1] // 2
            if in_tiles:
                y = self.multiply(sides, channels, by_channels.grid, beside)
            else:
                y = by_channels.pieces(self.multiply(by_channels.joined(sides), channels, target=beside))
            sums.append(by_channels.swap(y.reshape(b, -1, size), 1))
        if sum(y.shape[1] for y in sums) > projection.hidden:
            sums = [jnp.concatenate(sums, axis=1)[:, : projection.hidden]]
        return sums, gate

    def by_stores(self) -> tuple[list[jax.Array], jax.Array | None]:
        """The sums and the gate, where kernels store left, right and the sums to the devices that need them."""
        (b, rows, columns), by_channels = self.shape, self.by_channels
        (projection,) = self.grouped(1)
        sides, gate = self.project(projection)
        each = projection.hidden // by_channels.devices
        y = self.multiply(sides.reshape(-1, 2 * each, rows, columns), each, by_channels.grid)
        return [y.reshape(b, -1, rows * columns)], gate

    def grouped(self, groups: int) -> list[Projection[jax.Array]]:
        """The projections in groups of channels, sorted by the devices that multiply them."""
        w, bias = self.projection.w, self.projection.bias
        biases: Sequence[jax.Array | None] = [None] * groups
        if bias is not None:
            biases = self.by_channels.grouped(bias, groups)
        ws = self.by_channels.grouped(w, groups)
        return [self.projection.replace(w=w, bias=bias) for w, bias in zip(ws, biases, strict=True)]


def _update(form: Form[jax.Array], kernels: Kernels, *, target: Target, interpret: bool) -> jax.Array:
    """The update of x (B, N, N, C), with tensors of the compute dtype between its kernels."""
    update = Update.of(form, kernels, target=target, interpret=interpret)
    if slices := _slices(update):
        return update.in_slices(slices)
    if update.by_channels.devices == 1:
        ys, gate = update.alone()
    elif kernels.store_to_peers:
        ys, gate = update.by_stores()
    else:
        ys, gate = update.with_others()
    return update.finish(update.end(ys, gate), update.projection).reshape(form.x.shape)


def _without_gate(projection: Projection[jax.Array]) -> Projection[jax.Array]:
    """The projections of left and right alone."""
    return projection.replace(w_gate=projection.w_gate[:, :0], b_gate=None)


def _slices(update: Update) -> trimul_slices.Slices | None:
    """The slices that an update has to be computed in; None if it may take as much memory as it does."""
    form, projection = update.form, update.projection
    if form.max_temporary_bytes is None:
        return None
    b, n, _, c = form.x.shape
    by_rows, mask = update.kernels.by_rows, projection.mask
    padded = projection.result
    sizes = trimul_slices.Sizes(
        batch=b,
        n=n,
        padded=(projection.padded_rows, padded[1]) if by_rows else (n, n),
        channels=c,
        hidden=form.hidden,
        gates=0 if update.kernels.finish_with_gate is not None else projection.gates,
        itemsizes=(
            form.x.dtype.itemsize,
            form.compute_dtype.itemsize,
            form.out_dtype.itemsize,
            form.compute_dtype.itemsize if mask is None else 2 * mask.dtype.itemsize,
        ),
        normed=update.kernels.norms_before and not trimul_project.is_narrow(c),
    )
    return sizes.slices(form.max_temporary_bytes)


def _converted(form: Form[jax.Array]) -> Form[jax.Array]:
    """The call with its matrices in the compute dtype, and the other weights in float32."""

    def converted(name: str, w: jax.Array | None) -> jax.Array | None:
        return None if w is None else w.astype(form.compute_dtype if name.startswith("w_") else jnp.float32)

    return form.replace(**{name: converted(name, getattr(form, name)) for name in Form.WEIGHTS})
