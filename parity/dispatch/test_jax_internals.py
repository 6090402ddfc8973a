"""JAX's internals that the library touches: named in one module, and where JAX has them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.experimental.pallas import triton
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.mlir import ir
from jax.interpreters import batching
from jax.sharding import Mesh, PartitionSpec

import pallas_models
import weights
from pallas_models import _jax, exporting, ops
from parity.support.common import cuda_device


def test_no_other_module_names_them():
    files = [f for package in (pallas_models, weights) for f in Path(package.__path__[0]).rglob("*.py")]
    naming = {f.name for f in files if re.search(r"jax\._src|from jax import _src|lojax|is_high", f.read_text())}
    assert len(files) > 100 and naming == {"_jax.py"}


def test_versions_are_compared():
    assert _jax.since(0, 10) and _jax.since(*jax.__version_info__)
    assert not _jax.since(*jax.__version_info__[:2], 1000)


@pytest.mark.skipif(not _jax.since(0, 11), reason="JAX warns of no deprecation")
def test_kernels_are_quiet_without_a_change_to_jax():
    """That they are quiet is tested in test_settings.py."""
    from jax._src import deprecations
    from jax._src.pallas.triton import pallas_call_registration

    ours = _jax.quiet(triton.CompilerParams)
    assert ours is not triton.CompilerParams and issubclass(ours, triton.CompilerParams)
    assert _jax.quiet(triton.CompilerParams) is ours
    assert pallas_call_registration.deprecations is deprecations


SEARCHES = """
import sys
import jax, jax.numpy as jnp
from pallas_models import _jax, ops
from parity.support.common import cuda_device

class Finder:
    asked = 0
    def find_spec(self, name, path=None, target=None):
        self.asked += name.endswith(".tt")

if sys.argv[1] == "without":
    _jax.find_triton_dialect = lambda: None
x = jnp.ones((8, 64))
sys.meta_path.insert(0, Finder())
with cuda_device("NVIDIA H200", 132):
    jax.jit(lambda x: ops.softmax(x, implementation="triton")).trace(x).lower(lowering_platforms=("cuda",))
print(sys.meta_path[0].asked)
"""


@pytest.mark.parametrize("found", ["with", "without"])
def test_the_dialect_of_triton_is_not_searched_for_each_operation(found):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SEARCHES, found]
    asked = int(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)
    assert (asked <= 2) if found == "with" else (asked > 20)  # else the piece may go


def test_kernels_are_traced_where_shard_map_checks_types():
    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    def kernel(x):
        return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    def unchecked(x):
        with _jax.without_shard_map_types():
            traced = jax.make_jaxpr(kernel)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        assert traced.out_avals[0].shape == x.shape
        return x

    def mapped(function):
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        split = PartitionSpec("d")
        return jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split)

    jax.jit(mapped(unchecked)).trace(jnp.ones(8))
    with pytest.raises(ValueError, match="vma"):  # else the piece may go
        jax.jit(mapped(kernel)).trace(jnp.ones(8))


def test_a_primitive_is_lowered_alone():
    assert callable(Primitive.is_high)
    primitive = Primitive("test")
    _jax.is_lowered_alone(primitive)
    assert primitive.is_high(jnp.ones(2), program=None) is False


def test_a_program_is_mapped_and_says_which_results_are():
    program = jax.make_jaxpr(lambda x, y: (2 * y, x + y, y.sum()))(jnp.ones(3), jnp.ones(3))

    def of(x, y):
        return one.bind(x, y)

    found = []

    def batch(axis, args, axes):
        mapped, out_axes = _jax.batched(program, axis, tuple(axes))
        found.append(out_axes)
        return jaxpr_as_fun(mapped)(*args), out_axes

    one = Primitive("one")
    one.multiple_results = True
    one.def_abstract_eval(lambda *_: program.out_avals)
    batching.fancy_primitive_batchers[one] = batch
    x = jnp.arange(6.0).reshape(3, 2)
    _, y, _ = jax.jit(jax.vmap(lambda x: of(x, jnp.ones(3)), 1, [None, 1, None]))(x)
    np.testing.assert_array_equal(y, x + 1)
    ((first, second, third),) = found
    assert (first, third) == (None, None) and second is not None


PARTITIONED = """
import jax, jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from pallas_models import _jax

mesh = Mesh(jax.devices(), ("a",))
for split in (P("a", None), P(None, "a"), P()):
    found = []

    @custom_partitioning
    def double(x):
        return 2 * x

    def partition(mesh, operands, result):
        found.append(_jax.partition_spec(operands[0].sharding, mesh))
        same = NamedSharding(mesh, split)
        return mesh, lambda x: 2 * x, same, (same,)

    double.def_partition(partition, decode_shardings=False, sharding_rule="i j -> i j")
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, split))
    jax.jit(double).lower(x).compile()
    assert len(found) == 1 and NamedSharding(mesh, found[0]).is_equivalent_to(x.sharding, 2), (split, found)
