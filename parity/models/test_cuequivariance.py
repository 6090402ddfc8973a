"""`pallas_models.cuequivariance` against its formulas in float64, and cuEquivariance where it is installed."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import cuequivariance
from parity.support.common import IMPLEMENTATIONS, assert_close, assert_gradients_close, normal
from parity.support.tolerances import CHAIN, DEEP, GRADIENT, LONG, MODEL, OP, SHORT

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def tensors(arrays):
    """The arrays as torch's tensors: masks of bool, all else in float64, with a gradient."""
    torch = pytest.importorskip("torch", reason="torch is not installed: the formulas are written in it")

    def tensor(x):
        if x.dtype == bool:
            return torch.tensor(np.asarray(x))
        return torch.tensor(np.asarray(x, np.float64), requires_grad=True)

    return {name: None if x is None else tensor(x) for name, x in arrays.items()}


def norm(x, weight, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + (
        0.0 if bias is None else bias
    )


def linear(x, weight, bias=None):
    return x @ weight.T + (0.0 if bias is None else bias)


def update(x, direction, mask, *, eps=1e-5, **w):
    """The triangle multiplicative update, as documented."""
    import torch

    z = norm(x, w["norm_in_weight"], w["norm_in_bias"], eps)
    gates = linear(z, w["g_in_weight"], w.get("g_in_bias")).sigmoid()
    both = gates * linear(z, w["p_in_weight"], w.get("p_in_bias"))
    a, b = (both if mask is None else both * mask[..., None]).chunk(2, -1)
    equation = {"outgoing": "...ikd,...jkd->...ijd", "incoming": "...kid,...kjd->...ijd"}[direction]
    y = norm(torch.einsum(equation, a, b), w["norm_out_weight"], w["norm_out_bias"], eps)
    gate = linear(z, w["g_out_weight"], w.get("g_out_bias")).sigmoid()
    return gate * linear(y, w["p_out_weight"], w.get("p_out_bias"))


def attention(q, k, v, bias, mask, scale):
    """Triangle attention, as documented."""
    scores = scale * (q @ k.transpose(-1, -2)) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e9)
    return scores.softmax(-1) @ v


def update_weights(rng, c, hidden, c_out, *, biases=True, dtype="float32"):
    draw = functools.partial(normal, rng, dtype=dtype)
    found = {
        "norm_in_weight": draw(c, scale=0.3, shift=1.0),
        "norm_in_bias": draw(c, scale=0.3),
        "p_in_weight": draw(2 * hidden, c, scale=c**-0.5),
        "g_in_weight": draw(2 * hidden, c, scale=c**-0.5),
        "norm_out_weight": draw(hidden, scale=0.3, shift=1.0),
        "norm_out_bias": draw(hidden, scale=0.3),
        "p_out_weight": draw(c_out, hidden, scale=hidden**-0.5),
        "g_out_weight": draw(c_out, c, scale=c**-0.5),
    }
    sizes = {"p_in_bias": 2 * hidden, "g_in_bias": 2 * hidden, "p_out_bias": c_out, "g_out_bias": c_out}
    return found | ({name: draw(size, scale=0.5) for name, size in sizes.items()} if biases else {})


# The triangle multiplicative update


