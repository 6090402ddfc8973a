"""Checkpoints made to do harm: refused by name, at once, and before memory is taken for what they claim."""

import json
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import weights
from pallas_models import gpt2, qwen3
from parity.models import decoder_checkpoints
from parity.support.common import random_params
from parity.weights import checkpoints
from parity.weights.checkpoints import CONFIG, bert_config, bert_tensors
from weights import families, loading, text

GPT2 = gpt2.GPT2Config(vocab_size=12, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=24)
QWEN3 = qwen3.Qwen3Config(
    vocab_size=12, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=24
)
CONFIGS = {"minilm": CONFIG, "gpt2": GPT2, "qwen3": QWEN3}
JSON: dict[str, dict[str, Any]] = {
    "minilm": bert_config(),
    "gpt2": decoder_checkpoints.gpt2_json(GPT2),
    "qwen3": decoder_checkpoints.qwen3_json(QWEN3),
}
DEEP = "[" * 3000 + "]" * 3000


def tensors_of(family: str) -> dict[str, np.ndarray]:
    if family == "minilm":
        return bert_tensors()
    params = random_params(CONFIGS[family], init=families.FAMILIES[family].init)
    if family == "gpt2":
        return decoder_checkpoints.gpt2_tensors(params)
    return decoder_checkpoints.qwen3_tensors(params, QWEN3)


def unconverted(family: str, folder: Path, field: str, value: Any) -> Path:
    """A checkpoint of PyTorch whose config.json has this value for a field."""
    changed = JSON[family] | {families.FAMILIES[family].keys[field]: value}
    return decoder_checkpoints.write(folder, tensors_of(family), changed)


def stored(family: str, folder: Path, field: str, value: Any) -> Path:
    """What `weights.save` wrote, with this value in the config of its metadata."""
    config = CONFIGS[family]
    path = weights.save(random_params(config, init=families.of(config).init), folder, config=config)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    fields = json.loads(header["__metadata__"]["config"]) | {field: value}
    header["__metadata__"]["config"] = json.dumps(fields).replace(json.dumps(DEEP), DEEP)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return folder


FORMS: dict[str, Callable[..., Path]] = {"config.json": unconverted, "params.safetensors": stored}


@pytest.fixture(params=FORMS)
def form(request) -> str:
    return request.param


