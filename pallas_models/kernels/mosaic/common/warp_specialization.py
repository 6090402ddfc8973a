"""Warpgroups of a CTA that do different things: some copy ahead, others compute."""

import dataclasses
from collections.abc import Callable

import jax
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.backend import plgpu

_REGISTERS = 512  # of a multiprocessor, for each thread of a warpgroup


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """What some warpgroups of a CTA do.

    Attributes:
      warpgroups: which of them, a range of numbers.
      registers: of each of their threads, a multiple of 8 up to 240.
      body: `body(warpgroup)`, given the number of the warpgroup that runs it.
    """

    warpgroups: range
    registers: int
    body: Callable[[jax.Array], None]


def specialize(*roles: Role, warpgroup: jax.Array | None = None) -> None:
    """Has each warpgroup of the CTA do what its role says; together the roles have all warpgroups.

    Threads begin with equal shares of the registers: those with fewer give up some, which those with more take.

    Args:
      warpgroup: the number of the warpgroup that runs this, where it is known.
    """
    if warpgroup is None:
        warpgroup = jax.lax.axis_index("warpgroup")
    most = max(role.registers for role in roles)
    share = _REGISTERS // sum(len(role.warpgroups) for role in roles)
    for role in roles:
        first, end = role.warpgroups.start, role.warpgroups.stop
        if first == 0:
            own = warpgroup < end
        elif len(role.warpgroups) == 1:
            own = warpgroup == first
        else:
            own = (warpgroup >= first) & (warpgroup < end)

        @pl.when(own)
        def _(role: Role = role, warpgroup: jax.Array = warpgroup) -> None:
            takes = role.registers == most or role.registers > share
            plgpu.set_max_registers(role.registers, action="increase" if takes else "decrease")
            role.body(warpgroup)