@pytest.mark.covering(1)
@implementations
@pytest.mark.parametrize(
    "direction, batch, masks, hidden, c_out, biases",
    [
        ("outgoing", (2,), (2,), 16, 16, True),
        ("incoming", (2,), (2,), 16, 16, False),
        ("incoming", (2, 1), (3,), 16, 16, True),  # leading axes are broadcast
        ("outgoing", (), None, 8, 16, True),  # as cuequivariance_torch has it: H is not C
        ("outgoing", (), (), 16, 40, True),  # D_out is not C
        ("incoming", (1,), (1,), 16, 5, False),
    ],
)
def test_update(implementation, direction, batch, masks, hidden, c_out, biases):
    rng, n, c = np.random.default_rng(0), 7, 16
    x = normal(rng, *batch, n, n, c)
    mask = None if masks is None else normal(rng, *masks, n, n)
    arrays = {"x": x, **update_weights(rng, c, hidden, c_out, biases=biases)}
    arrays |= {} if mask is None else {"mask": mask}

    def ours(*given):
        return cuequivariance.triangle_multiplicative_update(
            **dict(zip(arrays, given, strict=True)),
            direction=direction,
            precision=cuequivariance.TriMulPrecision.IEEE,
            implementation=implementation,
        )

    given = tensors(arrays)
    expected = update(**{"mask": None, **given}, direction=direction)
    out = jax.jit(ours)(*arrays.values())
    assert out.dtype == x.dtype
    assert_close(out, expected.detach().numpy(), CHAIN)
    cotangent = normal(rng, *expected.shape)
    expected.backward(tensors({"": cotangent})[""])
    wanted = [tensor.grad.numpy() for tensor in given.values()]
    assert_gradients_close(ours, list(arrays.values()), cotangent, wanted, DEEP)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_update_in_half_precision(dtype):
    rng, n, c = np.random.default_rng(1), 7, 16
    arrays = {"x": normal(rng, 1, n, n, c, dtype=dtype), **update_weights(rng, c, c, c, dtype=dtype)}
    mask = np.asarray(rng.integers(0, 2, (1, n, n)), bool)
    out = jax.jit(cuequivariance.triangle_multiplicative_update)(**arrays, mask=mask)
    assert out.dtype == jnp.dtype(dtype)
    expected = update(**tensors(arrays), mask=tensors({"": mask})[""], direction="outgoing")
    assert_close(out, expected.detach().numpy(), MODEL[dtype])


def test_what_is_not_given_is_drawn():
    """The norms are ones and zeros, projections normal with a variance of 1 / C; each of a key of its own."""
    x, key = normal(np.random.default_rng(2), 5, 5, 128), jax.random.key(3)
    update = cuequivariance.triangle_multiplicative_update
    shapes = [(256, 128), (256, 128), (128, 128), (128, 128)]
    initial = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
    drawn = [initial(k, shape) for k, shape in zip(jax.random.split(key, 4), shapes, strict=True)]
    for weight in drawn:
        assert abs(float(jnp.std(weight)) - 128**-0.5) < 0.02 * 128**-0.5
    names = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
    given = dict(zip(names, drawn, strict=True))
    ones, zeros = jnp.ones(128), jnp.zeros(128)
    norms = dict(norm_in_weight=ones, norm_in_bias=zeros, norm_out_weight=ones, norm_out_bias=zeros)
    expected = update(x, **given, **norms)
    assert_close(update(x, key=key), expected, SHORT)
    del given["g_in_weight"]
    assert_close(update(x, key=key, **given), expected, SHORT)


def test_fallback_is_plain_xla():
    rng = np.random.default_rng(4)
    arrays = {"x": normal(rng, 5, 5, 16), **update_weights(rng, 16, 16, 16)}
    update = functools.partial(cuequivariance.triangle_multiplicative_update, implementation="interpret")
    assert "pallas_call" in str(jax.make_jaxpr(lambda arrays: update(**arrays))(arrays))
    assert "pallas_call" not in str(jax.make_jaxpr(lambda arrays: update(**arrays, fallback=True))(arrays))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(x=np.zeros((5, 4, 16), np.float32)), r"x has shape \(5, 4, 16\); expected \(..., N, N, C\)"),
        (dict(x=np.zeros((5, 5, 16), int)), "x has dtype int64; expected float16"),
        (dict(direction="out"), "direction='out' is unknown"),
        (dict(precision=7), "precision=7 is unknown"),
        (dict(mask=np.zeros((4, 5), bool)), r"mask has shape \(4, 5\); expected \(5, 5\)"),
        (
            dict(p_in_weight=np.zeros((32, 8), np.float32)),
            r"p_in_weight has shape \(32, 8\); expected \(32, 16\), \(2H, C\)",
        ),
        (dict(g_in_bias=np.zeros(16, np.float32)), r"g_in_bias has shape \(16,\); expected \(32,\), \(2H,\)"),
        (
            dict(g_out_weight=np.zeros((8, 16), np.float32)),
            r"g_out_weight has shape .* expected \(16, 16\), \(D_out, C\)",
        ),
        (dict(p_out_weight=None, g_in_weight=None), "g_in_weight, p_out_weight and key are None"),
    ],
)
def test_errors_of_the_update(changes, message):
    rng = np.random.default_rng(5)
    arrays = {"x": normal(rng, 5, 5, 16), **update_weights(rng, 16, 16, 16)}
    with pytest.raises((TypeError, ValueError), match=message):
        cuequivariance.triangle_multiplicative_update(**arrays | changes)


