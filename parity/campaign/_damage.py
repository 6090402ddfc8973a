"""Ways to damage files, bytes anywhere and values in JSON, which say in words what they did; and cases of them."""

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parity.campaign._case import Case
from parity.campaign._sandbox import Sandbox

DEEP = "0123456789 a very deep value"  # stands for one in what `hostile` gives, as json.dumps writes none
Rng = np.random.Generator


def pick(rng: Rng, options: Any) -> Any:
    """One of the options."""
    options = list(options)
    return options[int(rng.integers(len(options)))]


def damaged(rng: Rng, content: bytes) -> tuple[bytes, str]:
    """The content with some of its bytes changed, cut off, removed, repeated or added."""
    data = bytearray(content)
    size = len(data)
    kind = pick(rng, ("flip", "flip", "start", "cut", "remove", "repeat", "insert", "zero", "append"))
    at = int(rng.integers(max(1, size)))
    length = int(2 ** rng.uniform(0, np.log2(size + 2)))
    if kind == "flip":
        for place in rng.integers(max(1, size), size=int(rng.integers(1, 9))):
            if size:
                data[place] ^= 1 << int(rng.integers(8))
    elif kind == "start":  # where headers are
        at = int(rng.integers(max(1, min(size, 600))))
        data[at : at + 1] = rng.bytes(1)
    elif kind == "cut":
        del data[at:]
    elif kind == "remove":
        del data[at : at + length]
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    elif kind == "insert":
        data[at:at] = rng.bytes(length % 4096)
    elif kind == "zero":
        data[at : at + length] = bytes(len(data[at : at + length]))
    else:
        data += rng.bytes(length)
    return bytes(data), f"{kind} at {at}, length {length}"


def hostile(rng: Rng, value: Any) -> Any:
    """A value that may stand in place of another one in JSON."""
    integers = (
        0,
        -1,
        1,
        2,
        3,
        7,
        10**5,
        10**6,
        2**31 - 1,
        2**31,
        2**32,
        10**9,
        2**62,
        2**63,
        10**18,
        10**30,
        -(2**63),
    )
    floats = (float("nan"), float("inf"), -float("inf"), -1.5, 0.0, 1e-320, 1e308, 0.5)
    others = (True, False, None, "", "64", "abc", "1e-12", "\ud800", "../x", "/", "\x00", "x" * 100_000, DEEP)
    containers: tuple[Any, ...] = ([], {}, [0], [value], {"a": value}, [[[[]]]], [value] * 1000)
    options = (integers, floats, others, containers)
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.3:
        return int(value + rng.integers(-3, 4))
    return pick(rng, pick(rng, options))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside of a JSON value."""
    found = [path] if path else []
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def changed(rng: Rng, value: Any) -> tuple[Any, str]:
    """A JSON value in which one value is another, is gone, or has another name; or another value altogether."""
    value = json.loads(json.dumps(value))
    paths = places(value)
    if not paths or rng.random() < 0.02:
        new = hostile(rng, value)
        return new, f"all = {new!s:.40}"
    *parents, last = pick(rng, paths)
    node = value
    for key in parents:
        node = node[key]
    where = ".".join(map(str, (*parents, last)))
    kind = pick(rng, ("set", "set", "set", "set", "remove", "rename"))
    if kind == "set" or isinstance(node, list):
        node[last] = hostile(rng, node[last])
        return value, f"{where:.80} = {node[last]!s:.40}"
    old = node.pop(last)
    if kind == "remove":
        return value, f"without {where:.80}"
    name = pick(
        rng, (last + "x", "bert." + last, "model." + last, last.upper(), "".join(rng.permutation(list(last))))
    )
    node[name] = old
    return value, f"{where:.80} renamed {name:.40}"


def dumps(value: Any) -> str:
    """JSON text; `DEEP` becomes a value that is nested 3000 deep."""
    return json.dumps(value).replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000)


def changed_text(rng: Rng, text: bytes) -> tuple[bytes, str]:
    """A JSON file, with a value changed or, at times, bytes."""
    if rng.random() < 0.2:
        return damaged(rng, text)
    value, what = changed(rng, json.loads(text))
    return dumps(value).encode(), what


Change = Callable[[Rng, str, Path], str]


def damaged_files(
    seed: int, kinds: Sequence[str], change: Change, sandbox: Sandbox, more: Callable[[], dict[str, Any]] = dict
) -> Iterator[Case]:
    """Files with a damage each, which a sandbox uses.

    `change(rng, kind, folder)` writes one and says how it is damaged; `more()` is what requests hold besides.
    """
    for number in itertools.count():
        kind = pick(np.random.default_rng([seed, number]), kinds)
        run = functools.partial(_use, seed, number, kind, change, sandbox, more)
        yield Case(name=f"a damaged file: {kind}", run=run)


def _use(
    seed: int, number: int, kind: str, change: Change, sandbox: Sandbox, more: Callable[[], dict[str, Any]]
) -> str | None:
    rng = np.random.default_rng([seed, number, 1])
    with tempfile.TemporaryDirectory(prefix="campaign-") as name:
        what = change(rng, kind, Path(name))
        size = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())
        wrong = sandbox.ask({"path": name, "kind": kind, "size": size, "named": [name]} | more())
        return wrong and f"{what}: {wrong}"
