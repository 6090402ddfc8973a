"""Races of Mosaic kernels, for which Pallas's interpreter looks if it is asked to."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import pytest

from pallas_models.kernels.mosaic.common import launch
from parity.support import pallas_patches
from parity.support.common import MOSAIC

finds_races = pytest.mark.skipif(
    MOSAIC == "mosaic" or jax.__version_info__ < (0, 11), reason="needs the interpreter of JAX 0.11"
)


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Asserts that Mosaic kernels interpreted inside have no race, and that there is one such kernel.

    JAX 0.11 prints a race and goes on; JAX 0.12 raises an error, which ends the program.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    asked = []

    def params() -> Any:
        asked.append(plgpu.InterpretGPUParams(detect_races=True))
        return asked[-1]

    jax.clear_caches()  # a program that was traced before looks for none
    try:
        with (
            mock.patch.object(launch, "interpreter_params", params),
            pallas_patches.sums_of_their_own(),
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            yield
            jax.effects_barrier()  # kernels may still run
    finally:
        jax.clear_caches()  # nobody else is to run a program that looks for races
    assert asked, "no kernel was traced for the interpreter"
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
