"""A ring of slots in shared memory, which one warpgroup fills ahead of the warpgroups that read them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.backend import plgpu


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """Who may touch which slot: step after step, the producer acquires and fills a slot, consumers release it.

    Copies to a slot arrive at `full_of` it. Nobody announces that slots are free at first: the producer only waits
    for slots that it has filled before.

    Attributes:
      full: barriers at which copies arrive, one a slot.
      consumed: barriers at which consumers arrive, one a slot.
      num_stages: number of slots.
      first_full: the index in `full` of the barrier of slot 0. Warpgroups that take turns have barriers of their
        own, since a warpgroup that waits for a barrier must wait for every round of it.
    """

    full: Ref
    consumed: Ref
    num_stages: int
    first_full: jax.Array | int = 0

    def full_of(self, slot: jax.Array) -> Ref:
        """The barrier at which copies to a slot arrive."""
        return self.full.at[self.first_full + slot]

    def after(self, slot: jax.Array) -> jax.Array:
        """The slot of the next step."""
        return jnp.where(slot == self.num_stages - 1, 0, slot + 1)

    def acquire(self, step: jax.Array) -> jax.Array:
        """Waits until the slot of a step has been released, and returns the slot."""
        slot = jax.lax.rem(step, self.num_stages)

        @pl.when(step >= self.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self.consumed.at[slot])

        return slot

    def wait(self, slot: jax.Array) -> None:
        """Waits until copies to a slot have arrived."""
        plgpu.barrier_wait(self.full_of(slot))

    def release(self, slot: jax.Array) -> None:
        """Says that this warpgroup has read a slot."""
        plgpu.barrier_arrive(self.consumed.at[slot])

    def drain(self, steps: jax.Array, acquired: int = 0) -> None:
        """Waits until all slots have been released, after `steps` steps: no round of a barrier may be left.

        Args:
          acquired: how many slots have been acquired beyond these steps.
        """

        @pl.loop(jnp.maximum(steps + acquired - self.num_stages, 0), steps)
        def _(step: jax.Array) -> None:
            plgpu.barrier_wait(self.consumed.at[jax.lax.rem(step, self.num_stages)])