# Triangle attention


def attention_arrays(rng, b=2, n=3, h=2, queries=5, keys=7, d=16, dtype="float32"):
    draw = functools.partial(normal, rng, dtype=dtype)
    return {
        "q": draw(b, n, h, queries, d),
        "k": draw(b, n, h, keys, d),
        "v": draw(b, n, h, keys, d),
        "bias": normal(rng, b, 1, h, queries, keys),
    }


def mask_with_holes(rng, b, n, keys):
    """The last row of the first batch has no valid key."""
    mask = rng.integers(0, 2, (b, n, 1, 1, keys)).astype(bool)
    mask[..., -1] = True
    mask[0, -1] = False
    return mask


@pytest.mark.covering(1)
@implementations
@pytest.mark.parametrize(
    "b, queries, masked, scale",
    [(2, 5, True, 0.3), (1, 5, True, None), (2, 5, False, 1.5), (2, 7, True, 0.3), (1, 7, False, None)],
)
def test_attention(implementation, b, queries, masked, scale):
    rng = np.random.default_rng(6)
    arrays = attention_arrays(rng, b, queries=queries)
    mask = mask_with_holes(rng, b, 3, 7) if masked else None

    def ours(*given):
        return cuequivariance.triangle_attention(*given, mask, scale, implementation=implementation)[0]

    given = tensors(arrays)
    expected = attention(**given, mask=tensors({"": mask})[""], scale=16**-0.5 if scale is None else scale)
    out = jax.jit(ours)(*arrays.values())
    assert out.dtype == jnp.float32
    assert_close(out, expected.detach().numpy(), LONG)
    cotangent = normal(rng, *expected.shape)
    expected.backward(tensors({"": cotangent})[""])
    wanted = [tensor.grad.numpy() for tensor in given.values()]
    assert_gradients_close(ours, list(arrays.values()), cotangent, wanted, GRADIENT)


@pytest.mark.parametrize("queries", [5, 7])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_in_half_precision(dtype, queries):
    rng = np.random.default_rng(7)
    arrays, mask = attention_arrays(rng, queries=queries, dtype=dtype), mask_with_holes(rng, 2, 3, 7)
    out, *_ = jax.jit(cuequivariance.triangle_attention)(**arrays, mask=mask)
    assert out.dtype == jnp.dtype(dtype)
    expected = attention(**tensors(arrays), mask=tensors({"": mask})[""], scale=0.25)
    assert_close(out, expected.detach().numpy(), OP[dtype])


