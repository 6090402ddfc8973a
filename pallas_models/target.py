"""Which GPU a program is for: decided here for dispatch, tables, heuristics and grids."""

import contextlib
import dataclasses
import functools
import importlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, use_abstract_mesh

_WITHOUT_GPU_S = 0.1  # in which JAX has started where there is no GPU
_KIB = 1024
_LARGE, _SMALL = 227 * _KIB, 99 * _KIB
# Bytes of shared memory that a CTA may use, by compute capability; GPUs of datacenters have more.
_SHARED_MEMORY: dict[tuple[int, int] | None, int] = {
    (8, 0): 163 * _KIB,
    (8, 6): _SMALL,
    (8, 7): 163 * _KIB,
    (8, 9): _SMALL,
    (9, 0): _LARGE,
    (10, 0): _LARGE,
    (10, 3): _LARGE,
    (11, 0): _LARGE,
    (12, 0): _SMALL,
    (12, 1): _SMALL,
}
# The names of GPUs that kernels were measured on that store to one another's memory; others may have no NVLink.
_LINKED = frozenset({"NVIDIA H200"})
# Compute capabilities by the names that drivers give; the first that matches counts.
_CAPABILITIES = (
    (r"RTX PRO|RTX 50\d\d|Blackwell Server", (12, 0)),
    (r"GB10\b", (12, 1)),
    (r"\bG?B300", (10, 3)),
    (r"\bG?B[12]00", (10, 0)),
    (r"Thor", (11, 0)),
    (r"\b(G?H[12]00|H800|H20)\b", (9, 0)),
    (r"\bL(2|4|20|40)S?\b|RTX 40\d\d|\bAda\b", (8, 9)),
    (r"Orin", (8, 7)),
    (r"\bA(2|10|16|40)G?\b|RTX A\d|RTX 30\d\d", (8, 6)),
    (r"\bA(30|100|800)", (8, 0)),
    (r"\bT4\b|RTX 20\d\d|TITAN RTX", (7, 5)),
    (r"\bV100", (7, 0)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Architectures:
    """The generations of GPUs that a kernel runs on.

    Attributes:
      name: in words, as it follows "needs".
      first: the major compute capability of the first.
      last: the major compute capability of the last; None where all later ones do too.
    """

    name: str
    first: int
    last: int | None = None


AMPERE_ON = Architectures("an NVIDIA GPU from Ampere on", 8)
"""For the kernels of Triton."""
HOPPER = Architectures("a Hopper GPU", 9, 9)
"""For the kernels of Mosaic."""
BLACKWELL = Architectures("a Blackwell GPU of the datacenter", 10, 10)
"""For blocks of Triton's kernels: an RTX 50xx or RTX PRO 6000 takes an Ada GPU's."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The GPU that a program is for.

    Attributes:
      name: as JAX has it in `device_kind`, e.g. `"NVIDIA H200"`; empty where it is not known.
      capability: CUDA's compute capability, major and minor.
      num_cores: number of streaming multiprocessors.
      shared_memory: bytes of shared memory that a CTA may use.
      is_linked: whether it is of a kind of which each GPU of a machine reaches the memory of all others by NVLink.
      has_peers: whether kernels may store to the memory of the other GPUs of the mesh, which has one axis.
    """

    name: str
    capability: tuple[int, int]
    num_cores: int
    shared_memory: int
    is_linked: bool = False
    has_peers: bool = False

    @property
    def abstract_device(self) -> AbstractDevice | None:
        """The device that programs for this GPU are traced for; None where it is not known."""
        if not self.name:
            return None
        return AbstractDevice(device_kind=self.name, num_cores=self.num_cores, platform="gpu")

    def runs(self, architectures: Architectures) -> bool:
        """Whether kernels that are for some architectures run here."""
        major = self.capability[0]
        return architectures.first <= major and (architectures.last is None or major <= architectures.last)


ANY = Target(name="", capability=(8, 0), num_cores=108, shared_memory=_SMALL)
"""Programs for it run on every GPU from Ampere on: the target where it is not known where they will run."""


_DATACENTER = (
    ("A100", "NVIDIA A100-SXM4-80GB", 108),
    ("A10", "NVIDIA A10", 72),
    ("L4", "NVIDIA L4", 58),
    ("L40S", "NVIDIA L40S", 142),
    ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 188),
    ("H100", "NVIDIA H100 80GB HBM3", 132),
    ("H200", "NVIDIA H200", 132),
    ("GH200", "NVIDIA GH200 480GB", 132),
    ("B200", "NVIDIA B200", 148),
    ("B300", "NVIDIA B300 SXM6", 148),
)
# Multiprocessors of the GeForce RTX with that number.
_GEFORCE = {
    3060: 28,
    3070: 46,
    3080: 68,
    3090: 82,
    4060: 24,
    4070: 46,
    4080: 76,
    4090: 128,
    5060: 30,
    5070: 48,
    5080: 84,
    5090: 170,
}


# JAX lowers Triton's kernels for GPUs whose names it knows, and for the one that is here: it does not know all
# GPUs of these architectures.
_KNOWN_TO_JAX = {(8, 6): "NVIDIA A10", (8, 9): "NVIDIA L4", (12, 0): "NVIDIA RTX PRO 6000"}


def start() -> None:
    """Starts the GPU of this process, if there is one, and imports the modules that lower Hopper's kernels.

    Both at once, as only the import needs the interpreter, and before it is known what GPU there is. A program
    that somebody waits for calls it first, in a thread.

    ```
    import threading

    starting = threading.Thread(target=target.start)
    starting.start()  # and read files meanwhile
    starting.join()
    ```
    """
    starting = threading.Thread(target=_local)
    starting.start()
    starting.join(_WITHOUT_GPU_S)
    if starting.is_alive() or _local().runs(HOPPER):
        with contextlib.suppress(ImportError):  # whoever needs it will see that
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    starting.join()


def current() -> Target:
    """The GPU that a program is traced for now: of the abstract mesh in force, else of this process; else any GPU.

    Of several kinds of local GPUs it is the least capable one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return _named(device.device_kind, device.num_cores)
    return _local()


def lowering_for(gpu: Target) -> contextlib.AbstractContextManager[Any]:
    """Programs that are traced and lowered inside are for a GPU, which need not be in this machine.

    ```
    with target.lowering_for(target.GPUS["L40S"]):
        lowered = jax.jit(ops.softmax).trace(jnp.ones((8, 64))).lower(lowering_platforms=("cuda",))
    ```

    Inside, `current` can have the name of another GPU of the same architecture, one that JAX lowers Triton's
    kernels for; all else is the GPU's own.

    Args:
      gpu: one of `GPUS`, or any other that has a name.

    Raises:
      ValueError: it has no name, as `ANY`.
    """
    device = gpu.abstract_device
    if device is None:
        raise ValueError(f"{gpu} has no name; expected a GPU that has, such as one of pallas_models.target.GPUS")
    device = AbstractDevice(
        device_kind=_KNOWN_TO_JAX.get(gpu.capability, gpu.name), num_cores=device.num_cores, platform="gpu"
    )
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@contextlib.contextmanager
def leave_cores(num_cores: int, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Has the kernels of programs that are traced inside leave multiprocessors to others that run beside them.

    A sum over GPUs takes a few. A kernel that counts on all does their share afterwards, in up to twice its time.

    Args:
      num_cores: how many are left of each GPU.
      mesh: the devices that the arrays are spread over. Where it has no GPUs nothing changes.

    Raises:
      ValueError: none of them would be left to the kernels, or `num_cores` is negative.
    """
    abstract = mesh.abstract_mesh
    device = abstract.abstract_device
    if device is None or device.num_cores is None:
        yield
        return
    if not 0 <= num_cores < device.num_cores:
        raise ValueError(f"{num_cores=} is out of range; expected 0 to {device.num_cores - 1}")
    fewer = AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores - num_cores, platform=device.platform
    )
    with use_abstract_mesh(abstract.update(abstract_device=fewer)):
        yield