def refused(message: str, family: str, folder: Path, dtype: str = "float32") -> None:
    """Asserts that a folder is refused with that message, by name, in time and in little memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(weights.CheckpointError, match=message) as error:
        loading.load(families.FAMILIES[family], folder, dtype)
    assert str(folder) in str(error.value) and len(str(error.value)) < 4000
    assert time.monotonic() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


# Configs


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("value", [10**5, 2**31 - 1])
def test_more_layers_than_tensors(tmp_path, form, family, value):
    folder = FORMS[form](family, tmp_path / "model", "num_layers", value)
    refused(rf"num_layers is {value}; expected at most \d+, the number of tensors", family, folder)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "intermediate_size"])
def test_larger_than_all_tensors_together(tmp_path, form, family, field):
    folder = FORMS[form](family, tmp_path / "model", field, 10**9)
    refused(f"{field} is 1000000000; expected at most .*, the number of values", family, folder)


@pytest.mark.parametrize("value", [0, -1, 2.0, 2**31, 10**30, True, None, "2", [2], {}, float("nan"), DEEP])
def test_a_size_that_is_none(tmp_path, form, value):
    folder = FORMS[form]("minilm", tmp_path / "model", "num_heads", value)
    message = "num_(heads|attention_heads) is .*; expected a positive integer below|not a minilm config"
    refused(message, "minilm", folder)


@pytest.mark.parametrize("family, field", [("minilm", "epsilon"), ("gpt2", "epsilon"), ("qwen3", "rope_theta")])
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 0, -1, -5.0, True, "1e-12", None, 1e-320, 10**400, []]
)
def test_a_number_that_is_none(tmp_path, form, family, field, value):
    if value is None and form == "config.json":
        value = "null"  # an absent key has a default
    folder = FORMS[form](family, tmp_path / "model", field, value)
    refused("is .*; expected a positive number", family, folder)


def test_deep_json(tmp_path):
    folder = unconverted("minilm", tmp_path / "model", "hidden_size", 64)
    (folder / "config.json").write_text(DEEP)
    refused("is not valid JSON|holds a JSON list", "minilm", folder)  # newer Pythons read it
    path = stored("minilm", tmp_path / "stored", "hidden_size", DEEP)
    with pytest.raises(weights.CheckpointError, match=r"params\.safetensors"):
        weights.load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_parameters": 5}, "rope_parameters is 5; expected an object"),
        ({"layer_types": 5}, "layer_types is 5; expected a list"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": "x"}}, "rope_theta is None; expected a positive"),
    ],
)
def test_keys_of_qwen3(tmp_path, change, message):
    folder = decoder_checkpoints.write(tmp_path / "model", tensors_of("qwen3"), JSON["qwen3"] | change)
    refused(message, "qwen3", folder)


def test_what_is_saved_can_be_loaded(tmp_path):
    config = gpt2.GPT2Config(**{**vars_of(GPT2), "epsilon": 0.0})
    with pytest.raises(weights.CheckpointError, match=r"epsilon is 0\.0; expected a positive number"):
        weights.save(random_params(GPT2, init=gpt2.init), tmp_path / "new", config=config)
    assert not (tmp_path / "new").exists()


def vars_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


# Values


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value, dtype, fits", [
    (65504.0, "float16", True), (65519.0, "float16", True), (65520.0, "float16", False), (-7e4, "float16", False),
    (7e4, "bfloat16", True), (3.4e38, "bfloat16", False), (3.4e38, "float32", True),
])  # fmt: skip
def test_beyond_what_the_dtype_holds(tmp_path, form, value, dtype, fits):
    tensors = bert_tensors()
    name = "encoder.layer.1.output.dense.weight"
    tensors[name][3, 5] = value
    tensors[name][3, 6] = np.nan  # does not hide it
    folder = decoder_checkpoints.write(tmp_path / "model", tensors, bert_config())
    if form == "params.safetensors":
        params = weights.load_minilm(folder)
        if not fits:
            with pytest.raises(weights.CheckpointError, match=r"params holds layers\.1\.mlp\.down\.kernel with"):
                weights.save(params, tmp_path / "never", config=CONFIG, dtype=dtype)
        weights.save(params, folder, config=CONFIG)
        name = "layers.1.mlp.down.kernel"
    if fits:
        loaded = weights.load_minilm(folder, dtype=dtype)["layers"]["1"]["mlp"]["down"]["kernel"]
        assert loaded[5, 3] == jnp.asarray(value, dtype) and jnp.isfinite(loaded[5, 3])
    else:
        refused(f"{name} with values up to .*; expected at most .* what {dtype} can hold", "minilm", folder, dtype)


def test_vectors_stay_float32(tmp_path):
    tensors = bert_tensors()
    tensors["encoder.layer.1.output.dense.bias"][3] = 1e5
    params = weights.load_minilm(decoder_checkpoints.write(tmp_path, tensors, bert_config()), dtype="float16")
    assert params["layers"]["1"]["mlp"]["down"]["bias"][3] == 1e5


def test_float64_beyond_float32(tmp_path):
    tensors = bert_tensors()
    tensors["encoder.layer.1.output.dense.bias"] = np.full(64, 1e300)
    folder = decoder_checkpoints.write(tmp_path / "model", tensors, bert_config())
    refused("values up to 1e[+]300", "minilm", folder)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("family", ["minilm", "trimul"])
def test_float8(tmp_path, dtype, family):
    if family == "minilm":
        tensors = {name: t.astype(jnp.dtype(dtype)) for name, t in bert_tensors().items()}
        refused("not float .*float8", "minilm", decoder_checkpoints.write(tmp_path / "m", tensors, bert_config()))
    else:
        from parity.campaign.checkpoints import trimul_tensors

        tensors = {name: t.astype(jnp.dtype(dtype)) for name, t in trimul_tensors().items()}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(weights.CheckpointError, match=r"not float .*float8"):
            weights.load_trimul(tmp_path, direction="outgoing")


# Names


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "", "..", "x" * 999]
)
def test_an_index_names_files_beside_it(tmp_path, name):
    folder = decoder_checkpoints.write(tmp_path / "model", bert_tensors(), bert_config(), shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {tensor: name for tensor in index["weight_map"]}
    path.write_text(json.dumps(index))
    save_file(bert_tensors(), tmp_path / "x.safetensors")
    refused("names the file .*; expected a .safetensors file beside it", "minilm", folder)


@pytest.mark.parametrize("family, prefix", [("minilm", "bert."), ("gpt2", "transformer."), ("qwen3", "model.")])
def test_a_tensor_given_twice(tmp_path, family, prefix):
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors_of(family).items()}
    name = next(iter(tensors))
    folder = decoder_checkpoints.write(
        tmp_path / "model", tensors | {prefix + name: tensors[name] + 1}, JSON[family]
    )
    refused(f"holds {name} twice, with and without '{prefix}'", family, folder)


# PyTorch's own files


@pytest.fixture
def torch_folder(tmp_path) -> Path:
    folder = decoder_checkpoints.write(tmp_path / "model", {}, bert_config())
    (folder / "model.safetensors").unlink()
    return folder


def save_torch(folder: Path, legacy: bool, **changes: Any) -> None:
    import torch

    state = {name: torch.tensor(tensor) for name, tensor in bert_tensors().items()}
    torch.save(
        state | {name.replace("__", "."): value for name, value in changes.items()},
        folder / "pytorch_model.bin",
        _use_new_zipfile_serialization=not legacy,
    )


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("hidden", [64, 8])
def test_a_tensor_that_repeats_its_values(torch_folder, legacy, hidden):
    """The second has the shape that config.json states: nothing but the file's size speaks against it."""
    torch = pytest.importorskip("torch")
    if hidden == 8:
        config = bert_config() | {"vocab_size": 10**9, "hidden_size": 8}
        (torch_folder / "config.json").write_text(json.dumps(config))
    huge = torch.zeros(1, dtype=torch.bfloat16).expand(10**9, 8)
    save_torch(torch_folder, legacy, embeddings__word_embeddings__weight=huge)
    refused("states a size of|expected no value more than twice", "minilm", torch_folder)