def test_statistics_of_attention():
    """Log-sum-exp and maximum make the softmax; they are computed where they are used, and have no gradient."""
    rng = np.random.default_rng(8)
    arrays, mask = attention_arrays(rng), mask_with_holes(rng, 2, 3, 7)
    _, lse, most = cuequivariance.triangle_attention(**arrays, mask=mask, scale=0.3)
    q, k, _, bias = (x.detach() for x in tensors(arrays).values())
    scores = (0.3 * (q @ k.transpose(-1, -2)) + bias).numpy()
    scores = np.where(mask, scores, -1e9)
    expected = scores.max(-1, keepdims=True)
    assert lse.dtype == most.dtype == jnp.float32
    assert_close(most, expected, LONG)
    assert_close(lse, np.log(np.exp(scores - expected).sum(-1, keepdims=True)), LONG)

    def all_of(arrays):
        return cuequivariance.triangle_attention(**arrays, mask=mask, scale=0.3)

    text = jax.jit(lambda arrays: all_of(arrays)[0]).lower(arrays).compile().as_text()
    assert len(text) < 0.8 * len(jax.jit(all_of).lower(arrays).compile().as_text())
    gradients = jax.grad(lambda arrays: sum(jnp.sum(x) for x in all_of(arrays)[1:]))(arrays)
    assert all(not np.any(g) for g in gradients.values())


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(q=np.zeros((3, 2, 5, 16), np.float32)), r"q has shape .*; expected 5 axes, \(B, N, H, Q or K, D\)"),
        (dict(k=np.zeros((2, 3, 2, 7, 8), np.float32)), r"k has shape .*; expected \(2, 3, 2, 7, 16\)"),
        (dict(v=np.zeros((2, 3, 2, 5, 16), np.float32)), r"v has shape .*; expected .* the shape of k"),
        (dict(v=np.zeros((2, 3, 2, 7, 16), np.float16)), "v has dtype float16 and q has dtype float32"),
        (dict(bias=np.zeros((2, 3, 2, 5, 7), np.float32)), r"bias has shape .*; expected \(2, 1, 2, 5, 7\)"),
        (dict(mask=np.zeros((2, 3, 7), bool)), r"mask has shape .*; expected \(2, 3, 1, 1, 7\)"),
        (dict(mask=np.zeros((2, 3, 1, 1, 7), np.float32)), "mask has dtype float32; expected bool or an integer"),
    ],
)
def test_errors_of_attention(changes, message):
    arrays = {**attention_arrays(np.random.default_rng(9)), "mask": None, "scale": 1.0}
    with pytest.raises((TypeError, ValueError), match=message):
        cuequivariance.triangle_attention(**arrays | changes)


@pytest.mark.parametrize("queries, keys", [(5, 7), (3, 3)])
def test_attention_under_vmap(queries, keys):
    rng = np.random.default_rng(17)
    arrays, mask = attention_arrays(rng, queries=queries, keys=keys), mask_with_holes(rng, 2, 3, keys)
    each = {name: x[:, None] for name, x in arrays.items()}
    found = jax.jit(jax.vmap(cuequivariance.triangle_attention))(**each, mask=mask[:, None])
    for x, expected in zip(found, jax.jit(cuequivariance.triangle_attention)(**arrays, mask=mask), strict=True):
        assert_close(x[:, 0], expected, LONG)


# Attention with a bias of pairs


def pair_bias_arrays(rng, b=2, m=1, n=6, c=24, h=3, d=16, c_z=10, dtype="float32"):
    draw, inner = functools.partial(normal, rng, dtype=dtype), h * d
    return {
        "single_repr": draw(b * m, n, c),
        "pair_repr": draw(b, n, n, c_z),
        "w_ln_a": draw(c, scale=0.3, shift=1.0),
        **{f"w_proj_{x}": draw(inner, c, scale=c**-0.5) for x in "qkvg"},
        "w_proj_o": draw(c, inner, scale=inner**-0.5),
        "w_proj_z": draw(h, c_z, scale=c_z**-0.5),
        "w_ln_z": draw(c_z, scale=0.3, shift=1.0),
    }


def pair_bias_options(rng, c=24, inner=48, h=3, c_z=10):
    """Everything that may be left out."""
    biases = {f"b_proj_{x}": normal(rng, inner, scale=0.3) for x in "qkvg"}
    sizes = {"b_ln_a": c, "b_proj_o": c, "b_proj_z": h, "b_ln_z": c_z, "b_ln_q": inner, "b_ln_k": inner}
    biases |= {name: normal(rng, size, scale=0.3) for name, size in sizes.items()}
    return biases | {f"w_ln_{x}": normal(rng, inner, scale=0.3, shift=1.0) for x in "qk"}


def attend_pairs(single_repr, pair_repr, mask, *, num_heads, rms=False, **w):
    """Attention with a bias of pairs, as documented, and the bias."""

    def normalised(x, weight, bias):
        if rms:
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        return norm(x, weight, bias)

    m = len(single_repr) // len(pair_repr)
    a = normalised(single_repr, w["w_ln_a"], w.get("b_ln_a"))
    q, k, v, g = (linear(a, w[f"w_proj_{x}"], w.get(f"b_proj_{x}")) for x in "qkvg")
    if "w_ln_q" in w:
        q, k = normalised(q, w["w_ln_q"], w.get("b_ln_q")), normalised(k, w["w_ln_k"], w.get("b_ln_k"))
    z = linear(normalised(pair_repr, w["w_ln_z"], w.get("b_ln_z")), w["w_proj_z"], w.get("b_proj_z"))
    z = z.permute(0, 3, 1, 2)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + z.repeat_interleave(m, 0)
    if mask is not None:
        kept = mask if len(mask) == len(q) else mask.repeat_interleave(m, 0)
        scores = scores - 1e6 * (1.0 - kept.to(scores))[:, None, None]
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return linear(g.sigmoid() * out, w["w_proj_o"], w.get("b_proj_o")), z


