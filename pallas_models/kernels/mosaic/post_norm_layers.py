"""All layers of a post-norm encoder for the tokens of a short sentence, in one cluster of CTAs of a Hopper GPU.

Each CTA has one head of attention and a share of the hidden values, and streams the weights of these, so that a
layer waits for no launch. Activations lie transposed, (features, tokens): weights are the left operand of the
tensor cores, which want 64 rows of it, and tokens the right one. What a CTA adds to all features it sends to the
CTAs that own them; these send sums and moments to all, and every CTA normalises everything itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.mlir import ir

from pallas_models.kernels._common import Backend, Ref, exponents, lowest_score
from pallas_models.kernels.mosaic._common import activate, load, plgpu, tiled
from pallas_models.kernels.mosaic._launch import Refs, launch
from pallas_models.kernels.mosaic._ring import Ring
from pallas_models.target import Target

_utils = Backend("jax.experimental.mosaic.gpu.utils")
_copies = Backend("jax.experimental.mosaic.gpu.launch_context")
_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")
_wgmma = Backend("jax.experimental.mosaic.gpu.wgmma")

_TOKENS = 16
_HEAD_DIM = 32  # features of a CTA
_MOST_CTAS = 12  # of a cluster, whose shared memory has room for what all of them send
_MOST_LAYERS = 12  # whose addresses and descriptors of copies a kernel takes as arguments
_TILE = 32  # tokens that a tile of shared memory has room for
_BLOCK = 64  # steps of a contraction in a slot of the ring
_WIDE = 128  # columns of weights in a slot, half of which are those of a warpgroup
_ROW_BYTES = 64
_STAGES = 7
_CONSUMERS = 2
VECTORS = ("bias_qkv", "bias_out", "bias_down", "bias_up", "scale_out", "offset_out", "scale", "offset")


_PITCH = 10  # floats of a row of 8 tokens: as many rows as a warp has lanes lie in different banks
_ROW = _HEAD_DIM * _PITCH  # numbers of 32 features of 8 tokens


def _values() -> Any:
    """Layout of 32 features of 8 tokens in a warpgroup: a lane for each feature, two tokens for each warp."""
    return _arrays.TiledLayout(_arrays.Tiling(((32, 8), (32, 2))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _asm(code: str, constraints: str, *operands: Any, result: str = "void") -> Any:
    kind = ir.Type.parse(f"!llvm.{result}" if result == "void" else result)
    return _utils.llvm.inline_asm(kind, list(operands), code, constraints, has_side_effects=True)


def _i32(value: int) -> Any:
    return _utils.c(value, ir.IntegerType.get_signless(32))


def _start(_: Any, barriers: Any) -> None:
    _asm(
        """
        {
            .reg .pred p;
            setp.eq.u32 p, $1, 0;
            @p mbarrier.init.shared::cta.b64 [$0], 1;
            @p mbarrier.init.shared::cta.b64 [$0 + 8], 1;
            @p mbarrier.init.shared::cta.b64 [$0 + 16], 1;
            @p fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.release.aligned;
            barrier.cluster.wait.acquire.aligned;
        }""",
        "r,r",
        _utils.memref_ptr(barriers),
        _utils.thread_idx(),
    )


def _meet(_: Any) -> None:
    _asm("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", "")


def _expect(size: int) -> Callable[..., None]:
    def expect(_: Any, barrier: Any) -> None:
        _asm(
            f"""
            {{
                .reg .pred p;
                setp.eq.u32 p, $1, 0;
                @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};
            }}""",
            "r,r",
            _utils.memref_ptr(barrier),
            _utils.thread_idx(),
        )

    return expect


def _send(count: int, size: int, stride: int) -> Callable[..., None]:
    """Sends `size` bytes each to some CTAs, by a few threads of each warp: a warp issues one copy after another."""

    def send(_: Any, source: Any, there: Any, barrier: Any, *scalars: Any) -> None:
        first, step_two = (x.registers.item() for x in scalars)
        arith = _utils.arith
        thread = arith.remui(_utils.thread_idx(), _i32(128))
        index = arith.addi(arith.divui(thread, _i32(32)), arith.muli(arith.remui(thread, _i32(32)), _i32(4)))
        two, one = arith.divui(index, _i32(2)), arith.remui(index, _i32(2))
        peer = arith.addi(first, arith.addi(arith.muli(two, step_two), one))
        _asm(
            f"""
            {{
                .reg .pred p;
                .reg .b32 from, to, bar;
                setp.lt.u32 p, $3, {count};
                mad.lo.u32 from, $4, {stride}, $0;
                @p mapa.shared::cluster.u32 to, $1, $4;
                @p mapa.shared::cluster.u32 bar, $2, $4;
                @p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [from], {size}, [bar];
            }}""",
            "r,r,r,r,r",
            _utils.memref_ptr(source),
            _utils.memref_ptr(there),
            _utils.memref_ptr(barrier),
            index,
            peer,
        )

    return send


def _wait(_: Any, barrier: Any, parity: Any) -> None:
    _asm(
        """
        {
            .reg .pred p;
            WAIT:
            mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
            @p bra DONE;
            bra WAIT;
            DONE:
        }""",
        "r,r",
        _utils.memref_ptr(barrier),
        parity.registers.item(),
    )


def _address(ref: Any) -> Any:
    return _utils.llvm.ptrtoint(ir.IntegerType.get_signless(32), _utils.memref_ptr(ref))


def _address(ref: Any) -> Any:
    return _utils.llvm.ptrtoint(ir.IntegerType.get_signless(32), _utils.memref_ptr(ref))


def _place(warpgroup: Any) -> Any:
    """Where a thread's two tokens of its feature of the first 32 are in `x_t`: bytes, in swizzled rows of 64."""
    arith = _utils.arith
    thread = arith.remui(_utils.thread_idx(), _i32(128))
    lane, warp = arith.remui(thread, _i32(32)), arith.divui(thread, _i32(32))
    chunk = arith.xori(warpgroup, arith.andi(arith.shrui(lane, _i32(1)), _i32(3)))
    return arith.addi(
        arith.muli(lane, _i32(_ROW_BYTES)), arith.addi(arith.muli(chunk, _i32(16)), arith.muli(warp, _i32(4)))
    )