@pytest.mark.parametrize("legacy", [False, True])
def test_many_tensors_that_share_their_values(torch_folder, legacy):
    torch = pytest.importorskip("torch")
    shared = torch.zeros(1000)
    torch.save(
        {f"tensor{i}": shared for i in range(1000)},
        torch_folder / "pytorch_model.bin",
        _use_new_zipfile_serialization=not legacy,
    )
    refused("expected no value more than twice", "minilm", torch_folder)


@pytest.mark.filterwarnings("ignore")  # of torch, which warns of what is made here
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "kind, message",
    [
        ("sparse", "as a sparse_coo tensor"),
        ("quantised", "quantised tensor|not a readable PyTorch file|holds more than tensors"),
        ("meta", "as a meta tensor"),
        ("conj", "not float .* complex64"),
        ("float8", "not float .* float8|not a readable PyTorch file"),
        ("quint", "cannot read|not a readable PyTorch file|quantised|holds more than tensors"),
    ],
)
def test_tensors_of_other_kinds(torch_folder, legacy, kind, message):
    torch = pytest.importorskip("torch")
    tensor = torch.ones(64)
    made = {
        "sparse": lambda: tensor.to_sparse(),
        "quantised": lambda: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        "meta": lambda: tensor.to("meta"),
        "conj": lambda: torch.complex(tensor, tensor).conj(),
        "float8": lambda: tensor.to(torch.float8_e4m3fn),
        "quint": lambda: torch.quantize_per_tensor(tensor, 0.1, 0, torch.quint8),
    }[kind]()
    save_torch(torch_folder, legacy, embeddings__LayerNorm__bias=made)
    refused(message, "minilm", torch_folder)