@pytest.mark.covering(1)
@implementations
@pytest.mark.parametrize(
    "b, m, masks, options, rms",
    [(2, 1, 2, True, False), (2, 3, 6, False, False), (1, 3, 1, True, False), (2, 1, None, False, True)],
)
def test_pair_bias(implementation, b, m, masks, options, rms):
    rng = np.random.default_rng(10)
    arrays = pair_bias_arrays(rng, b, m) | (pair_bias_options(rng) if options else {})
    mask = None
    if masks is not None:
        mask = rng.integers(0, 2, (masks, 6)).astype(bool)
        mask[:, [0, 2, 5]] = True

    def ours(*given):
        return cuequivariance.attention_pair_bias(
            **{"b_ln_a": None, "b_proj_q": None, **dict(zip(arrays, given, strict=True))},
            mask=mask,
            num_heads=3,
            return_z_proj=True,
            norm_kind="rms_norm" if rms else "layer_norm",
            implementation=implementation,
        )

    given = tensors(arrays)
    expected, expected_z = attend_pairs(**given, mask=tensors({"": mask})[""], num_heads=3, rms=rms)
    out, z = jax.jit(ours)(*arrays.values())
    assert_close(out, expected.detach().numpy(), CHAIN)
    assert_close(z, expected_z.detach().numpy(), CHAIN)
    cotangent = normal(rng, *expected.shape)
    expected.backward(tensors({"": cotangent})[""])
    # Biases of z and of keys change all scores of a query alike: their gradients are 0 but for roundings.
    cancelled = {"b_proj_z", "b_ln_z", "b_ln_k"}
    names = [name for name in arrays if name not in cancelled]

    def of_names(*some):
        return ours(*(arrays | dict(zip(names, some, strict=True))).values())[0]

    wanted = [given[name].grad.numpy() for name in names]
    assert_gradients_close(of_names, [arrays[name] for name in names], cotangent, wanted, DEEP)


def test_pair_bias_that_is_projected_already():
    arrays = pair_bias_arrays(np.random.default_rng(11))
    call = functools.partial(
        cuequivariance.attention_pair_bias, mask=None, num_heads=3, b_ln_a=None, b_proj_q=None
    )
    expected, z = call(**arrays, return_z_proj=True)
    out, none = call(**arrays | {"pair_repr": z, "w_proj_z": None}, is_cached_z_proj=True)
    assert none is None
    assert_close(out, expected, SHORT)
    assert call(**arrays, attn_scale=2.0)[0].shape == expected.shape
    assert np.max(np.abs(call(**arrays, attn_scale=2.0)[0] - expected)) > 1e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pair_bias_in_half_precision(dtype):
    rng = np.random.default_rng(12)
    arrays = pair_bias_arrays(rng, dtype=dtype)
    call = functools.partial(
        cuequivariance.attention_pair_bias, mask=None, num_heads=3, b_ln_a=None, b_proj_q=None
    )
    out, _ = jax.jit(call)(**arrays)
    assert out.dtype == jnp.dtype(dtype)
    expected, _ = attend_pairs(**tensors(arrays), mask=None, num_heads=3)
    assert_close(out, expected.detach().numpy(), MODEL[dtype])


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(single_repr=np.zeros((3, 6, 24), np.float32)), r"single_repr has shape .*\(B \* M, N, C\) with b=2"),
        (dict(pair_repr=np.zeros((2, 6, 5, 10), np.float32)), r"pair_repr has shape .*; expected \(2, 6, 6, 10\)"),
        (dict(is_cached_z_proj=True), r"pair_repr has shape .*; expected \(2, 3, 6, 6\), \(B, H, N, N\)"),
        (dict(num_heads=5), r"w_proj_q has shape \(48, 24\); expected \(H \* D, C\) with num_heads=5"),
        (
            dict(w_proj_v=np.zeros((24, 48), np.float32)),
            r"w_proj_v has shape .*; expected \(48, 24\), \(H \* D, C\)",
        ),
        (dict(w_proj_z=None), "w_proj_z is None; expected"),
        (dict(b_proj_g=np.zeros(3, np.float32)), r"b_proj_g has shape \(3,\); expected \(48,\)"),
        (dict(w_ln_z=np.zeros(3, np.float32)), r"w_ln_z has shape \(3,\); expected \(10,\)"),
        (dict(mask=np.ones((6, 2))), r"mask has shape \(6, 2\); expected \(2, 6\) or \(2, 6\)"),
        (dict(norm_kind="group_norm"), "norm_kind='group_norm' is unknown"),
        (
            dict(norm_kind="rms_norm", b_ln_z=np.zeros(10, np.float32)),
            "b_ln_z .* expected None with norm_kind='rms_norm'",
        ),
    ],
)
def test_errors_of_pair_bias(changes, message):
    arrays = pair_bias_arrays(np.random.default_rng(13))
    arrays |= {"mask": None, "num_heads": 3, "b_ln_a": None, "b_proj_q": None}
    with pytest.raises((TypeError, ValueError), match=message):
        cuequivariance.attention_pair_bias(**arrays | changes)