@functools.cache
def _named(name: str, num_cores: int | None) -> Target:
    capability = next((c for pattern, c in _CAPABILITIES if re.search(pattern, name)), None)
    return Target(
        name=name,
        capability=capability or ANY.capability,
        num_cores=num_cores or ANY.num_cores,
        shared_memory=_SHARED_MEMORY.get(capability, _SMALL),
        is_linked=name in _LINKED,
    )


GPUS = {
    **{short: _named(name, num_cores) for short, name, num_cores in _DATACENTER},
    **{f"RTX {number}": _named(f"NVIDIA GeForce RTX {number}", n) for number, n in _GEFORCE.items()},
}
"""GPUs by their short names, `"A100"` or `"RTX 4090"`, with what NVIDIA publishes of each: to lower programs for
one that is not here, with `lowering_for`, or to ask what a kernel may use of it."""


@functools.cache
def _local() -> Target:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:  # no CUDA backend here: programs that are lowered for CUDA will run elsewhere
        return ANY
    targets = []
    for device in devices:
        major, minor = (int(part) for part in str(device.compute_capability).split("."))
        targets.append(
            Target(
                name=device.device_kind,
                capability=(major, minor),
                num_cores=device.core_count,
                shared_memory=_SHARED_MEMORY.get((major, minor), _SMALL),
                is_linked=device.device_kind in _LINKED,
            )
        )
    return min(targets, key=lambda target: (target.capability, target.shared_memory, target.num_cores))