def _load(ref: Any, *index: Any) -> Any:
    ref = _utils.memref_slice(ref, (*index, slice(None), slice(0, 8)))
    values = _arrays.FragmentedArray.load_untiled(ref, layout=_values(), optimized=False)
    return values.astype(ir.F32Type.get())


def _load_rows(ref: Any, first: Any) -> Any:
    """32 numbers from `first` on, one for each feature of (32, 8) values."""
    vector = _arrays.FragmentedArray.load_untiled(
        _utils.memref_slice(ref, (_utils.ds(first, _HEAD_DIM),)), layout=_values().reduce((1,)), optimized=False
    )
    return vector.broadcast_in_dim((_HEAD_DIM, 8), (0,), _values())


def _sum_up(ctas: int) -> Callable[..., None]:
    def sum_up(_: Any, parts: Any, x_t: Any, bias: Any, own: Any, rank: Any, warpgroup: Any) -> None:
        arith = _utils.arith
        rank, warpgroup = (x.registers.item() for x in (rank, warpgroup))
        which = arith.index_cast(ir.IndexType.get(), warpgroup)
        address = arith.addi(
            arith.addi(_address(x_t), _place(warpgroup)), arith.muli(rank, _i32(_HEAD_DIM * _ROW_BYTES))
        )
        word = _asm("ld.shared.b32 $0, [$1];", "=r,r", address, result="i32")
        vector, element = _utils.vector, x_t.type.element_type
        pair = vector.bitcast(
            ir.VectorType.get((2,), element), vector.broadcast(ir.VectorType.get((1,), word.type), word)
        )
        wide = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), pair)
        total = _load_rows(bias, _utils.c(0, ir.IndexType.get()))
        registers = total.registers.copy()
        registers.flat[0] = wide
        residual = _arrays.FragmentedArray(_registers=registers, _layout=_values(), _is_signed=None)
        values = [_load(parts, j, which) for j in range(ctas)]
        values += [total, residual]
        while len(values) > 1:
            values = [a + b for a, b in zip(values[::2], values[1::2])] + ([values[-1]] if len(values) % 2 else [])
        values[0].astype(own.type.element_type).store_untiled(
            _utils.memref_slice(own, (which, slice(None), slice(0, 8))), optimized=False
        )

    return sum_up


