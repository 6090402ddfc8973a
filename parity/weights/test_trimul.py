"""Triangle multiplicative updates of PyTorch models to parameters: numbers, names and errors."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import weights
from pallas_models import trimul
from parity.support.common import assert_close, normal
from weights.trimul import convert

C, H = 12, 8
FAMILIES = ("lucidrains", "openfold", "boltz")
RNG = np.random.default_rng(80)
X, MASK = normal(RNG, 2, 7, 7, C), RNG.integers(0, 2, (2, 7, 7))


def module(torch_trimul, family, direction="outgoing", bias=False, seed=0):
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch_trimul.draw_(torch_trimul.FAMILIES[family](C, H, direction, bias), generator)


def arrays(torch_trimul, family, **options) -> dict[str, np.ndarray]:
    return {name: t.numpy() for name, t in module(torch_trimul, family, **options).state_dict().items()}


def assert_computes_the_same(params, torch_module, direction, tolerance=1e-5):
    import torch

    with torch.no_grad():
        x, mask = torch.tensor(np.asarray(X), dtype=torch.float64), torch.tensor(MASK)
        expected = torch_module.double()(x, mask).numpy()
    out = trimul.trimul(params, X, MASK, direction=direction, compute_dtype="float32", implementation="xla")
    assert_close(out, expected, tolerance)


# Numbers and names


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("family", FAMILIES)
def test_computes_what_torch_computes(torch_trimul, tmp_path, family, direction, bias):
    torch_module = module(torch_trimul, family, direction, bias)
    params = weights.load_trimul(torch_module.state_dict(), direction=direction)
    config = trimul.TriMulConfig(channels=C, hidden=H, gate_after=family != "lucidrains", use_bias=bias)
    expected = jax.eval_shape(lambda: trimul.init(jax.random.key(0), config))
    assert jax.tree.map(lambda p: (p.shape, p.dtype), params) == jax.tree.map(
        lambda p: (p.shape, p.dtype), expected
    )
    assert_computes_the_same(params, torch_module, direction)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin", "folder"])
def test_files(torch_trimul, tmp_path, suffix):
    import torch

    torch_module = module(torch_trimul, "openfold", bias=True)
    path = tmp_path / f"model{suffix}"
    if suffix == ".safetensors":
        save_file(arrays(torch_trimul, "openfold", bias=True), path)
    elif suffix == "folder":
        path = tmp_path
        save_file(arrays(torch_trimul, "openfold", bias=True), path / "model.safetensors")
    else:
        torch.save(torch_module.state_dict(), path)
    for source in (path, str(path)):
        assert_computes_the_same(weights.load_trimul(source, direction="outgoing"), torch_module, "outgoing")


def test_one_of_several_in_a_larger_model(torch_trimul):
    tensors = {"embedding.weight": np.ones((3, 3), np.float32)}
    modules = {}
    for i, direction in enumerate(("outgoing", "incoming")):
        prefix = f"blocks.{i}.tri_mul."
        modules[prefix] = direction, module(torch_trimul, "lucidrains", direction, seed=i)
        tensors |= {prefix + name: tensor for name, tensor in modules[prefix][1].state_dict().items()}
    for prefix, (direction, torch_module) in modules.items():
        params = weights.load_trimul(tensors, direction=direction, prefix=prefix)
        assert_computes_the_same(params, torch_module, direction)


@pytest.mark.parametrize("name", ["left_gate", "out_gate", "to_out"])
def test_biases_of_some_layers(torch_trimul, name):
    # lucidrains' gates have a bias in models whose other layers have none; it is 0 where there is none.
    torch_module = module(torch_trimul, "lucidrains", bias=True)
    state = torch_module.state_dict()
    for other in ("left_proj", "right_proj", "left_gate", "right_gate", "out_gate", "to_out"):
        if other != name:
            del state[f"{other}.bias"]
            getattr(torch_module, other).bias.data.zero_()
    assert_computes_the_same(weights.load_trimul(state, direction="outgoing"), torch_module, "outgoing")


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_used(torch_trimul, family, direction):
    tensors = arrays(torch_trimul, family, bias=True)
    before = jax.tree.leaves(convert(tensors, direction=direction))
    for name, tensor in tensors.items():
        after = jax.tree.leaves(convert(tensors | {name: tensor + 1}, direction=direction))
        assert sum(not np.array_equal(a, b) for a, b in zip(before, after, strict=True)) == 1, name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype(torch_trimul, dtype):
    params = weights.load_trimul(arrays(torch_trimul, "boltz", bias=True), direction="outgoing", dtype=dtype)
    for path, leaf in jax.tree.leaves_with_path(params):
        assert leaf.dtype == (dtype if path[-1].key == "kernel" else "float32"), path


def test_half_precision_checkpoint_on_any_device(torch_trimul):
    torch_module = module(torch_trimul, "boltz").bfloat16()
    state = torch_module.state_dict(keep_vars=True)  # parameters that require a gradient, too
    assert_computes_the_same(weights.load_trimul(state, direction="outgoing"), torch_module, "outgoing")


# Errors


@pytest.mark.parametrize("prefix", ["", "core."])
def test_every_problem_is_listed_at_once(torch_trimul, tmp_path, prefix):
    tensors = arrays(torch_trimul, "openfold")
    del tensors["linear_b_g.weight"], tensors["layer_norm_out.bias"]
    tensors["linear_x.weight"] = np.zeros((2, 2), np.float32)
    tensors["linear_g.weight"] = np.zeros((H, C), np.float32)
    tensors["linear_z.bias"] = np.zeros(H, np.float32)
    tensors["layer_norm_in.bias"] = np.zeros(C, np.int8)
    path = tmp_path / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_trimul(path, direction="outgoing", prefix=prefix)
    assert str(error.value).splitlines() == [
        f"{path} does not fit a triangle multiplicative update of OpenFold and Protenix with C=12 and H=8:",
        "  missing     layer_norm_out.bias (8,)",
        "  missing     linear_b_g.weight (8, 12)",
        "  unexpected  linear_x.weight (2, 2)",
        "  not float   layer_norm_in.bias int8",
        "  misshapen   linear_g.weight (8, 12); expected (12, 12)",
        "  misshapen   linear_z.bias (8,); expected (12,)",
    ]


def test_names_of_no_family(torch_trimul):
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_trimul({"norm.weight": np.ones(C), "proj.weight": np.ones((H, C))}, direction="outgoing")
    message = str(error.value)
    assert message.startswith("the state dict holds no triangle multiplicative update under prefix=''; expected")
    assert (
        "lucidrains and GPU MODE: norm, left_proj, left_gate, right_proj, right_gate, out_gate, to_out" in message
    )
    assert "Boltz: norm_in, p_in, g_in, g_out, norm_out, p_out" in message
    assert message.endswith("It holds norm.weight, proj.weight")
    with pytest.raises(weights.CheckpointError, match="It holds nothing"):
        weights.load_trimul({}, direction="outgoing")


@pytest.mark.parametrize("prefix", ["", "blocks.0.", "blocks.0.tri_mul"])
def test_a_wrong_prefix(torch_trimul, prefix):
    tensors = {f"blocks.0.tri_mul.{name}": t for name, t in arrays(torch_trimul, "boltz").items()}
    with pytest.raises(weights.CheckpointError, match=r"may be one under prefix='blocks\.0\.tri_mul\.'$"):
        weights.load_trimul(tensors, direction="outgoing", prefix=prefix)


def test_sizes_that_nothing_tells(torch_trimul):
    tensors = arrays(torch_trimul, "openfold")
    del tensors["layer_norm_in.weight"]
    with pytest.raises(weights.CheckpointError, match=r"missing     layer_norm_in\.weight \(12,\)"):
        weights.load_trimul(tensors, direction="outgoing")
    del tensors["linear_z.weight"]
    with pytest.raises(
        weights.CheckpointError, match=r"has none of layer_norm_in\.weight, linear_z\.weight, which"
    ):
        weights.load_trimul(tensors, direction="outgoing")


def test_arguments(torch_trimul, tmp_path):
    tensors = arrays(torch_trimul, "boltz")
    with pytest.raises(ValueError, match=r"direction='in' is unknown; expected one of \('outgoing', 'incoming'\)"):
        weights.load_trimul(tensors, direction="in")
    with pytest.raises(TypeError, match="dtype is int8; expected float16, bfloat16 or float32"):
        weights.load_trimul(tensors, direction="outgoing", dtype="int8")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.pt does not exist"):
        weights.load_trimul(tmp_path / "nowhere.pt", direction="outgoing")
    path = tmp_path / "cut.safetensors"
    save_file(tensors, path)
    Path(path).write_bytes(path.read_bytes()[:-1])
    with pytest.raises(weights.CheckpointError, match=r"cut\.safetensors .*truncated"):
        weights.load_trimul(path, direction="outgoing")