# cuEquivariance itself, where it is installed


@pytest.mark.parametrize(
    "package, name",
    [
        ("cuequivariance_jax", "triangle_multiplicative_update"),
        ("cuequivariance_jax", "triangle_attention"),
        ("cuequivariance_torch", "attention_pair_bias"),
    ],
)
def test_signature(package, name):
    """The same arguments in the same places with the same defaults; some more of ours may be left out."""
    theirs = inspect.signature(getattr(pytest.importorskip(package), name)).parameters
    ours = inspect.signature(getattr(cuequivariance, name)).parameters
    assert [p for p in ours if p in theirs] == list(theirs)
    assert all(ours[p].kind == ours[p].KEYWORD_ONLY for p in ours if p not in theirs)
    for argument, parameter in theirs.items():
        assert ours[argument].kind == parameter.kind
        assert parameter.default in (parameter.empty, ours[argument].default)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_update_is_cuequivariances(direction):
    theirs = pytest.importorskip("cuequivariance_jax")
    rng = np.random.default_rng(14)
    arrays = {"x": normal(rng, 2, 7, 7, 16), **update_weights(rng, 16, 16, 12)}
    options = dict(mask=normal(rng, 1, 7, 7), direction=direction, precision=theirs.TriMulPrecision.IEEE)
    expected = theirs.triangle_multiplicative_update(**arrays, **options)
    assert_close(cuequivariance.triangle_multiplicative_update(**arrays, **options), expected, CHAIN)
    x, key = arrays["x"], jax.random.key(15)
    expected = theirs.triangle_multiplicative_update(x, direction, key)
    assert_close(cuequivariance.triangle_multiplicative_update(x, direction, key), expected, CHAIN)


@pytest.mark.parametrize("queries, masked", [(5, False), (5, True), (7, True)])
def test_attention_is_cuequivariances(queries, masked):
    theirs = pytest.importorskip("cuequivariance_jax")
    rng = np.random.default_rng(16)
    arrays = attention_arrays(rng, queries=queries)
    mask = mask_with_holes(rng, 2, 3, 7) if masked else None
    expected = theirs.triangle_attention(**arrays, mask=mask, scale=0.3)
    found = cuequivariance.triangle_attention(**arrays, mask=mask, scale=0.3)
    assert type(found) is type(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert_close(x, y, 2 * LONG)

    def gradients(function):
        return jax.grad(lambda arrays: jnp.sum(function(**arrays, mask=mask, scale=0.3)[0] ** 2))(arrays)

    expected = gradients(theirs.triangle_attention)
    for name, gradient in gradients(cuequivariance.triangle_attention).items():
        assert_close(gradient, expected[name], 2 * GRADIENT)