def _normalise(ctas: int, epsilon: float) -> Callable[..., None]:
    def normalise(_: Any, rows: Any, scale: Any, offset: Any, x_t: Any, warpgroup: Any) -> None:
        arith, vector = _utils.arith, _utils.vector
        warpgroup = warpgroup.registers.item()
        which = arith.index_cast(ir.IndexType.get(), warpgroup)
        values = [_load(rows, j, which) for j in range(ctas)]

        def mean(terms: Sequence[Any]) -> Any:
            terms = list(terms)
            while len(terms) > 1:
                terms = [a + b for a, b in zip(terms[::2], terms[1::2])] + ([terms[-1]] if len(terms) % 2 else [])
            total = terms[0].reduce("add", 0)
            return total * _utils.c(1.0 / (ctas * _HEAD_DIM), ir.F32Type.get())

        shape = (_HEAD_DIM, 8)
        shift = mean(values).broadcast_in_dim(shape, (1,), _values())
        values = [v - shift for v in values]
        variance = mean([v * v for v in values])
        factor = (
            (variance + _utils.c(epsilon, ir.F32Type.get()))
            .rsqrt(approx=True)
            .broadcast_in_dim(shape, (1,), _values())
        )
        address = arith.addi(_address(x_t), _place(warpgroup))
        i32 = ir.IntegerType.get_signless(32)
        for j, v in enumerate(values):
            first = _utils.c(j * _HEAD_DIM, ir.IndexType.get())
            v = v * factor * _load_rows(scale, first) + _load_rows(offset, first)
            (register,) = v.astype(x_t.type.element_type).registers.flat
            word = vector.extract(
                vector.bitcast(ir.VectorType.get((1,), i32), register),
                dynamic_position=[],
                static_position=ir.DenseI64ArrayAttr.get([0]),
            )
            _asm(f"st.shared.b32 [$0 + {j * _HEAD_DIM * _ROW_BYTES}], $1;", "r,r", address, word)

    return normalise


def _stage(_: Any, values: Any, staging: Any, first: Any) -> None:
    """Stores (64, 32), 16 columns of it, in blocks of 32 rows and 8 columns."""
    arith = _utils.arith
    base = arith.addi(_address(staging), arith.muli(first.registers.item(), _i32(4 * _ROW)))
    i32 = ir.IntegerType.get_signless(32)
    values = values.astype(staging.type.element_type)
    for (row, column), register in zip(
        values.layout.thread_idxs(values.shape), values.registers.flat, strict=True
    ):
        row, column = arith.index_cast(i32, row), arith.index_cast(i32, column)
        half = arith.divui(column, _i32(8))
        block = arith.addi(arith.muli(arith.divui(row, _i32(32)), _i32(2)), half)
        offset = arith.addi(
            arith.muli(block, _i32(_ROW)),
            arith.addi(arith.muli(arith.remui(row, _i32(32)), _i32(_PITCH)), arith.remui(column, _i32(8))),
        )
        word = _utils.vector.extract(
            _utils.vector.bitcast(ir.VectorType.get((1,), i32), register),
            dynamic_position=[],
            static_position=ir.DenseI64ArrayAttr.get([0]),
        )
        address = arith.addi(base, arith.muli(offset, _i32(2)))
        _asm("{ .reg .pred p; setp.lt.u32 p, $2, 16; @p st.shared.b32 [$0], $1; }", "r,r,r", address, word, column)


def _fetch(ctas: int) -> Callable[..., None]:
    """Copies x (16, n) into `x_t`, and zeros beside it."""

    def fetch(_: Any, x: Any, x_t: Any, warpgroup: Any) -> None:
        arith = _utils.arith
        warpgroup = warpgroup.registers.item()
        thread = arith.remui(_utils.thread_idx(), _i32(128))
        lane, warp = arith.remui(thread, _i32(32)), arith.divui(thread, _i32(32))
        token = arith.addi(arith.muli(warpgroup, _i32(8)), arith.muli(warp, _i32(2)))
        n = ctas * _HEAD_DIM
        offset = arith.muli(arith.addi(arith.muli(token, _i32(n)), lane), _i32(2))
        address = arith.addi(_address(x_t), _place(warpgroup))
        beside = arith.addi(_address(x_t), _place(arith.addi(warpgroup, _i32(2))))
        source = _utils.memref_ptr(x)
        for j in range(ctas):
            _asm(
                f"""
                {{
                    .reg .b16 a, b; .reg .b32 w; .reg .b64 p;
                    cvt.u64.u32 p, $1;
                    add.u64 p, p, $0;
                    ld.global.b16 a, [p + {2 * j * _HEAD_DIM}];
                    ld.global.b16 b, [p + {2 * (j * _HEAD_DIM + n)}];
                    mov.b32 w, {{a, b}};
                    st.shared.b32 [$2 + {j * _HEAD_DIM * _ROW_BYTES}], w;
                    mov.b32 w, 0;
                    st.shared.b32 [$3 + {j * _HEAD_DIM * _ROW_BYTES}], w;
                }}""",
                "l,r,r,r",
                source,
                offset,
                address,
                beside,
            )

    return fetch


