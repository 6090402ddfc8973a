"""Projections of the triangle multiplicative update with their gates, for Hopper GPUs and up to 128 channels.

CTAs stay on their multiprocessor with all of the weights in shared memory. One warpgroup of each normalises 64
positions at a time while the next are copied; the others share their products, gate them and write them channel by
channel, which is how the product over third positions reads them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.steps import shared_step
from pallas_models.kernels.forms.trimul import Projection
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.channels import ROWS, along_rows, mean, same_rows
from pallas_models.kernels.mosaic.common.interpreter import check_interpreted_sizes, num_cores
from pallas_models.kernels.mosaic.common.launch import Refs, launch
from pallas_models.kernels.mosaic.common.memory import load, row_bytes_of
from pallas_models.kernels.mosaic.common.peers import Peers
from pallas_models.kernels.mosaic.common.products import with_sums
from pallas_models.kernels.mosaic.common.row_copies import copy_rows
from pallas_models.kernels.mosaic.common.shared_memory import Buffer, available, num_bytes
from pallas_models.kernels.mosaic.common.warp_specialization import Role, specialize
from pallas_models.kernels.mosaic.trimul_project_parts import (
    COLUMNS,
    Gating,
    Products,
    Tiles,
    arranged,
    arranged_biases,
    staging,
    unsupported_by_both,
    whole_mask,
)
from pallas_models.target import Target

_MULTIPLIERS = 3  # warpgroups that multiply
_OTHERS = 3840  # bytes of shared memory that barriers, sums over rows and alignment take


def unsupported(form: Projection[jax.ShapeDtypeStruct], target: Target) -> str | None:
    """Why `project` does not serve a call; None if it does."""
    c, h = form.x.shape[2], form.hidden
    if reason := unsupported_by_both(form):
        return reason
    if c not in (64, 96, 128) or h % (COLUMNS // 2):
        return f"takes 64, 96 or 128 channels and hidden channels in multiples of {COLUMNS // 2}, not {c} and {h}"
    if _buffers(form, target) is None:
        weights = f"weights of {c} channels for {2 * h} projections and {form.gates} gates"
        return f"does not fit {weights} into shared memory"
    return None


def _buffers(
    form: Projection[jax.Array] | Projection[jax.ShapeDtypeStruct], target: Target
) -> dict[str, Buffer] | None:
    """The shared memory of a CTA, with as many columns on their way out as there is room for; None if none are."""
    c, piece, x_dtype, dtype = form.x.shape[2], _piece(form.x.shape[2]), form.x.dtype, form.w.dtype
    float32 = jnp.dtype(jnp.float32)
    buffers = dict(
        x_smem=Buffer((c // piece, ROWS, piece), x_dtype, row_bytes_of(piece, x_dtype)),
        z_smem=Buffer((ROWS, c), dtype, piece * dtype.itemsize),
        factor_smem=Buffer((ROWS,), float32),
        norm_smem=Buffer((2, c), float32),
        w_smem=Buffer((Products.of(form).count, c, 2 * COLUMNS), dtype, piece * dtype.itemsize),
    )
    room = available(target) - _OTHERS - num_bytes(buffers.values())
    stagings = (staging(_MULTIPLIERS, columns, dtype) for columns in (COLUMNS, COLUMNS // 2))
    out_smem = next((buffer for buffer in stagings if buffer.num_bytes <= room), None)
    return None if out_smem is None else buffers | dict(out_smem=out_smem)


def _piece(c: int) -> int:
    """Channels of a row of a tile of shared memory."""
    return 64 if c % 64 == 0 else 32


@shared_step
def project(
    form: Projection[jax.Array], *, peers: Peers | None = None, target: Target, interpret: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """Left and right, and the gate, in the dtype of the weights.

    With `peers` left and right are split by channels into as many parts as there are GPUs, and part i is stored on
    GPU i. The results are the parts that all GPUs stored here, one after another.

    Returns:
      (B', 2 H, M'), left and right, masked, or None for H = 0; and the gate, (B', G', M'), G' >= G, or None for
      G = 0. M' is M in whole `ROWS`, and left and right are 0 beyond M.
    """
    size, c = form.x.shape[1:]
    if interpret:
        check_interpreted_sizes(positions=(size, ROWS))
    products, tiles, buffers = Products.of(form), Tiles.of(form), _buffers(form, target)
    assert buffers is not None
    mask = whole_mask(form)
    operands = dict(
        x=form.x,
        mask=mask,
        norm_scale=form.norm_scale,
        norm_bias=form.norm_bias,
        w=jnp.moveaxis(arranged(form.w, form.w_gate), -2, 0),
        b=arranged_biases(form),
    )
    num_ctas = min(num_cores(target, interpret), tiles.count)
    pieces = c // _piece(c)
    results = launch(
        _Kernel(products, tiles, num_ctas, form.epsilon, peers),
        operands,
        products.out_types(form),
        dict(
            **{name: buffer.scratch_type for name, buffer in buffers.items()},
            x_full=plgpu.Barrier(num_arrivals=pieces),
            z_full=plgpu.Barrier(),
            z_free=plgpu.Barrier(num_arrivals=_MULTIPLIERS),
            weights_full=plgpu.Barrier(num_arrivals=3),
            **({} if peers is None else peers.scratch_types),
        ),
        name="trimul_project",
        num_ctas=num_ctas,
        num_warpgroups=_MULTIPLIERS + 1,
        interpret=interpret,
        unsafe_no_auto_barriers=True,
    )
    return products.split(results)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kernel:
    """The body of the kernel."""

    products: Products
    tiles: Tiles
    num_ctas: int
    epsilon: float
    peers: Peers | None

    def __call__(self, refs: Refs) -> None:
        warpgroup, cta = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("cta")
        steps = jax.lax.div(self.tiles.count - cta + self.num_ctas - 1, self.num_ctas)
        walk = _Walk(self, refs, cta, steps)
        specialize(
            Role(range(_MULTIPLIERS, _MULTIPLIERS + 1), 200, lambda _: _Normalizer(walk).run()),
            Role(range(_MULTIPLIERS), 104, lambda own: _Multiplier(walk, own).run()),
            warpgroup=warpgroup,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Walk:
    """The tiles of a CTA, one a step: every `num_ctas`-th."""

    kernel: _Kernel
    refs: Refs
    cta: jax.Array
    steps: jax.Array

    def place(self, step: jax.Array) -> tuple[jax.Array, pl.Slice]:
        """Where the tile of a step is."""
        return self.kernel.tiles.place(self.cta + step * self.kernel.num_ctas)


@dataclasses.dataclass(frozen=True, slots=True)
class _Normalizer:
    """The warpgroup that normalises the positions of a step, while the positions of the next one are copied."""

    walk: _Walk

    @property
    def refs(self) -> Refs:
        return self.walk.refs

    @property
    def piece(self) -> int:
        """Channels in a piece of x."""
        return int(self.refs.x_smem.shape[2])

    @property
    def pieces(self) -> list[pl.Slice]:
        """The channels of all pieces of x."""
        return [pl.Slice(i, self.piece) for i in range(0, self.refs.z_smem.shape[1], self.piece)]

    def run(self) -> None:
        """Copies the weights, and normalises the positions of all steps."""
        refs = self.refs
        plgpu.copy_gmem_to_smem(refs.norm_scale, refs.norm_smem.at[0], refs.weights_full)
        plgpu.copy_gmem_to_smem(refs.norm_bias, refs.norm_smem.at[1], refs.weights_full)
        plgpu.copy_gmem_to_smem(refs.w, refs.w_smem, refs.weights_full)
        self.copy(jnp.int32(0))
        xs = self.read()
        plgpu.commit_smem()  # all have read
        self.copy(jnp.int32(1))
        plgpu.barrier_wait(refs.weights_full)
        jax.lax.fori_loop(0, self.walk.steps, self.step, (xs, self.fetch_mask(jnp.int32(0))))
        plgpu.barrier_wait(refs.x_full)  # no copy may arrive after the end, and no round be left
        plgpu.barrier_wait(refs.z_free)

    def copy(self, step: jax.Array) -> None:
        """Starts copies of the positions of a step."""
        item, rows = self.walk.place(step)
        item = self.walk.kernel.tiles.source(item)
        row_bytes = row_bytes_of(self.piece, self.refs.x.dtype)
        for i, channels in enumerate(self.pieces):
            slot, full = self.refs.x_smem.at[i], self.refs.x_full
            copy_rows(self.refs.x, item, rows, channels, slot, full, row_bytes=row_bytes)

    def read(self) -> list[jax.Array]:
        """The positions that were copied, piece by piece."""
        plgpu.barrier_wait(self.refs.x_full)
        return [load(self.refs.x_smem.at[i], plgpu.Layout.WGMMA) for i in range(len(self.pieces))]

    def fetch_mask(self, step: jax.Array) -> jax.Array | None:
        """The mask of a step."""
        if self.refs.mask is None:
            return None
        item, rows = self.walk.place(step)
        return load(self.refs.mask.at[item, rows], plgpu.Layout.WGMMA.reduce(1))

    def step(
        self, step: jax.Array, carry: tuple[list[jax.Array], jax.Array | None]
    ) -> tuple[list[jax.Array], jax.Array | None]:
        """Normalises positions, given with their mask, reads the next ones, and has those after them copied."""
        refs, (xs, factor) = self.refs, carry
        following = self.fetch_mask(step + 1)
        if factor is not None:
            factor = factor.astype(jnp.float32)
        zs = self.normalized(xs, factor)
        xs = self.read()
        plgpu.commit_smem()  # all have read
        self.copy(step + 2)

        @pl.when(step > 0)
        def _() -> None:
            plgpu.barrier_wait(refs.z_free)

        for channels, z in zip(self.pieces, zs, strict=True):
            refs.z_smem[:, channels] = z
        if factor is not None:
            refs.factor_smem[...] = factor
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.z_full)
        return xs, following

    def normalized(self, xs: list[jax.Array], factor: jax.Array | None) -> list[jax.Array]:
        """The layer norm of positions, finite where their factor of the mask is 0."""
        c, piece = self.refs.z_smem.shape[1], self.piece
        xs = [x.astype(jnp.float32) for x in xs]
        center = along_rows(mean(xs, c), piece)
        ds = [x - center for x in xs]
        inverse = jax.lax.rsqrt(mean([d * d for d in ds], c) + self.walk.kernel.epsilon)
        if factor is not None:  # 0 times what is not finite would be NaN
            kept = (factor != 0.0) | (inverse > 0.0)
            inverse = jnp.where(kept, inverse, 0.0)
            ds = [jnp.where(along_rows(kept, piece), d, 0.0) for d in ds]
        inverse = along_rows(inverse, piece)
        return [
            (d * inverse * self.vector(0, channels) + self.vector(1, channels)).astype(self.refs.z_smem.dtype)
            for d, channels in zip(ds, self.pieces, strict=True)
        ]

    def vector(self, i: int, channels: pl.Slice) -> jax.Array:
        """The scale (0) or the bias (1) of the norm, equal for all positions."""
        return same_rows(self.refs.norm_smem.at[i, channels])


@dataclasses.dataclass(frozen=True, slots=True)
class _Multiplier:
    """One of the warpgroups that share the products of each step."""

    walk: _Walk
    warpgroup: jax.Array

    def run(self) -> None:
        """Computes this warpgroup's products of all steps, and waits until they are stored."""
        refs, peers = self.walk.refs, self.walk.kernel.peers
        plgpu.barrier_wait(refs.weights_full)
        pl.loop(0, self.walk.steps)(self.step)
        if peers is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        else:
            peers.finish(refs, storing=_MULTIPLIERS, waits=self.warpgroup == 0)

    def step(self, step: jax.Array) -> None:
        """Computes this warpgroup's products of a step."""
        refs, kernel = self.walk.refs, self.walk.kernel
        num_products, place = kernel.products.count, self.walk.place(step)
        gating = Gating(refs, refs.out_smem.at[self.warpgroup], kernel.products, kernel.peers)
        # Products go round; where a step ends with one of them, the next one goes on.
        first = jax.lax.rem(self.warpgroup + step * (-num_products % _MULTIPLIERS), _MULTIPLIERS)
        count = jax.lax.div(num_products - first + _MULTIPLIERS - 1, _MULTIPLIERS)
        plgpu.barrier_wait(refs.z_full)
        factor = None
        if refs.mask is not None:
            factor = load(refs.factor_smem, plgpu.Layout.WGMMA.reduce(1))

        def masked(side: jax.Array) -> jax.Array:
            return side if factor is None else side * along_rows(factor, COLUMNS)

        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            j = first + i * _MULTIPLIERS
            y = self.product(j)

            @pl.when(i == count - 1)
            def _() -> None:
                plgpu.barrier_arrive(refs.z_free)

            if refs.b is not None:
                y += same_rows(refs.b.at[j])
            gating.finish(y, j, place, masked)

        @pl.when(count == 0)
        def _() -> None:
            plgpu.barrier_arrive(refs.z_free)

    def product(self, j: jax.Array) -> jax.Array:
        """Product j of the normalised positions and the weights."""
        refs = self.walk.refs

        def compute(sums: Ref) -> jax.Array:
            plgpu.wgmma(sums, refs.z_smem, refs.w_smem.at[j])
            plgpu.wgmma_wait(0)
            return sums[...]

        return with_sums(compute, (ROWS, 2 * COLUMNS))
