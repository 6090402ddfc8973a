"""Damaged checkpoints of every kind: each loads, or is refused by name, in time and in little memory."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import shutil
import struct
import tempfile
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save as serialize

import weights
from pallas_models import gpt2, qwen3
from pallas_models.gpt2 import GPT2Config
from pallas_models.minilm import Encoder, MiniLMConfig
from pallas_models.qwen3 import Qwen3Config
from parity.campaign._case import Case
from parity.campaign._damage import Rng, changed, changed_text, damaged, dumps, pick
from parity.campaign._sandbox import Sandbox
from parity.models import decoder_checkpoints
from parity.models.decoder_checkpoints import gpt2_json, qwen3_json
from parity.support.common import random_params
from parity.weights import checkpoints
from weights import families, loading

DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F4": 4, "F8_E4M3": 8, "F8_E5M2": 8, "F16": 16, "BF16": 16, "U16": 16}
DTYPE_BITS |= {"F64": 64, "I64": 64, "C64": 64}
TORCH = importlib.util.find_spec("torch") is not None

# What may be written


MINILM = MiniLMConfig(
    vocab_size=19, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=12, max_positions=10
)
GPT2 = GPT2Config(vocab_size=17, hidden_size=8, num_layers=2, num_heads=2, intermediate_size=12, max_positions=10)
QWEN3 = Qwen3Config(
    vocab_size=17, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=12,
    max_positions=32,
)  # fmt: skip
CONFIGS = {"minilm": MINILM, "gpt2": GPT2, "qwen3": QWEN3}


def _tensors(family: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Official tensors of a small model, and its config.json."""
    if family == "minilm":
        return checkpoints.bert_tensors(MINILM), checkpoints.bert_config(MINILM)
    if family == "gpt2":
        return decoder_checkpoints.gpt2_tensors(random_params(GPT2, init=gpt2.init)), gpt2_json(GPT2)
    params = random_params(QWEN3, init=qwen3.init)
    return decoder_checkpoints.qwen3_tensors(params, QWEN3), qwen3_json(QWEN3)


def _folder(family: str, folder: Path) -> None:
    tensors, config = _tensors(family)
    decoder_checkpoints.write(folder, tensors, config)
    if family == "minilm":
        checkpoints.word_tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')


def _sharded(family: str, folder: Path) -> None:
    decoder_checkpoints.write(folder, *_tensors(family), shards=3)


def _stored(family: str, folder: Path) -> None:
    config = CONFIGS[family]
    path = weights.save(random_params(config, init=families.of(config).init), folder, config=config)
    header, data = _tensor_file(path.read_bytes())
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))  # the library writes it in any order
    path.write_bytes(_with_header(header, data))


def _torch(family: str, folder: Path, *, legacy: bool) -> None:
    import torch

    tensors, config = _tensors(family)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    state = {name: torch.tensor(np.asarray(tensor)) for name, tensor in tensors.items()}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)