"""


def test_shardings_of_the_partitioner_are_decoded():
    flags = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PARTITIONED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_sharding_that_no_axis_has_is_none():
    class Odd:
        @property
        def _hlo_sharding(self):
            raise LookupError

    assert _jax.partition_spec(Odd(), Mesh(jax.devices()[:1], ("a",))) == PartitionSpec()


def test_mosaic_interprets():
    assert type(_jax.mosaic_interpreter_params()).__name__ == "InterpretGPUParams"


def lowered_products(*depths):
    """The module of a program that has a product 128 x depth x 128 in Mosaic for each depth."""

    def f(*operands):
        pairs = zip(operands[::2], operands[1::2], strict=True)
        return [ops.matmul(x, w, implementation="mosaic") for x, w in pairs]

    shapes = [shape for k in depths for shape in ((128, k), (k, 128))]
    with cuda_device("NVIDIA H200", 132):
        operands = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
        return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).compiler_ir()


def test_programs_with_kernels_may_compile_in_threads():
    """Programs that one thread lowers share an MLIR context, which has locks only while it may use threads."""
    of_xla = jax.jit(lambda x: x + 1).lower(jnp.ones(8)).compiler_ir()
    threads = ir.ThreadPool().get_max_concurrency()
    assert lowered_products(64).context.get_num_threads() == of_xla.context.get_num_threads() == threads


def mosaic_calls(*depths):
    """The options of the calls in a program of such products."""
    found = []

    def walk(operation):
        found.extend(options for r in operation.results if (options := _jax.mosaic_call_options(r)) is not None)
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    walk(inner)

    walk(lowered_products(*depths).operation)
    return found


def test_calls_of_mosaic_kernels_have_a_hash_and_words_to_copy():
    """Equal kernels have one name and one hash, whatever was lowered before them."""
    (first,), (_, again) = mosaic_calls(64), mosaic_calls(192, 64)
    assert isinstance(first["kernel_hash"], bytes) and len(first["kernel_hash"]) == 32
    assert first["kernel_hash"] == again["kernel_hash"] and first["module"] == again["module"]
    arrays = re.findall(rb"llvm\.array<([1-9]\d*) x (\w+(?:<\w+>)?)>", first["module"])
    assert arrays and all(of == b"vector<8xi64>" for _, of in arrays)
    if _jax.since(0, 11):
        assert b"mosaic_gpu.dump_basename" in first["module"]
    assert _jax.MOSAIC_CALL in exporting.KERNEL_CALLS


@pytest.mark.skipif(not _jax.since(0, 11), reason="is for kernels that need JAX 0.11")
def test_barriers_have_an_address():
    """Of 64 bits each, one after another, at which what a Mosaic kernel inlines may arrive."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out_ref, barriers):
        address = _jax.barrier_address(barriers)
        assert (address.shape, address.dtype) == ((), jnp.int32)
        plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(lambda _, x: None)(address + 8)

    semantics = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
        scratch_types=dict(barriers=plgpu.Barrier(num_barriers=2)),
        compiler_params=semantics,
    )
    with cuda_device("NVIDIA H200", 132):
        text = jax.jit(kernel).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert _jax.MOSAIC_CALL in text


class _Site:
    """A value of a kernel whose layout is a variable; its text is asked for `asked` times."""

    asked = 0

    def __init__(self, name):
        self.name = name

    def __str__(self):
        _Site.asked += 1
        return self.name


def equal_sites(constraints, find):
    """The sites that `find` says are equal, in a system of that module of JAX's."""
    a, b, c, d, e, f, g = (constraints.Variable(_Site(name)) for name in "abcdefg")
    pairs = [(e, d), (b, c), (f, f), (a, b), (g, constraints.RegisterLayout(None)), (c, d)]
    equations = [constraints.Equals(left, right) for left, right in pairs]
    _Site.asked = 0
    found = find(constraints.ConstraintSystem(constraints=equations))
    return {v.key.name: {other.key.name for other in others} for v, others in found.items()}


@pytest.mark.skipif(_jax.since(0, 12), reason="JAX finds them without their text")
def test_equal_layouts_are_found_as_by_jax_without_their_text(monkeypatch):
    from jax.experimental.mosaic.gpu import constraints

    found = equal_sites(constraints, _jax._equal_variables)
    assert found == {name: set("abcde") - {name} for name in "abcde"} | {"f": set()} and not _Site.asked
    as_it_was = importlib.util.module_from_spec(constraints.__spec__)
    monkeypatch.setitem(sys.modules, constraints.__name__, as_it_was)
    constraints.__spec__.loader.exec_module(as_it_was)
    assert equal_sites(as_it_was, as_it_was.compute_transitively_equal_vars) == found
    assert _Site.asked  # else the piece may go


@pytest.mark.skipif(_jax.since(0, 12), reason="JAX has its own")
def test_kernels_are_lowered_with_it():
    from jax.experimental.mosaic.gpu import constraints

    with cuda_device("NVIDIA H200", 132):
        x, scale = jnp.ones((8, 64)), jnp.ones(64)
        call = jax.jit(lambda x: ops.rms_norm(x, scale, epsilon=1e-5, implementation="mosaic"))
        call.trace(x).lower(lowering_platforms=("cuda",))
    assert constraints.compute_transitively_equal_vars is _jax._equal_variables