def _give(n: int) -> Callable[..., None]:
    """Copies this CTA's features of `x_t` to o (16, n)."""

    def give(_: Any, x_t: Any, o: Any, rank: Any, warpgroup: Any) -> None:
        arith = _utils.arith
        rank, warpgroup = (x.registers.item() for x in (rank, warpgroup))
        thread = arith.remui(_utils.thread_idx(), _i32(128))
        lane, warp = arith.remui(thread, _i32(32)), arith.divui(thread, _i32(32))
        token = arith.addi(arith.muli(warpgroup, _i32(8)), arith.muli(warp, _i32(2)))
        column = arith.addi(arith.muli(rank, _i32(_HEAD_DIM)), lane)
        offset = arith.muli(arith.addi(arith.muli(token, _i32(n)), column), _i32(2))
        address = arith.addi(
            arith.addi(_address(x_t), _place(warpgroup)), arith.muli(rank, _i32(_HEAD_DIM * _ROW_BYTES))
        )
        _asm(
            f"""
            {{
                .reg .b16 a, b; .reg .b32 w; .reg .b64 p;
                cvt.u64.u32 p, $1;
                add.u64 p, p, $0;
                ld.shared.b32 w, [$2];
                mov.b32 {{a, b}}, w;
                st.global.b16 [p], a;
                st.global.b16 [p + {2 * n}], b;
            }}""",
            "l,r,r",
            _utils.memref_ptr(o),
            offset,
            address,
        )

    return give


def _mark(_: Any, times: Any, index: Any, rank: Any) -> None:
    _asm(
        """
        {
            .reg .pred p; .reg .b32 t; .reg .b64 a;
            setp.eq.u32 p, $1, 0;
            @p setp.eq.u32 p, $3, 0;
            mov.u32 t, %clock;
            mad.wide.u32 a, $2, 4, $0;
            @p st.global.u32 [a], t;
        }""",
        "l,r,r,r",
        _utils.memref_ptr(times),
        _utils.thread_idx(),
        index.registers.item(),
        rank.registers.item(),
    )


