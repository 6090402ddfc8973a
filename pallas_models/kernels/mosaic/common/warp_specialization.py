"""Warpgroups of a CTA that do different things: some copy ahead, others compute."""

import dataclasses
from collections.abc import Callable

import jax
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.backend import plgpu

_REGISTERS_OF_A_CTA = 512  # for a thread of each warpgroup together: 64 Ki registers, 128 threads a warpgroup


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """What some warpgroups of a CTA do.

    Attributes:
      warpgroups: which of them, by number: those of a range.
      registers: of each of their threads, a multiple of 8 up to 240.
      body: `body(warpgroup)`, given the number of the warpgroup that runs it.
    """

    warpgroups: range
    registers: int
    body: Callable[[jax.Array], None]


def specialize(*roles: Role) -> None:
    """Has each warpgroup of the CTA do what its role says; together the roles have all warpgroups.

    Threads begin with equal shares of the registers: those with few give up some, which the others then take.
    """
    warpgroup, count = jax.lax.axis_index("warpgroup"), max(role.warpgroups.stop for role in roles)
    share = _REGISTERS_OF_A_CTA // count
    for role in roles:
        first, end = role.warpgroups.start, role.warpgroups.stop
        own = warpgroup == first if len(role.warpgroups) == 1 else warpgroup < end
        if len(role.warpgroups) > 1 and first > 0:
            own &= warpgroup >= first

        @pl.when(own)
        def _(role: Role = role) -> None:
            action = "increase" if role.registers > share else "decrease"
            plgpu.set_max_registers(role.registers, action=action)
            role.body(warpgroup)