@pytest.mark.parametrize("legacy", [False, True])
def test_values_are_those_that_torch_would_show(torch_folder, legacy):
    torch = pytest.importorskip("torch")
    bias = torch.arange(64.0)
    save_torch(torch_folder, legacy, embeddings__LayerNorm__bias=torch.complex(bias, bias).conj().imag)
    np.testing.assert_array_equal(
        weights.load_minilm(torch_folder)["embeddings"]["norm"]["bias"], -np.arange(64.0)
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_at_any_place(torch_folder, legacy):
    """Every 97th byte, changed in turn: whatever torch makes of it, the file is loaded or refused by name."""
    pytest.importorskip("torch")
    save_torch(torch_folder, legacy)
    path = torch_folder / "pytorch_model.bin"
    content, refusals = path.read_bytes(), 0
    for place in [*range(0, 3000, 97), *range(len(content) - 3000, len(content), 97)]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            weights.load_minilm(torch_folder)
        except weights.CheckpointError as error:
            refusals += 1
            assert str(torch_folder) in str(error), place
    assert refusals > 3


def test_a_number_of_a_pickle_is_larger_than_the_file(torch_folder):
    """A storage of 2**40 values: torch would take memory for it before it looks for them."""
    pytest.importorskip("torch")
    import pickle

    content = b"".join(pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {}, [2**40], []))
    (torch_folder / "pytorch_model.bin").write_bytes(content)
    refused("states a size of 1,099,511,627,776 in a file of", "minilm", torch_folder)


# The flat buffer


@pytest.mark.parametrize("kind", ["empty", "npz", "huge", "objects", "text"])
def test_an_array_file_that_is_none(tmp_path, kind):
    path = tmp_path / "block.npy"
    if kind == "npz":
        with path.open("wb") as file:
            np.savez(file, a=np.zeros(3))
    elif kind == "huge":
        np.save(path, np.zeros(4, np.float32))
        path.write_bytes(path.read_bytes().replace(b"(4,), }         ", b"(100000000000,),"))
    elif kind == "objects":
        np.save(path, np.array([{}]), allow_pickle=True)
    else:
        path.write_text("" if kind == "empty" else "no array\n" * 100)
    with pytest.raises(weights.CheckpointError, match=r"block\.npy is (not a readable NumPy file|an archive)"):
        weights.load_gpt2_block(path)


def test_a_block_beyond_float16():
    flat = np.zeros(gpt2.FLAT_SIZE, np.float32)
    flat[-800_000] = 1e5
    assert jnp.isfinite(weights.load_gpt2_block(flat, dtype="bfloat16")["mlp"]["down"]["kernel"]).all()
    with pytest.raises(weights.CheckpointError, match=r"the buffer holds mlp\.down\.kernel .* up to 100000"):
        weights.load_gpt2_block(flat, dtype="float16")


# The tokenizer


@pytest.mark.parametrize("where", ["vocabulary", "added token"])
@pytest.mark.parametrize("token_id", [2**31, -1, 10**30])
def test_ids_of_tokens(tmp_path, where, token_id):
    path = checkpoints.write(tmp_path / "model") / "tokenizer.json"
    content = json.loads(path.read_text())
    if where == "vocabulary":
        content["model"]["vocab"]["the"] = token_id
    else:
        content["added_tokens"] = [{"id": token_id, "content": "the"}]
    path.write_text(json.dumps(content))
    with pytest.raises(weights.CheckpointError, match=rf"tokenizer\.json gives 'the' the id {token_id}"):
        text.read_tokenizer(path.parent)
