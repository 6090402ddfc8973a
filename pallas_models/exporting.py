"""Programs as artefacts: a function with its kernels, lowered once, that runs where this library is not installed.

`jax.export` refuses the custom calls of GPU kernels unless it is told their names, and lowers a kernel for one
platform at a time. `export` does both.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

KERNEL_CALLS = ("__gpu$xla.gpu.triton", "mosaic_gpu_v2")
# JAX 0.12 lowers Triton kernels only for a GPU that it knows. Of the GPUs from Ampere on, the A10 is among those
# with the least shared memory.
_ANY_GPU = ("NVIDIA A10", 72)
_MAGIC = b"pallas_models.export 1\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artefact:
    """A function lowered for some platforms.

    Attributes:
      programs: by platform, as `jax.export` made them.
    """

    programs: dict[str, jax.export.Exported]

    def call(self, *args: Any) -> Any:
        """Runs the program of the platform that `args`, or else new arrays, are on.

        Raises:
          ValueError: there is no program for that platform.
        """
        platform = _platform(args)
        if platform not in self.programs:
            raise ValueError(f"the artefact is for {', '.join(self.programs)}, not {platform}")
        return self.programs[platform].call(*args)

    def serialize(self) -> bytes:
        """The artefact as bytes, for `deserialize`.

        Raises:
          ImportError: the package flatbuffers is not installed; the extra `export` brings it.
        """
        _check_available()
        parts = {platform: bytes(program.serialize()) for platform, program in self.programs.items()}
        head = json.dumps({platform: len(part) for platform, part in parts.items()}).encode()
        return _MAGIC + head + b"\n" + b"".join(parts.values())


def export(
    function: Callable[..., Any],
    *args: Any,
    platforms: Sequence[str] = ("cpu", "cuda"),
    device: tuple[str, int] | None = None,
) -> Artefact:
    """Lowers `jax.jit(function)` for the shapes of `args`.

    ```
    artefact = exporting.export(functools.partial(ops.softmax, axis=0), jnp.ones((8, 64)))
    Path("softmax.bin").write_bytes(artefact.serialize())
    # on another machine
    y = exporting.deserialize(Path("softmax.bin").read_bytes()).call(jnp.ones((8, 64)))
    ```

    Args:
      function: takes and returns pytrees of arrays.
      *args: arrays or `jax.ShapeDtypeStruct`s. A symbolic size (`jax.export.symbolic_shape`) is served by XLA: no
        kernel is built for an unknown size.
      platforms: some of `"cpu"`, `"cuda"`, `"tpu"`, `"rocm"`.
      device: the GPU for which kernels are chosen, its name as in `device_kind` and its number of multiprocessors,
        e.g. `("NVIDIA H200", 132)`. When None, the GPU of this process; where it has none, kernels are chosen that
        run on every GPU from Ampere on. A kernel for Hopper GPUs runs on Hopper GPUs alone.

    Raises:
      ValueError: no platforms.
    """
    from pallas_models import target  # not above: `deserialize` needs nothing of this library

    if not platforms:
        raise ValueError("platforms is empty; expected some of 'cpu', 'cuda', 'tpu', 'rocm'")
    if device is None and not target.current().name:
        device = _ANY_GPU
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    gpu = device and AbstractDevice(device_kind=device[0], num_cores=device[1], platform="gpu")
    return Artefact(programs={p: lower(function, shapes, p, gpu if p == "cuda" else None) for p in platforms})


def lower(
    function: Callable[..., Any], args: Sequence[Any], platform: str, device: AbstractDevice | None
) -> jax.export.Exported:
    """Exports `jax.jit(function)` for one platform, with kernels for `device` or else for this process's GPU.

    ```
    exported = exporting.lower(ops.softmax, [jax.ShapeDtypeStruct((8, 64), jnp.float32)], "cpu", None)
    y = exported.call(jnp.ones((8, 64)))  # (8, 64)
    ```
    """
    mesh = (
        contextlib.nullcontext()
        if device is None
        else use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    )
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS]
    with mesh:
        return jax.export.export(jax.jit(function), platforms=[platform], disabled_checks=checks)(*args)


def deserialize(data: bytes) -> Artefact:
    """Makes an artefact of the bytes that `Artefact.serialize` gave.

    Args:
      data: all of them.

    Raises:
      ImportError: the package flatbuffers is not installed.
      ValueError: the data are no artefact, or were cut short.
    """
    head, _, rest = data.removeprefix(_MAGIC).partition(b"\n")
    try:
        sizes = json.loads(head) if data.startswith(_MAGIC) else None
    except ValueError:
        sizes = None
    if not isinstance(sizes, dict) or sum(sizes.values()) != len(rest):
        raise ValueError(f"{len(data)} bytes are no artefact of pallas_models, or were cut short")
    _check_available()
    programs, start = {}, 0
    for platform, size in sizes.items():
        programs[platform] = jax.export.deserialize(bytearray(rest[start : start + size]))
        start += size
    return Artefact(programs=programs)


def _check_available() -> None:
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "jax.export serialises with flatbuffers: pip install 'pallas-models[export]', or flatbuffers alone"
        ) from error


def _platform(args: Any) -> str:
    devices = [d for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array) for d in leaf.devices()]
    platform = (devices[0] if devices else jax.devices()[0]).platform
    return "cuda" if platform == "gpu" else platform
