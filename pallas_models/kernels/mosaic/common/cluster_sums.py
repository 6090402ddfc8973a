"""Sums over the warps of a cluster of CTAs, which send one another what each has added up.

Mosaic has no such thing: its sum over a warpgroup waits for all warps twice, and has one place in shared memory
for all warpgroups of a CTA; and what is stored in another CTA wants a fence, which takes longer than all else.
Stores that are asynchronous come with barriers of their own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from pallas_models.kernels.common.backend import Backend, Ref
from pallas_models.kernels.common.primitives import meaning
from pallas_models.kernels.mosaic.common import ptx as inline
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.launch import Refs

_arrays = Backend("jax.experimental.mosaic.gpu.fragmented_array")

_PLACES = 4  # for sums: a warp may send sums of step i + 1 while another still reads sums of step i - 2
_WARPS = 4  # of a warpgroup


# The interpreter has one CTA, and makes the barriers itself.
def _interpreted_start(self: "Exchange", refs: Refs) -> None:
    pass


def _interpreted_send(
    self: "Exchange", refs: Refs, step: jax.Array | int, piece: jax.Array, terms: Sequence[jax.Array]
) -> None:
    place = jax.lax.rem(step, _PLACES)
    for i, values in enumerate(terms):
        refs.sums[place, piece, 0, i] = jnp.sum(values)
    plgpu.barrier_arrive(refs.added.at[place])


def _interpreted_receive(self: "Exchange", refs: Refs, step: jax.Array) -> list[jax.Array]:
    place = jax.lax.rem(step, _PLACES)
    plgpu.barrier_wait(refs.added.at[place])
    return [sum(refs.sums[place, j, 0, i] for j in range(self.warpgroups)) for i in range(self.count)]


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """Sums that all warpgroups of a cluster add up step after step: they send, and later receive, every step.

    Attributes:
      ctas: of a cluster.
      warpgroups: of a CTA.
      count: numbers that are added up in a step, 1 or 2.
      layout: of the vectors that threads hold.
    """

    ctas: int
    warpgroups: int
    count: int
    layout: Any

    def scratch_types(self, interpret: bool) -> dict[str, Any]:
        """Shared memory: sums of warps, and barriers, of 64 bits each; the interpreter has barriers of its own."""
        pieces = self.ctas * self.warpgroups
        if interpret:
            added = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=_PLACES)
        else:
            added = plgpu.SMEM((_PLACES, 2), jnp.int32)
        return dict(sums=plgpu.SMEM((_PLACES, pieces, _WARPS, self.count), jnp.float32), added=added)

    @meaning(_interpreted_start)
    def start(self, refs: Refs) -> None:
        """Makes the barriers; all warpgroups of the cluster wait for one another."""
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(
            lambda _, added: inline.start((inline.address(added), [self.warpgroups] * _PLACES))
        )(refs.added)

    @meaning(_interpreted_send)
    def send(self, refs: Refs, step: jax.Array | int, piece: jax.Array, terms: Sequence[jax.Array]) -> None:
        """Sends what a warpgroup, the `piece`-th of the cluster, adds to the sums of a step: vectors of terms."""
        place = jax.lax.rem(step, _PLACES)
        send = plgpu.inline_mgpu(arg_types=(*[self.layout] * self.count, plgpu.RefType(), plgpu.RefType()))
        send(functools.partial(_send, self))(*terms, refs.sums.at[place, piece], refs.added.at[place])

    @meaning(_interpreted_receive)
    def receive(self, refs: Refs, step: jax.Array) -> list[jax.Array]:
        """Waits for the sums of a step."""
        place = jax.lax.rem(step, _PLACES)
        scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT)
        receive = plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=[scalar] * self.count
        )(functools.partial(_receive, self))
        round_ = jax.lax.rem(jax.lax.div(step, _PLACES), 2)
        sums: list[jax.Array] = receive(refs.sums.at[place], refs.added.at[place], round_)
        return sums


def all_gather(part: Ref, ctas: int) -> None:
    """Stores `part`, 512 bytes, in the same place of all other CTAs of a cluster, each of one warpgroup.

    They wait for one another.
    """
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(functools.partial(_all_gather, ctas))(part)


def _all_gather(ctas: int, _: Any, part: Any) -> None:
    stores = f"""
            setp.lt.u32 p, peer, {ctas};
            setp.ne.and.u32 p, peer, rank, p;
            @p mapa.shared::cluster.u32 there, own, peer;
            @p st.shared::cluster.v4.b32 [there], {{a, b, c, d}};
            add.u32 peer, peer, {_WARPS};"""
    inline.asm(
        f"""
        {{
            .reg .pred p;
            .reg .b32 own, peer, rank, there, a, b, c, d;
            bar.sync 0;
            and.b32 own, $1, 31;
            mad.lo.u32 own, own, 16, $0;
            ld.shared.v4.b32 {{a, b, c, d}}, [own];
            shr.u32 peer, $1, 5;
            mov.u32 rank, %cluster_ctarank;
            {stores * -(-ctas // _WARPS)}
            {inline.MEET}
        }}""",
        "r,r",
        inline.utils.memref_ptr(part),
        inline.thread_of_cta(),
    )


def _send(exchange: Exchange, _: Any, *operands: Any) -> None:
    """In each warp a thread for each CTA stores there what the warp has added up."""
    *terms, there, added = operands
    count, sums = exchange.count, []
    for values in terms:
        total = functools.reduce(_arrays.addf, values.registers.flat)  # which contracts products and sums
        (size,) = ir.VectorType(total.type).shape
        parts = [inline.item(total, i) for i in range(size)]
        sums.append(inline.warp_sum(functools.reduce(_arrays.addf, parts)))
    lane, warp = inline.lane_and_warp()
    offset = inline.times(warp, 4 * count)
    kind, data = (".f32", "$4") if count == 1 else (".v2.f32", "{$4, $5}")
    bytes_expected = exchange.ctas * _WARPS * count * 4  # of as many warps for each warpgroup here
    inline.asm(
        f"""
        {{
            .reg .pred p;
            .reg .b32 own, sums, added;
            setp.eq.u32 p, $3, 0;
            @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {bytes_expected};
            setp.lt.u32 p, $2, {exchange.ctas};
            add.u32 own, $0, {"$5" if count == 1 else "$6"};
            @p mapa.shared::cluster.u32 sums, own, $2;
            @p mapa.shared::cluster.u32 added, $1, $2;
            @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{kind} [sums], {data}, [added];
        }}""",
        "r,r,r,r," + "f," * count + "r",
        inline.utils.memref_ptr(there),
        inline.utils.memref_ptr(added),
        lane,
        inline.thread(),
        *sums,
        offset,
    )


def _receive(exchange: Exchange, _: Any, sums: Any, added: Any, parity: Any) -> list[Any]:
    """Each thread of a warp adds up what some warps have sent, and the warp these; all warps do the same."""
    arith, count = inline.utils.arith, exchange.count
    inline.wait(inline.utils.memref_ptr(added), parity.registers.item())
    warps = exchange.ctas * exchange.warpgroups * _WARPS
    lane = inline.lane_and_warp()[0]
    totals = []
    for i in range(count):
        total = None
        for first in range(0, warps, 32):
            value = inline.asm(
                f"""
                {{
                    .reg .pred p;
                    .reg .b32 place;
                    setp.lt.u32 p, $2, {warps - first};
                    mad.lo.u32 place, $2, {4 * count}, $1;
                    mov.f32 $0, 0f00000000;
                    @p ld.shared.f32 $0, [place + {4 * (first * count + i)}];
                }}""",
                "=f,r,r",
                inline.utils.memref_ptr(sums),
                lane,
                result="f32",
            )
            total = value if total is None else arith.addf(total, value)
        totals.append(_arrays.FragmentedArray.splat(inline.warp_sum(total), ()))
    return totals