def trimul_tensors() -> dict[str, np.ndarray]:
    """A triangle multiplicative update with the names of GPU MODE."""
    rng, c, h = np.random.default_rng(0), 8, 4
    tensors = {f"{name}.weight": rng.normal(size=(h, c)) for name in ("left_proj", "left_gate", "right_proj")}
    tensors |= {f"{name}.weight": rng.normal(size=(h, c)) for name in ("right_gate", "out_gate")}
    tensors |= {f"norm.{leaf}": rng.normal(size=c) for leaf in ("weight", "bias")}
    tensors |= {f"to_out_norm.{leaf}": rng.normal(size=h) for leaf in ("weight", "bias")}
    tensors["to_out.weight"] = rng.normal(size=(c, h))
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def _trimul(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(serialize(trimul_tensors()))


def _block(folder: Path) -> None:
    folder.mkdir()
    np.save(folder / "block.npy", np.random.default_rng(0).normal(size=gpt2.FLAT_SIZE).astype(np.float32))


TEMPLATES: dict[str, Callable[[Path], None]] = {
    **{f"{family} folder": functools.partial(_folder, family) for family in ("minilm", "gpt2", "qwen3")},
    **{f"{family} shards": functools.partial(_sharded, family) for family in ("minilm", "qwen3")},
    **{f"{family} stored": functools.partial(_stored, family) for family in ("minilm", "gpt2", "qwen3")},
    "trimul folder": _trimul,
    "block npy": _block,
}
if TORCH:
    TEMPLATES |= {
        "minilm torch": functools.partial(_torch, "minilm", legacy=False),
        "minilm legacy": functools.partial(_torch, "minilm", legacy=True),
        "gpt2 torch": functools.partial(_torch, "gpt2", legacy=False),
        "gpt2 legacy": functools.partial(_torch, "gpt2", legacy=True),
    }
WEIGHTS = {name: 0.1 if name == "block npy" else 1.0 for name in TEMPLATES}  # that one is 28 MB

# How it is damaged


def _tensor_file(content: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _with_header(header: dict[str, Any], data: bytes) -> bytes:
    text = dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def change_header(rng: Rng, content: bytes) -> tuple[bytes, str]:
    """A safetensors file with another header: names, dtypes, shapes, offsets or metadata."""
    header, data = _tensor_file(content)
    tensors = [name for name in header if name != "__metadata__"]
    name = pick(rng, tensors)
    kind = pick(rng, ("any", "any", "dtype", "shape", "twice", "transposed", "metadata", "config", "config"))
    if kind == "config" and "config" in header.get("__metadata__", {}):
        config, what = changed(rng, json.loads(header["__metadata__"]["config"]))
        header["__metadata__"]["config"] = dumps(config)
        what = f"config in the metadata: {what}"
    elif kind == "dtype":
        dtype = pick(rng, DTYPE_BITS)
        what, place = f"all are {dtype}", 0
        for tensor in tensors:  # so that the file is a valid one
            size = math.prod(header[tensor]["shape"]) * DTYPE_BITS[dtype] // 8
            header[tensor] |= {"dtype": dtype, "data_offsets": [place, place + size]}
            place += size
        data = rng.bytes(place)
    elif kind == "shape":
        shape = header[name]["shape"]
        header[name]["shape"] = pick(
            rng, ([1, *shape], [*shape, 1], [math.prod(shape)], shape[::-1], [], [0], [2**62, 4])
        )
        what = f"{name} has shape {header[name]['shape']}"
    elif kind == "twice":
        other = pick(rng, ("bert.", "transformer.", "model.")) + name
        start = header[name]["data_offsets"][0]
        size = header[name]["data_offsets"][1] - start
        header[other] = header[name] | {"data_offsets": [len(data), len(data) + size]}
        data, what = data + rng.bytes(size), f"{other} beside {name}"
    elif kind == "transposed":
        header[name]["shape"], what = header[name]["shape"][::-1], f"{name} transposed"
    elif kind == "metadata":
        header.setdefault("__metadata__", {"format": "pt"})
        header["__metadata__"], what = changed(rng, header["__metadata__"])
        what = f"metadata: {what}"
    else:
        header, what = changed(rng, header)
    return _with_header(header, data), what


def change_values(rng: Rng, content: bytes) -> tuple[bytes, str]:
    """A safetensors file with other values, large ones and such as are no number among them."""
    header, data = _tensor_file(content)
    values = np.frombuffer(data[: len(data) // 4 * 4], np.float32).copy()
    value = pick(rng, (65504.0, 65519.0, 65520.0, 7e4, -1e5, 3e38, np.inf, np.nan, 1e-45))
    values[rng.integers(values.size, size=3)] = value
    return _with_header(header, values.tobytes()), f"values of {value:g}"


def change_state(rng: Rng, folder: Path, legacy: bool) -> str:
    """Replaces a tensor of pytorch_model.bin by one of another kind."""
    import torch

    path = folder / "pytorch_model.bin"
    state = torch.load(path, weights_only=True)
    name = pick(rng, state)
    tensor = state[name]
    huge = torch.zeros(1, dtype=torch.bfloat16)
    kinds: dict[str, Callable[[], Any]] = {
        "expanded": lambda: huge.expand(10**9, 8),
        "expanded to its shape": lambda: torch.zeros(1).expand(tensor.shape),
        "sparse": tensor.to_sparse,
        "csr": lambda: torch.eye(4).to_sparse_csr(),
        "quantised": lambda: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        "meta": lambda: tensor.to("meta"),
        "complex": lambda: tensor.to(torch.complex64),
        "conjugate": lambda: torch.complex(tensor, tensor).conj(),
        "negative": lambda: torch.complex(tensor, tensor).conj().imag,
        "float8": lambda: tensor.to(torch.float8_e4m3fn),
        "float64": lambda: tensor.double() * 1e300,
        "half": tensor.half,
        "brain": tensor.bfloat16,
        "integer": tensor.int,
        "bool": tensor.bool,
        "parameter": lambda: torch.nn.Parameter(tensor),
        "transposed": lambda: tensor.T if tensor.ndim > 1 else tensor[None],
        "number": lambda: 3,
        "nested": lambda: {"a": tensor},
        "nothing": lambda: None,
        "empty": lambda: tensor[:0],
        "large": lambda: tensor * 1e6,
        "not a number": lambda: tensor * float("nan"),
    }
    kind = pick(rng, kinds)
    state[name] = kinds[kind]()
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    return f"{name} {kind}"


def change(rng: Rng, template: str, folder: Path) -> str:
    """Damages a file of the folder; says how."""
    if rng.random() < 0.4 and (folder / "pytorch_model.bin").is_file():
        what = f"pytorch_model.bin: {change_state(rng, folder, 'legacy' in template)}"
        if rng.random() < 0.7:
            return what
    # Large files are where bytes matter; the small ones hold what shapes depend on.
    path = pick(rng, sorted(path for path in folder.rglob("*") if path.is_file()))
    content = path.read_bytes()
    if rng.random() < 0.02:
        path.unlink()
        return f"no {path.name}"
    if path.suffix == ".json":
        content, what = changed_text(rng, content)
    elif path.suffix == ".safetensors":
        content, what = pick(rng, (change_header, change_header, change_header, change_values, damaged))(
            rng, content
        )
    else:
        content, what = damaged(rng, content)
    path.write_bytes(content)
    return f"{path.name}: {what}"


# What reads it, in another process

CLEAR = (weights.CheckpointError, FileNotFoundError, NotImplementedError)
_LOADERS = ("load", "load_config", "find_family", "encoder", "float16")


def attempt(request: dict[str, Any]) -> str | None:
    """Loads what a request names; says what is wrong with what came back."""
    path, (kind, form), loader = Path(request["path"]), request["template"].split(), request["loader"]
    if kind == "block":
        return _unsound(weights.load_gpt2_block(path / "block.npy", dtype=_dtype(loader)), loader)
    if kind == "trimul":
        return _unsound(weights.load_trimul(path, direction="outgoing", dtype=_dtype(loader)), loader)
    family = families.FAMILIES[kind]
    if loader == "find_family":
        return None if loading.find_family(path) is family else "another family"
    if loader == "encoder" and kind == "minilm" and form == "folder":
        encoder = Encoder.from_pretrained(path, implementation="xla")
        return _unsound_config(family, encoder.config) or _unsound(encoder.params, loader)
    config = loading.load_config(family, path)
    if loader == "load_config":
        return _unsound_config(family, config)
    read = weights.load if form == "stored" else functools.partial(loading.load, family)
    params = read(path, dtype=_dtype(loader))  # type: ignore[operator]
    return _unsound_config(family, config) or _unsound(params, loader)


def _dtype(loader: str) -> str:
    return "float16" if loader == "float16" else "float32"


def _unsound_config(family: families.Family, config: Any) -> str | None:
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name not in family.keys:  # what no config.json says has one value
            sound = value == field.default
        elif field.type is bool:
            sound = type(value) is bool
        elif names := typing.get_args(field.type):
            sound = type(value) is str and value in names
        else:
            sound = type(value) in ((float, int) if field.type is float else (int,)) and 0 < value < math.inf
        if not sound:
            return f"accepted {name} = {value!r:.60}"
    return None


def _unsound(params: Any, loader: str) -> str | None:
    for leaf in jax.tree.leaves(params):
        # The files hold infinities of float32 at times; float16 has more of them only by rounding.
        if loader == "float16" and leaf.dtype == jnp.float16 and bool(jnp.any(jnp.isinf(leaf))):
            return "inf in float16"
    return None


def warm_up() -> None:
    """Loads everything once as it is, so that what a process needs for the first time is not counted."""
    with tempfile.TemporaryDirectory() as root:
        for template, write in TEMPLATES.items():
            write(Path(root, template))
            for loader in _LOADERS:
                wrong = attempt({"path": f"{root}/{template}", "template": template, "loader": loader})
                if wrong:
                    raise AssertionError(f"{template}, {loader}: {wrong}, as it is")


_sandbox = Sandbox(__name__)


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    root = tempfile.TemporaryDirectory(prefix="campaign-")
    for template, write in TEMPLATES.items():
        write(Path(root.name, template))
    return root


def _run(seed: int, number: int, template: str, loader: str) -> str | None:
    rng = np.random.default_rng([seed, number, 1])
    folder = Path(_root().name, "case")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(_root().name, template), folder)
    what = change(rng, template, folder)
    if loader == "float16" and what.endswith("values of inf"):
        loader = "load"  # infinite in any dtype
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    request = {"path": str(folder), "template": template, "loader": loader, "size": size, "named": [str(folder)]}
    wrong = _sandbox.ask(request)
    return wrong and f"{what}: {wrong}"


def cases(seed: int) -> Iterator[Case]:
    """Checkpoints with one or two damages each, and a way to load them."""
    names = list(TEMPLATES)
    shares = np.array([WEIGHTS[name] for name in names])
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        template, loader = names[rng.choice(len(names), p=shares / shares.sum())], pick(rng, _LOADERS)
        run = functools.partial(_run, seed, number, template, loader)
        yield Case(name=f"{template} by {loader}", run=run)
