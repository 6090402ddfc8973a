"""Nested transformations of every op and of models, under JAX's settings, each against the same of plain XLA.

`DRAWS` cases after one another share a program, as in `ops`: a call, transformations from the innermost on, and
what JAX is set to. What they are compared with is the "xla" implementation of float32 operands, transformed alike
and under no setting. Of an eager program only the first case is eager, which takes as long each time.
"""

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_models import gpt2, minilm, modernbert, qwen3, training, trimul
from parity.campaign import ops
from parity.campaign._case import Case
from parity.support.bounded import HALF_ULP, apart
from parity.support.common import random_params
from parity.support.draws import Input, Pick
from parity.support.shaken import shaken
from parity.support.tolerances import DEEP, MODEL_GRADIENT, OP
from weights import tree

DRAWS = 32
MODELS = 0.2  # the share of models among the calls
# As many of an op and its derivatives follow one another: more of them compile for long.
DEEPEST, ORDERS = 3, 2

Arrays = dict[str, Any]
# Of the arrays that are differentiated and the others; the results are a pytree of arrays.
Function = Callable[[Arrays, Arrays], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A function that is transformed.

    Attributes:
      name: of op or model, with its arguments.
      row: which row of the report's table it is of.
      dtype: the dtype of its arrays with the fewest bits.
      of: the function by implementation.
      arrays: by a generator, floating-point arrays and others.
      mapped: the arrays that `vmap` may map over.
      implementation: the one that the call names, None for the best.
      deep: whether it is many ops after one another.
    """

    name: str
    row: str
    dtype: str
    of: Callable[[str | None], Function]
    arrays: Callable[[np.random.Generator], tuple[Arrays, Arrays]]
    mapped: tuple[str, ...]
    implementation: str | None
    deep: bool = False


def _of_op(pick: Pick, implementation: str | None, finite: bool) -> Call:
    p = ops.call(pick, implementation)
    while not ops.differentiable(p):
        p = ops.call(pick, implementation)
    if finite:
        p.options.pop("return_lse", None)  # infinite for rows without keys
    if p.op == "softmax" and pick.chance(0.2):  # an array of one number is a scale too
        p.options.pop("scale", None)
        p.inputs["scale"] = Input(pick.of(((), (1,))), "float32", "scale")

    def of(name: str | None) -> Function:
        plain = dataclasses.replace(p, implementation=name)
        return lambda floats, rest: plain.call(floats | rest)

    def arrays(rng: np.random.Generator) -> tuple[Arrays, Arrays]:
        drawn = {name: ops.values(rng, spec) for name, spec in p.inputs.items()}
        if finite and "bias" in drawn:
            drawn["bias"] = np.maximum(drawn["bias"], np.asarray(-1e4, drawn["bias"].dtype))
        return {name: drawn.pop(name) for name in p.floats}, drawn

    mapped = tuple(name for name, spec in p.inputs.items() if spec.kind != "scale")
    found = {p.dtype, *(p.inputs[name].dtype for name in p.floats)}
    found |= {p.options.get(name) or p.dtype for name in ("out_dtype", "compute_dtype")}
    return Call(str(p), p.op, max(found, key=OP.__getitem__), of, arrays, mapped, p.implementation)


_SIZES = dict(vocab_size=40, hidden_size=32, num_heads=2, intermediate_size=48, max_positions=16)
_REMAT = {
    "none": "none",
    "block": "block",
    "names": jax.checkpoint_policies.save_only_these_names("qkv", "mlp_up"),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


MODEL_NAMES = ("gpt2.loss", "qwen3.loss", "gpt2", "minilm", "modernbert", "contrastive", "trimul")


def _of_model(pick: Pick, implementation: str | None) -> Call:
    name = pick.of(("gpt2.loss", *MODEL_NAMES))
    layers, masked = pick.of((1, 2)), pick.of((None, "int32", "bool", "int8"))
    if name == "trimul":
        config: Any = trimul.TriMulConfig(channels=16, hidden=16, use_bias=pick.chance(0.5))
        init: Any = trimul.init
    elif name == "qwen3.loss":
        config, init = qwen3.Qwen3Config(**_SIZES, num_layers=layers, num_kv_heads=1, head_dim=16), qwen3.init
    elif name == "modernbert":
        config = modernbert.ModernBertConfig(**_SIZES, num_layers=layers, local_attention=4)
        init = modernbert.init
    elif name.startswith("gpt2"):
        config, init = gpt2.GPT2Config(**_SIZES, num_layers=layers), gpt2.init
    else:
        config, init = minilm.MiniLMConfig(**_SIZES, num_layers=layers), minilm.init
    params = tree.flatten(random_params(config, init=init))
    remat = pick.of(tuple(_REMAT)) if name.endswith("loss") else "none"
    stacked = name.endswith("loss") and pick.chance(0.5)

    def of(implementation: str | None) -> Function:
        options: Any = dict(config=config, implementation=implementation)
        if name.endswith("loss"):
            options["remat"] = _REMAT[remat]

        def function(floats: Arrays, rest: Arrays) -> Any:
            params = tree.unflatten({key: x for key, x in floats.items() if key != "x"})
            params = training.stack_layers(params) if stacked else params
            ids, mask = rest.get("ids"), rest.get("mask")
            match name:
                case "trimul":
                    return trimul.trimul(
                        params,
                        floats["x"],
                        direction="incoming",
                        compute_dtype="float32",
                        implementation=implementation,
                    )
                case "gpt2" | "gpt2.loss" | "qwen3.loss":
                    module = qwen3 if name == "qwen3.loss" else gpt2
                    return (module.logits if name == "gpt2" else module.loss)(params, ids, mask, **options)
                case "modernbert":
                    return modernbert.encode(params, ids, mask, **options)
                case "contrastive":
                    return minilm.contrastive_loss(params, (ids, mask), (ids[::-1], mask[::-1]), **options)
                case _:
                    return minilm.embed(params, ids, mask, **options)

        return function

    def arrays(rng: np.random.Generator) -> tuple[Arrays, Arrays]:
        if name == "trimul":
            return params | {"x": rng.normal(size=(1, 5, 5, 16)).astype("float32")}, {}
        mask = np.arange(7) < (rng.integers(2, 8, (3, 1)) if masked else 7) * np.ones((3, 1))
        return dict(params), {
            "ids": rng.integers(0, 40, (3, 7)).astype("int32"),
            "mask": mask.astype(masked or "int32"),
        }

    text = f"{name} {implementation}: layers={layers} {masked=} {remat=} {stacked=}"
    mapped = ("x",) if name == "trimul" else ("ids",)
    return Call(text, name, "float32", of, arrays, mapped, implementation, deep=True)


# Transformations: each makes of a function another one of the same arguments.


def _fixed(x: Any, phase: float) -> jax.Array:
    """Numbers of the shape and dtype of an array, in [-1, 1], that depend on nothing.

    They are multiples of 1/16, which every dtype holds, and holds three quarters of: a derivative along rounded
    numbers is another one where they cancel, in a mean of many rows for one.
    """
    numbers = jnp.round(16 * jnp.cos(jnp.arange(x.size, dtype=jnp.float32) * 1.7 + phase)) / 16
    return numbers.reshape(x.shape).astype(x.dtype)


def _finite(out: Any) -> list[jax.Array]:
    """The results in float32; 0 for infinite ones, which are of rows without keys."""
    wide = [x.astype(jnp.float32) for x in jax.tree.leaves(out)]
    return [jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) for x in wide]


def _loss(out: Any) -> jax.Array:
    """A number that depends on every result in another measure: smooth, curved, a sum of positive terms."""
    total = jnp.zeros((), jnp.float32)
    for x in _finite(out):
        total += jnp.sum((jnp.sqrt(1 + x * x) + 0.5 * x) * (1 + 0.7 * _fixed(x, 5.0)))
    return total


def _moved(floats: Arrays, t: jax.Array) -> Arrays:
    """The arrays moved along two directions."""
    return {
        name: x + (t[0] * _fixed(x, 0.0).astype(t.dtype) + t[1] * _fixed(x, 1.0).astype(t.dtype)).astype(x.dtype)
        for name, x in floats.items()
    }


def _scaled(floats: Arrays, factor: jax.Array) -> Arrays:
    return {name: x * factor.astype(x.dtype) for name, x in floats.items()}


_NOTHING = functools.partial(jnp.zeros, 2, jnp.float32)
_FACTORS = functools.partial(jnp.asarray, (1.0, 0.75), jnp.float32)


def _vmap(f: Function, over: dict[str, int], out_axis: int) -> Function:
    def copies(name: str, x: Any) -> Any:
        if name not in over:
            return x
        other = x * jnp.asarray(0.75, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.roll(x, 1, -1)
        return jnp.stack([x, other], over[name])

    def mapped(floats: Arrays, rest: Arrays) -> Any:
        both = [{name: copies(name, x) for name, x in arrays.items()} for arrays in (floats, rest)]
        axes = tuple({name: over.get(name) for name in arrays} for arrays in both)
        return jax.vmap(f, axes, out_axis)(*both)

    return mapped


def _grad(f: Function) -> Function:
    return lambda floats, rest: jax.grad(lambda floats: _loss(f(floats, rest)))(floats)


def _vjp(f: Function) -> Function:
    def pulled(floats: Arrays, rest: Arrays) -> Any:
        out, pull = jax.vjp(lambda floats: f(floats, rest), floats)
        return pull(jax.tree.map(lambda x: _fixed(x, 2.0), out))[0]

    return pulled


def _jvp(f: Function) -> Function:
    def pushed(floats: Arrays, rest: Arrays) -> Any:
        along = {name: _fixed(x, 3.0) for name, x in floats.items()}
        return jax.jvp(lambda floats: _finite(f(floats, rest)), (floats,), (along,))[1]

    return pushed


def _linearize(f: Function) -> Function:
    def pushed(floats: Arrays, rest: Arrays) -> Any:
        _, push = jax.linearize(lambda floats: _finite(f(floats, rest)), floats)
        return push({name: _fixed(x, 4.0) for name, x in floats.items()})

    return pushed


def _jacrev(f: Function) -> Function:
    def projected(floats: Arrays, rest: Arrays) -> jax.Array:
        out = _finite(f(floats, rest))
        return jnp.stack([sum(jnp.sum(x * _fixed(x, phase)) for x in out) for phase in (0.0, 1.0, 2.0)])

    return lambda floats, rest: jax.jacrev(projected)(floats, rest)


def _jacfwd(f: Function) -> Function:
    return lambda floats, rest: jax.jacfwd(lambda t: _finite(f(_moved(floats, t), rest)))(_NOTHING())


def _hessian(f: Function) -> Function:
    return lambda floats, rest: jax.hessian(lambda t: _loss(f(_moved(floats, t), rest)))(_NOTHING())


def _custom_vjp(f: Function) -> Function:
    @jax.custom_vjp
    def function(floats: Arrays, rest: Arrays) -> Any:
        return f(floats, rest)

    def forward(floats: Arrays, rest: Arrays) -> Any:
        return jax.vjp(lambda floats: f(floats, rest), floats)

    function.defvjp(forward, lambda pull, cotangent: (*pull(cotangent), None))
    return function


def _scan(f: Function) -> Function:
    def scanned(floats: Arrays, rest: Arrays) -> Any:
        def step(total: jax.Array, factor: jax.Array) -> Any:
            out = f(_scaled(floats, factor), rest)
            return total + _loss(out), out

        return jax.lax.scan(step, jnp.zeros((), jnp.float32), _FACTORS())

    return scanned


def _map(f: Function) -> Function:
    return lambda floats, rest: jax.lax.map(lambda factor: f(_scaled(floats, factor), rest), _FACTORS())


def _fori(f: Function) -> Function:
    """A loop of a known length, which can be differentiated."""

    def looped(floats: Arrays, rest: Arrays) -> Any:
        def body(i: Any, total: jax.Array) -> jax.Array:
            return total + _loss(f(_scaled(floats, _FACTORS()[i]), rest))

        return jax.lax.fori_loop(0, 2, body, jnp.zeros((), jnp.float32))

    return looped


def _while(f: Function) -> Function:
    def looped(floats: Arrays, rest: Arrays) -> Any:
        first = f(floats, rest)

        def body(state: Any) -> Any:
            i, last = state
            elements = sum(x.size for x in jax.tree.leaves(last))
            factor = 1 - 0.25 * jnp.tanh(_loss(last) / elements)
            return i + 1, f(_scaled(floats, factor), rest)

        return jax.lax.while_loop(lambda state: state[0] < 2, body, (jnp.zeros((), jnp.int32), first))[1]

    return looped


def _cond(f: Function) -> Function:
    def chosen(floats: Arrays, rest: Arrays) -> Any:
        first = jnp.ravel(next(iter(floats.values())))[0]
        half = jnp.asarray(0.5, jnp.float32)
        return jax.lax.cond(first > 0, lambda: f(floats, rest), lambda: f(_scaled(floats, half), rest))

    return chosen


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of transformation.

    Attributes:
      of: makes it of a function.
      order: how many derivatives it takes, and
      reverse: whether in reverse mode, or else in forward mode.
      closes: the mode in which its result cannot be differentiated any more.
    """

    of: Callable[..., Function]
    order: int = 0
    reverse: bool = False
    closes: str = ""


KINDS = {
    "vmap": Kind(_vmap),
    "jit": Kind(jax.jit),
    "checkpoint": Kind(jax.checkpoint),
    "grad": Kind(_grad, 1, True),
    "vjp": Kind(_vjp, 1, True),
    "jvp": Kind(_jvp, 1),
    "linearize": Kind(_linearize, 1),
    "jacrev": Kind(_jacrev, 1, True),
    "jacfwd": Kind(_jacfwd, 1),
    "hessian": Kind(_hessian, 2),
    "custom_vjp": Kind(_custom_vjp, closes="forward"),
    "scan": Kind(_scan),
    "map": Kind(_map),
    "fori": Kind(_fori),
    "while": Kind(_while, closes="reverse"),
    "cond": Kind(_cond),
}
_SHARES = dict.fromkeys(KINDS, 1.0) | {"vmap": 4.0, "grad": 3.0, "vjp": 2.0, "hessian": 0.5}


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "warnings": _no_warnings,
    "precision": lambda: jax.default_matmul_precision("float32"),
    "disable_jit": lambda: jax.disable_jit(),
}
_SHARES_OF_SETTINGS = dict.fromkeys(SETTINGS, 0.3) | {"disable_jit": 0.03}  # step by step, which takes its time


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A call, its transformations and the settings; each step is a kind and its arguments."""

    call: Call
    steps: tuple[tuple[str, tuple[Any, ...]], ...]
    settings: tuple[str, ...]
    jit: bool

    def __str__(self) -> str:
        steps = [f"{kind}{list(args) if args else ''}" for kind, args in self.steps]
        return " ".join(
            [*self.settings, " of ".join(["jit" if self.jit else "eager", *steps[::-1]]), self.call.name]
        )

    @property
    def orders(self) -> int:
        return sum(KINDS[kind].order for kind, _ in self.steps)

    def of(self, implementation: str | None) -> Function:
        f = self.call.of(implementation)
        for kind, args in self.steps:
            f = KINDS[kind].of(f, *args)
        return f

    @contextlib.contextmanager
    def under_settings(self, *, eager: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in self.settings:
                if eager or name != "disable_jit":
                    stack.enter_context(SETTINGS[name]())
            yield


def _steps(pick: Pick, call: Call) -> Iterator[tuple[str, tuple[Any, ...]]]:
    closed, orders = set[str](), 0
    for _ in range(pick.of((1, 2) if call.deep else range(1, DEEPEST + 1))):
        kind = pick.by(_SHARES)
        found = KINDS[kind]
        modes = {"reverse"} if found.reverse else {"forward"} if found.order == 1 else {"forward", "reverse"}
        if orders + found.order > ORDERS or (found.order and modes & closed):
            continue
        if kind == "custom_vjp" and "reverse" in closed:
            continue  # it differentiates
        if kind == "vmap":
            over = {name: 0 for name in call.mapped if pick.chance(0.5)} or {call.mapped[0]: 0}
            yield kind, (over, 0)
        else:
            yield kind, ()
        closed.add(found.closes)
        orders += found.order


def program(seed: int, index: int, implementation: str | None = None) -> Program:
    """Program `index` of a campaign; `implementation` in place of one that is drawn."""
    pick = Pick(np.random.default_rng([seed, index, 2]))
    settings = (
        ()
        if pick.chance(0.5)
        else tuple(name for name, share in _SHARES_OF_SETTINGS.items() if pick.chance(share))
    )
    debugging = any(name.startswith("debug") for name in settings)
    call = _of_model(pick, implementation) if pick.chance(MODELS) else _of_op(pick, implementation, debugging)
    jit = pick.chance(0.6)
    p = Program(call, tuple(_steps(pick, call)), settings, jit)
    if p.orders and "float16" in call.name:  # does not hold every derivative
        p = dataclasses.replace(p, settings=tuple(name for name in settings if not name.startswith("debug")))
    return p


@functools.lru_cache(maxsize=1)
def _compiled(seed: int, index: int, implementation: str | None) -> tuple[Program, Function, Function, Function]:
    """A program, its function, what that is compared with, and the same with sums that are off."""
    p = program(seed, index, implementation)
    functions = p.of(p.call.implementation), p.of("xla"), shaken(p.of("xla"))
    return p, *map(jax.jit, functions)


def _rounded(rng: np.random.Generator, floats: Arrays, dtype: str) -> Arrays:
    """The arrays in float32, each element off by as much as an op of that dtype may be."""
    unit = OP["float32"] if dtype == "float32" else HALF_ULP[dtype]
    return {
        name: (x * (1 + unit * rng.choice((-1.0, 1.0), x.shape))).astype(np.float32) for name, x in floats.items()
    }


def _tolerances(p: Program) -> tuple[float, float]:
    """Relative to the norm of a result and of all results: an op is right to OP, each derivative doubles it."""
    if p.call.dtype != "float32":
        return 2 * OP[p.call.dtype] * 2**p.orders, 0.1 * OP[p.call.dtype]
    one, several = (DEEP, MODEL_GRADIENT) if p.call.deep else (OP["float32"], OP["float32"])
    return one * 2**p.orders, 0.1 * several


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    seed: int
    index: int
    implementation: str | None
    measured: dict[str, float]

    def __call__(self) -> str | None:
        p, function, reference, off = _compiled(self.seed, self.index // DRAWS, self.implementation)
        rng = np.random.default_rng([self.seed, *divmod(self.index, DRAWS), 2])
        floats, rest = p.call.arrays(rng)
        self.measured["cases"] = 1
        exact = {name: np.asarray(x).astype(np.float32) for name, x in floats.items()}
        expected = reference(exact, rest)
        moved = off(_rounded(rng, exact, p.call.dtype), rest)
        first = self.index % DRAWS == 0
        if first and not p.jit:
            function = p.of(p.call.implementation)
        with p.under_settings(eager=first):
            try:
                given = jax.tree.map(jnp.asarray, (floats, rest))
                out = function(*given)
                jax.block_until_ready(out)
            except jax.errors.JaxRuntimeError as error:
                if "DotThunk" not in str(error):  # XLA for CPUs lacks some products of bfloat16, also einsum's
                    raise
                self.measured["refused"] = 1
                return None
            except NotImplementedError:
                if self.implementation is None and "mosaic" not in str(p.call.implementation):
                    raise
                self.measured["refused"] = 1
                return None
        message, part = apart(out, expected, *_tolerances(p), moved, OP[p.call.dtype] * 2**p.orders)
        self.measured["largest part of its bound"] = part
        return message


def cases(seed: int, implementation: str | None = None) -> Iterator[Case]:
    """Transformed calls; see the module."""
    for number in itertools.count():
        p = program(seed, number, implementation)
        kind = "derivative" if p.orders else "value"
        for draw in range(DRAWS):
            trial = _Trial(seed, number * DRAWS + draw, implementation, {})
            row = (f"transformed {p.call.row}", p.call.dtype, str(p.call.implementation), kind)
            yield Case(str(p), trial, row, trial.measured)