def _multiply(flipped: bool, depth: int, height: int, width: int) -> Callable[..., Any]:
    """Adds to each of `width` sums products of `depth` slots of weights, 64 columns in two parts, transposed, by `right`."""

    def multiply(_: Any, right: Any, weights: Any, part: Any, *rest: Any) -> Any:
        index = ir.IndexType.get()
        part = _utils.arith.index_cast(index, part.registers.item())
        where, sums = rest[: depth * width], rest[depth * width :]
        results = []
        for j in range(width):
            accumulator = _wgmma.WGMMAAccumulator.from_registers(sums[j])
            for i in range(depth):
                slot = _utils.arith.index_cast(index, where[j * depth + i].registers.item())
                # (2, K / 8, 8, 32) and (K / 8, 1, 8, 32), or (32 / 8, 1, 8, 32) of tokens by features
                left = _utils.memref_slice(weights, (slot, _utils.ds(part, 2), slice(0, height // 8), 0))
                left = _utils.memref_transpose(left, (0, 1, 3, 2))
                if flipped:
                    there = _utils.memref_transpose(right, (1, 0, 3, 2))
                else:
                    there = _utils.memref_slice(right, (_utils.ds(_utils.c(i * height // 8, index), height // 8),))
                accumulator = _wgmma.wgmma(accumulator, left, there, swizzle=_ROW_BYTES)
            results.append(accumulator)
        _utils.nvvm.wgmma_commit_group_sync_aligned()
        _utils.nvvm.wgmma_wait_group_sync_aligned(0)
        return [accumulator.value for accumulator in results] if width > 1 else results[0].value

    return multiply


def unsupported(
    x: jax.Array, mask: jax.Array | None, layers: Sequence[Mapping[str, jax.Array]], *, num_heads: int, **_: Any
) -> str | None:
    """Why `post_norm_layers` does not serve a call; None if it does."""
    batch, seq, n = x.shape
    if batch * seq > _TOKENS:
        return f"takes up to {_TOKENS} tokens, not {batch} x {seq}"
    if jax.__version_info__ < (0, 11):
        return f"needs JAX 0.11 or newer, not {jax.__version__}"
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return f"takes float16 and bfloat16, not {x.dtype}"
    if n != _HEAD_DIM * num_heads or n % _WIDE or num_heads > _MOST_CTAS:
        return (
            f"takes heads of {_HEAD_DIM}, each for one of up to {_MOST_CTAS} CTAs, in multiples of "
            f"{_WIDE // _HEAD_DIM}, not {num_heads} of {n // num_heads}"
        )
    if len(layers) > _MOST_LAYERS:
        return f"takes up to {_MOST_LAYERS} layers, not {len(layers)}"
    for layer in layers:
        if layer["w_up"].shape[1] != 4 * n:
            return f"takes {4 * n} hidden values, four for each of {n} columns, not {layer['w_up'].shape[1]}"
        for name in VECTORS:
            if layer[name].dtype != jnp.float32:
                return f"takes float32 vectors, not {name} of {layer[name].dtype}"
    return None


def post_norm_layers(
    x: jax.Array,
    mask: jax.Array | None,
    layers: Sequence[Mapping[str, jax.Array]],
    *,
    num_heads: int,
    activation: str | None,
    epsilon: float,
    precision: jax.lax.Precision,
    config: None,
    target: Target,
    interpret: bool,
    stages: int = _STAGES,
    marks: bool = False,
    free: bool = False,
    batch: int = 3,
    stream_only: bool = False,
) -> jax.Array:
    """The layers for x (B, S, N) and a mask (B, S); see `pallas_models.ops.post_norm_layers`."""
    del num_heads, precision, config, target  # see `unsupported`; there are no other tiles
    if interpret:
        raise NotImplementedError("implementation='mosaic_interpret' has no post_norm_layers")
    (sequences, seq, n), dtype = x.shape, x.dtype
    tokens = sequences * seq
    x = jnp.pad(x.reshape(tokens, n), ((0, _TOKENS - tokens), (0, 0)))
    ctas, count = n // _HEAD_DIM, len(layers)
    wide = n // _WIDE  # blocks of columns of what is sent
    half_size, part_size = 2 * _ROW, 4 * _ROW
    qkv_steps, out_steps, up_steps, down_steps = n // _BLOCK, wide, n // _BLOCK, 2 * wide
    layer_steps = qkv_steps + out_steps + up_steps + down_steps
    # Where each of the vectors of a layer is in shared memory, and which part of it is this CTA's.
    sizes = dict(zip(VECTORS, (_WIDE, _HEAD_DIM, _HEAD_DIM, _WIDE, n, n, n, n), strict=True))
    places = dict(zip(sizes, [sum(list(sizes.values())[:i]) for i in range(len(sizes))], strict=True))
    vector_size = sum(sizes.values())
    vector_copies = 3 + len(VECTORS) - 1
    scale = math.log2(math.e) / math.sqrt(_HEAD_DIM)
    splat = plgpu.Layout.WG_SPLAT
    swizzled = (plgpu.TilingTransform((8, _TILE)), plgpu.SwizzleTransform(_ROW_BYTES))

    def body(refs: Refs) -> None:
        warpgroup, rank = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("rank")
        ring = Ring(refs.full, refs.consumed, stages)
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_start)(refs.arrived)

        def produce() -> None:
            def stream(w: Ref, first: int, steps: int, rows: Any, columns: Any, height: int = _BLOCK) -> None:
                @pl.loop(0, steps)
                def _(k: jax.Array) -> None:
                    slot = ring.acquire(first + k)

                    @pl.loop(0, _WIDE // _TILE)
                    def _(part: jax.Array) -> None:
                        source = w.at[pl.ds(rows(k), height), pl.ds(columns(k, part), _TILE)]
                        there = refs.slots.at[slot, part, pl.ds(0, height)]
                        plgpu.copy_gmem_to_smem(source, there, ring.full_of(slot))

            for i in range(count):

                def of(name: str, i: int = i) -> Ref:
                    return getattr(refs, f"{name}_{i}")

                if i >= 2:
                    plgpu.barrier_wait(refs.vectors_consumed.at[i % 2])
                whole = _copies.OOBFillMode.PROMISE_IN_BOUNDS

                def vector(name: str, source: Any, offset: int, size: int, i: int = i) -> None:
                    there = refs.vectors.at[i % 2, pl.ds(places[name] + offset, size)]
                    plgpu.copy_gmem_to_smem(
                        getattr(refs, f"{name}_{i}").at[pl.ds(source, size)],
                        there,
                        refs.vectors_full.at[i % 2],
                        oob_mode=whole,
                    )

                for part in range(3):
                    vector("bias_qkv", part * n + rank * _HEAD_DIM, part * _HEAD_DIM, _HEAD_DIM)
                for name in VECTORS[1:]:
                    size = sizes[name]
                    vector(name, 0 if size == n else rank * size, 0, size)
                first = i * layer_steps
                stream(
                    of("w_qkv"),
                    first,
                    qkv_steps,
                    lambda k: k * _BLOCK,
                    lambda k, part: jnp.minimum(part, 2) * n + rank * _HEAD_DIM,
                )
                first += qkv_steps
                stream(
                    of("w_out"),
                    first,
                    out_steps,
                    lambda k: rank * _HEAD_DIM,
                    lambda k, part: k * _WIDE + part * _TILE,
                    _HEAD_DIM,
                )
                first += out_steps
                stream(
                    of("w_up"), first, up_steps, lambda k: k * _BLOCK, lambda k, part: rank * _WIDE + part * _TILE
                )
                first += up_steps
                stream(
                    of("w_down"),
                    first,
                    down_steps,
                    lambda k: rank * _WIDE + jax.lax.rem(k, 2) * _BLOCK,
                    lambda k, part: jax.lax.div(k, 2) * _WIDE + part * _TILE,
                )
            ring.drain(jnp.int32(count * layer_steps))

        half = pl.ds(warpgroup * _BLOCK, _BLOCK)

        def zeros() -> jax.Array:
            return plgpu.layout_cast(jnp.zeros((_BLOCK, _TILE), jnp.float32), plgpu.Layout.WGMMA)

        def multiply(
            sums: Sequence[jax.Array], first: jax.Array, depth: int, right: Ref, height: int = _BLOCK
        ) -> Any:
            width = len(sums)
            slots = [jax.lax.rem(first + i, stages) for i in range(width * depth)]
            acc = plgpu.Layout.WGMMA
            types = (
                plgpu.RefType(swizzled),
                plgpu.RefType(swizzled),
                splat,
                *[splat] * len(slots),
                *[acc] * width,
            )
            result = plgpu.ShapeDtypeStruct((_BLOCK, _TILE), jnp.float32, layout=acc)
            inline = plgpu.inline_mgpu(arg_types=types, return_type=[result] * width if width > 1 else result)
            for slot in slots if not free else []:
                ring.wait(slot)
            sums = inline(_multiply(height < _BLOCK, depth, height, width))(
                right, refs.slots, 2 * warpgroup, *slots, *sums
            )
            for slot in slots if not free else []:
                ring.release(slot)
            return sums

        def product(first: jax.Array) -> jax.Array:
            """This warpgroup's columns of some slots, transposed, by the rows of x."""

            def step(k: jax.Array, sums: jax.Array) -> jax.Array:
                right = refs.x_t.at[pl.ds(k * batch * _BLOCK, batch * _BLOCK)]
                return multiply([sums], first + k * batch, batch, right)

            return jax.lax.fori_loop(0, qkv_steps // batch, step, zeros())

        def mark(i: Any) -> None:
            if marks:
                plgpu.inline_mgpu(arg_types=(plgpu.RefType(), splat, splat))(_mark)(refs.times, jnp.int32(i), rank)

        def meet(i: int) -> None:
            plgpu.barrier_arrive(refs.met.at[i])
            plgpu.barrier_wait(refs.met.at[i])

        def of_rows(ref: Ref, shape: tuple[int, int], like: Any) -> jax.Array:
            v = load(ref, like.reduce(1), interpret=False)
            return plgpu.layout_cast(jax.lax.broadcast_in_dim(v, shape, [0]), like)

        ref = plgpu.RefType()
        tile = plgpu.RefType(swizzled)

        def exchange(step: jax.Array, slot: jax.Array, phase: int) -> None:
            """Sends what this CTA adds, receives, adds up and normalises."""
            parity = jax.lax.rem(step, 2)
            mark(step * 8 + 3)
            arrived = [refs.arrived.at[i] for i in range(3)]
            plgpu.commit_smem()
            for barrier, size in zip(arrived, (part_size, half_size, half_size), strict=True):
                plgpu.inline_mgpu(arg_types=(ref,))(_expect(ctas * size))(barrier)
            send = plgpu.inline_mgpu(arg_types=(ref, ref, ref, splat, splat))
            send(_send(ctas // 2, part_size, part_size))(
                refs.staging, refs.parts.at[rank], arrived[0], 2 * warpgroup, jnp.int32(4)
            )
            wait = plgpu.inline_mgpu(arg_types=(ref, splat))(_wait)
            wait(arrived[0], parity)
            mark(step * 8 + 4)
            bias = refs.vectors.at[slot, pl.ds(places[("bias_out", "bias_down")[phase]], _HEAD_DIM)]
            plgpu.inline_mgpu(arg_types=(ref, tile, ref, ref, splat, splat))(_sum_up(ctas))(
                refs.parts, refs.x_t, bias, refs.own, rank, warpgroup
            )
            plgpu.commit_smem()
            theirs = refs.arrived.at[1 + warpgroup]
            send(_send(ctas, half_size, 0))(
                refs.own.at[warpgroup], refs.rows.at[rank, warpgroup], theirs, jnp.int32(0), jnp.int32(2)
            )
            mark(step * 8 + 5)
            wait(theirs, parity)
            mark(step * 8 + 6)
            vectors = [
                refs.vectors.at[slot, pl.ds(places[name], n)]
                for name in (("scale_out", "offset_out"), ("scale", "offset"))[phase]
            ]
            plgpu.inline_mgpu(arg_types=(ref, ref, ref, tile, splat))(_normalise(ctas, epsilon))(
                refs.rows, *vectors, refs.x_t, warpgroup
            )
            plgpu.commit_smem()
            meet(phase)
            mark(step * 8 + 7)

        def stage(first: jax.Array, depth: int, right: Ref, height: int = _BLOCK) -> None:
            sums = multiply([zeros() for _ in range(wide)], first, depth, right, height)
            for i, v in enumerate(sums):
                put = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, ref, splat))(_stage)
                put(v, refs.staging, 4 * i + 2 * warpgroup)

        def attend() -> None:
            def scores(sums: Ref) -> jax.Array:
                q = refs.qk_t.at[pl.ds(0, _HEAD_DIM)].transpose((1, 0))
                plgpu.wgmma(sums, q, refs.qk_t.at[pl.ds(_HEAD_DIM, _HEAD_DIM), pl.ds(0, _TILE)])
                return sums[...]

            shape = (_BLOCK, _TILE)
            s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
            taken = load(refs.mask, plgpu.Layout.WGMMA.reduce(0), interpret=False)
            taken = plgpu.layout_cast(jax.lax.broadcast_in_dim(taken, shape, [1]), plgpu.Layout.WGMMA)
            if seq < _TOKENS:
                row, column = (
                    plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in range(2)
                )
                taken = jnp.where(jax.lax.div(row, seq) == jax.lax.div(column, seq), taken, 0)
            s = jnp.where(taken != 0, s, -jnp.inf)
            peak = jnp.maximum(jnp.max(s, axis=1), lowest_score(scale))
            factors, shifts = (
                v if isinstance(v, float) else jax.lax.broadcast_in_dim(v, shape, [0])
                for v in exponents(peak, scale)
            )
            weights = jnp.exp2(s * factors - shifts)
            total = jnp.sum(weights, axis=1)
            weights = weights.astype(dtype)

            def values_of(sums: Ref) -> jax.Array:
                plgpu.wgmma(sums, weights, refs.v_t.at[pl.ds(0, _HEAD_DIM)].transpose((1, 0)))
                return sums[...]

            out = pl.run_scoped(values_of, plgpu.ACC((_BLOCK, _HEAD_DIM), jnp.float32))
            factor = jnp.where(total == 0.0, 0.0, 1.0 / total)
            refs.y[...] = (out * jax.lax.broadcast_in_dim(factor, out.shape, [0])).astype(dtype)
            plgpu.commit_smem()

        def layer(i: jax.Array, _: None) -> None:
            slot, first = jax.lax.rem(i, 2), i * layer_steps
            mark(i * 16)
            if not free:
                plgpu.barrier_wait(refs.vectors_full.at[slot])
            sums_shape = (_BLOCK, _TILE)

            def biased(v: jax.Array, name: str) -> jax.Array:
                there = refs.vectors.at[slot, pl.ds(places[name] + warpgroup * _BLOCK, _BLOCK)]
                return v + of_rows(there, sums_shape, plgpu.Layout.WGMMA)

            qkv = biased(product(first), "bias_qkv").astype(dtype)

            mark(i * 16 + 1)

            @pl.when(warpgroup == 0)
            def _() -> None:
                refs.qk_t.at[:, pl.ds(0, _TILE)][...] = qkv
                plgpu.commit_smem()
                plgpu.barrier_wait(refs.v_ready)
                attend()
                plgpu.barrier_arrive(refs.y_ready)

            @pl.when(warpgroup == 1)
            def _() -> None:
                refs.v_t[...] = qkv
                plgpu.commit_smem()
                plgpu.barrier_arrive(refs.v_ready)

            plgpu.barrier_wait(refs.y_ready)
            first += qkv_steps
            mark(i * 16 + 2)
            stage(first, 1, refs.y.at[pl.ds(0, _TILE)], _HEAD_DIM)
            exchange(2 * i, slot, 0)
            first += out_steps
            hidden = biased(product(first), "bias_up")
            mark(i * 16 + 9)
            refs.h_t.at[half][...] = activate(activation, hidden, dtype).astype(dtype)
            plgpu.commit_smem()
            meet(2)
            mark(i * 16 + 10)
            first += up_steps
            stage(first, 2, refs.h_t)
            exchange(2 * i + 1, slot, 1)
            plgpu.barrier_arrive(refs.vectors_consumed.at[slot])

        def consume() -> None:
            if stream_only:

                @pl.loop(0, count * layer_steps)
                def _(k: jax.Array) -> None:
                    slot = jax.lax.rem(k, stages)
                    ring.wait(slot)
                    ring.release(slot)

                for i in range(count - 2):
                    plgpu.barrier_arrive(refs.vectors_consumed.at[i % 2])
                return

            plgpu.inline_mgpu(arg_types=(ref, tile, splat))(_fetch(ctas))(refs.x, refs.x_t, warpgroup)
            plgpu.commit_smem()
            meet(2)
            jax.lax.fori_loop(0, count, layer, None)

            plgpu.inline_mgpu(arg_types=(tile, ref, splat, splat))(_give(n))(refs.x_t, refs.o, rank, warpgroup)

        if not free:
            pl.when(warpgroup == _CONSUMERS)(produce)
        pl.when(warpgroup < _CONSUMERS)(consume)

        plgpu.inline_mgpu()(_meet)()

    if mask is None:
        mask = jnp.ones((tokens,), jnp.int32)
    mask = jnp.pad((mask != 0).astype(jnp.int32).reshape(tokens), (0, _TILE - tokens))
    operands = dict(x=x, mask=mask)
    for i, one in enumerate(layers):
        operands |= {f"{name}_{i}": value for name, value in one.items()}
    out, *times = launch(
        body,
        operands,
        dict(
            o=jax.ShapeDtypeStruct((_TOKENS, n), dtype),
            times=jax.ShapeDtypeStruct((128,), jnp.int32) if marks else None,
        ),
        dict(
            slots=tiled((stages, _WIDE // _TILE, _BLOCK, _TILE), dtype, _ROW_BYTES),
            x_t=tiled((n, _TILE), dtype, _ROW_BYTES),
            h_t=tiled((_WIDE, _TILE), dtype, _ROW_BYTES),
            qk_t=tiled((_BLOCK, _BLOCK), dtype, _ROW_BYTES),
            v_t=tiled((_BLOCK, _TILE), dtype, _ROW_BYTES),
            y=tiled((_BLOCK, _HEAD_DIM), dtype, _ROW_BYTES),
            staging=plgpu.SMEM((ctas, 2, _HEAD_DIM, _PITCH), dtype),
            parts=plgpu.SMEM((ctas, 2, _HEAD_DIM, _PITCH), dtype),
            rows=plgpu.SMEM((ctas, 2, _HEAD_DIM, _PITCH), dtype),
            own=plgpu.SMEM((2, _HEAD_DIM, _PITCH), dtype),
            vectors=plgpu.SMEM((2, vector_size), jnp.float32),
            arrived=plgpu.SMEM((3, 2), jnp.int32),
            full=plgpu.Barrier(num_arrivals=_WIDE // _TILE, num_barriers=stages),
            consumed=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
            vectors_full=plgpu.Barrier(num_arrivals=vector_copies, num_barriers=2),
            vectors_consumed=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2),
            met=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=3),
            v_ready=plgpu.Barrier(),
            y_ready=plgpu.Barrier(),
        ),
        name="post_norm_layers",
        num_ctas=1,
        cluster=ctas,
        num_warpgroups=_CONSUMERS + 1,
        interpret=False,
        unsafe_no_auto_barriers=True,
    )
    out = out[:tokens].reshape(sequences, seq, n)
    return (out, times[0]) if marks else out
