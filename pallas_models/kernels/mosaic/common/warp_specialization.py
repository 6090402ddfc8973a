"""Warpgroups of a CTA that do different things: some copy ahead, others compute."""

import dataclasses
from collections.abc import Callable

import jax
from jax.experimental import pallas as pl

from pallas_models.kernels.mosaic.common.backend import plgpu

# Of a multiprocessor, for each thread of a warpgroup; and threads have a multiple of so many.
_REGISTERS, _UNIT = 512, 8


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

    Raises:
      ValueError: roles have more registers than warpgroups begin with: on a GPU some would wait for them forever.
    """
    if warpgroup is None:
        warpgroup = jax.lax.axis_index("warpgroup")
    most = max(role.registers for role in roles)
    count = sum(len(role.warpgroups) for role in roles)
    share = _REGISTERS // count // _UNIT * _UNIT
    registers = sum(len(role.warpgroups) * role.registers for role in roles)
    if registers > count * share:
        raise ValueError(f"roles have {registers} registers; {count} warpgroups have {count * share}")
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
