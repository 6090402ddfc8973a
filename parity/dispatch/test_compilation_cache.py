"""Compiled code kept between processes: found again, never in the way, and no setting of JAX changed."""

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_models import compilation_cache
from pallas_models.minilm import Encoder
from pallas_models.sentence import programs
from parity import ROOT
from parity.weights import checkpoints

pytestmark = pytest.mark.usefixtures("without_jax_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path) -> Path:
    """Writes a model that compiles fast."""
    config = dataclasses.replace(checkpoints.CONFIG, num_layers=1, hidden_size=32, num_heads=2)
    return checkpoints.write(
        folder / "checkpoint", checkpoints.bert_tensors(config), checkpoints.bert_config(config)
    )


def an_encoder(folder: Path, cache: Path | bool | None = None, **options: Any) -> Encoder:
    return Encoder.from_pretrained(folder, compilation_cache=cache, **{"implementation": "xla"} | options)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "new" / "cache"


@pytest.fixture
def fresh(monkeypatch) -> list[str | None]:
    """Forgets what this process has compiled; the names under which programs are compiled from now on."""
    names: list[str | None] = []
    compile_ = programs.Programs._compile

    def recorded(self, lowered, name):
        names.append(name)
        return compile_(self, lowered, name)

    monkeypatch.setattr(programs, "_COMPILED", {})
    monkeypatch.setattr(programs.Programs, "_compile", recorded)
    return names


def run(program: str, *arguments: object) -> dict:
    """What a program prints, as JSON, in a process of its own."""
    command = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_next_process_compiles_nothing(folder, cache):
    program = """
import json, sys, jax
from pallas_models.minilm import Encoder
from pallas_models.sentence import programs
before, lowered = dict(jax.config.values), []
lower = programs.Programs._lower
programs.Programs._lower = lambda *args: lowered.append(args[1]) or lower(*args)
encoder = Encoder.from_pretrained(sys.argv[1], compilation_cache=sys.argv[2])
embeddings = encoder.encode(["a man", "the guitar is playing today", "a woman"], batch_size=2)
assert jax.config.values == before
print(json.dumps({"lowered": lowered, "embeddings": embeddings.tolist()}))
"""
    first, second = (run(program, folder, cache) for _ in range(2))
    assert first["lowered"] == [[2, 2, 24]] and second["lowered"] == []
    assert first["embeddings"] == second["embeddings"]
    assert [path.suffix for path in cache.iterdir()] == [".executable"]
    assert {path.stat().st_mode & 0o077 for path in (cache.parent, cache, *cache.iterdir())} == {0}


def test_what_a_program_depends_on(folder, cache, monkeypatch):
    shape, normalize = (1, 16), True

    def name(**options):
        (own,) = an_encoder(folder, cache, **options)._programs
        return own._kept.name(*own._key, shape, normalize)

    names = [name(), name(dtype="bfloat16"), name(implementation=None)]
    assert name() == names[0] and name(dtype="bfloat16") == names[1]
    shape = (8, 16)
    names.append(name())
    normalize = False
    names.append(name())
    for context in (jax.default_matmul_precision("highest"), jax.enable_x64(True)):
        with context:
            names.append(name())
    for part, value in (("_circumstances", ("other code",)), ("_describe", ("another GPU",))):
        with monkeypatch.context() as patch:
            patch.setattr(compilation_cache, part, lambda *_, value=value: value)
            names.append(name())
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("1e-05", "1e-06"))
    names.append(name())
    assert len(set(names)) == len(names) == 10


def test_circumstances_are_of_the_code_and_the_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = set()

    def note():
        compilation_cache._circumstances.cache_clear()
        seen.add(repr(compilation_cache._circumstances()))
        return len(seen)

    assert [note(), note()] == [1, 1]
    tables = tmp_path / "pallas_models" / "tuning"
    tables.mkdir(parents=True)
    (tables / "gpu.json").write_text("{}")
    assert note() == 2
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    assert note() == 3
    monkeypatch.setattr(compilation_cache, "_PACKAGE", tables)
    assert note() == 4
    compilation_cache._circumstances.cache_clear()


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, str, bytes, np.ndarray]:
    """A model, the name and the content of the file of its program, and what that computes."""
    folder, cache = write(tmp_path_factory.mktemp("kept")), tmp_path_factory.mktemp("cache")
    embedding = an_encoder(folder, cache).encode("a man")
    (path,) = cache.iterdir()
    return folder, path.name, path.read_bytes(), embedding


def plant(path: Path, content: bytes) -> None:
    """Writes an entry, and its folder, so that they are the user's alone whatever the umask is."""
    path.parent.mkdir(parents=True, mode=0o700)
    path.touch(mode=0o600)
    path.write_bytes(content)


def test_an_intact_file_is_used(kept, cache, fresh):
    folder, name, content, expected = kept
    plant(cache / name, content)
    np.testing.assert_array_equal(an_encoder(folder, cache).encode("a man"), expected)
    assert fresh == []


def other_program() -> bytes:
    payload = pickle.dumps((b"no executable", None, None))
    return hashlib.sha256(payload).digest() + payload


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: b"", "is corrupt"),
        (lambda content: content[:-1], "is corrupt"),
        (lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:], "is corrupt"),
        (lambda content: other_program(), "cannot be used"),
    ],
    ids=["empty", "cut", "flipped", "other"],
)
def test_a_broken_file_is_passed_over_and_replaced(kept, cache, fresh, change, message):
    folder, name, content, expected = kept
    path = cache / name
    plant(path, change(content))
    with pytest.warns(UserWarning, match=message) as warned:
        found = an_encoder(folder, cache).encode("a man")
    np.testing.assert_array_equal(found, expected)
    assert len(warned) == 1 and str(path) in str(warned[0].message)
    assert fresh == [name] and list(cache.iterdir()) == [path]
    digest, payload = path.read_bytes()[:32], path.read_bytes()[32:]
    assert hashlib.sha256(payload).digest() == digest


ran: list[str] = []  # by a planted entry


class Planted:
    """Runs code as it is read from a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, ("planted",)


def planted() -> bytes:
    payload = pickle.dumps(Planted())
    return hashlib.sha256(payload).digest() + payload


OTHER_USER = 65534
DISTRUSTED = {  # how others can have planted an entry, and what is said of the folder or file
    "folder of others": (lambda folder, entry: os.chown(folder, OTHER_USER, -1), f"belongs to user {OTHER_USER}"),
    "entry of others": (lambda folder, entry: os.chown(entry, OTHER_USER, -1), f"belongs to user {OTHER_USER}"),
    "folder for all": (lambda folder, entry: folder.chmod(0o777), "chmod go-w"),
    "folder for the group": (lambda folder, entry: folder.chmod(0o770), "chmod go-w"),
    "entry for all": (lambda folder, entry: entry.chmod(0o666), "chmod go-w"),
    "link": (lambda folder, entry: entry.symlink_to(entry.rename(folder.parent / "elsewhere")), "is a link"),
}


def distrust(path: Path, how: str) -> str:
    """Makes an entry or its folder one that others can have planted; what is said of it."""
    if "of others" in how and os.geteuid():
        pytest.skip("only root gives files away")
    change, message = DISTRUSTED[how]
    change(path.parent, path)
    return message


@pytest.mark.parametrize("how", DISTRUSTED)
def test_what_others_can_have_planted_is_not_run(kept, cache, fresh, how):
    folder, name, _, expected = kept
    path, elsewhere = cache / name, cache.parent / "elsewhere"
    plant(path, planted())
    message = distrust(path, how)
    with pytest.warns(UserWarning, match=message) as warned:
        found = an_encoder(folder, cache).encode("a man")
    np.testing.assert_array_equal(found, expected)
    assert not ran and len(warned) == 1 and fresh == [name]
    if "folder" in how:  # nothing is written where others write
        assert path.read_bytes() == planted() and list(cache.iterdir()) == [path]
    else:
        assert not path.is_symlink() and path.read_bytes() != planted()
        assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_uid == os.geteuid()
    assert not elsewhere.exists() or elsewhere.read_bytes() == planted()  # what a link names is as it was


@pytest.mark.parametrize("how", DISTRUSTED)
def test_a_program_does_without_the_cache_of_jax_where_others_can_write(cache, monkeypatch, how):
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setattr(compilation_cache, "jax_has_one", lambda: False)
    plant(cache / "jit_f-cache", b"a program")
    cache.chmod(0o755)
    compilation_cache.enable(cache)
    assert set_to.pop("jax_compilation_cache_dir") == str(cache)
    set_to.clear()
    message = distrust(cache / "jit_f-cache", how)
    with pytest.warns(UserWarning, match=message) as warned:
        compilation_cache.enable(cache)
    assert not set_to and len(warned) == 1


def test_what_others_cannot_reach_they_cannot_write(cache, monkeypatch):
    """JAX's entries have what the umask leaves, often to a group."""
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setattr(compilation_cache, "jax_has_one", lambda: False)
    plant(cache / "jit_f-cache", b"a program")
    (cache / "jit_f-cache").chmod(0o664)
    compilation_cache.enable(cache)
    assert set_to["jax_compilation_cache_dir"] == str(cache)


def test_a_folder_that_cannot_be_written(folder, tmp_path, fresh):
    (tmp_path / "file").touch()
    encoder = an_encoder(folder, tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="compilation cache passed over") as warned:
        assert encoder.encode(["a man"] * 3).shape == (3, 32)
        assert encoder.encode("a man").shape == (32,)
    assert len(warned) == 1 and len(fresh) == 2


def test_a_full_disk(folder, cache, fresh, monkeypatch):
    def replace(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.warns(UserWarning, match="no space left"):
        an_encoder(folder, cache).encode("a man")
    assert list(cache.iterdir()) == []


def test_nothing_is_kept_unless_asked_for_or_beside_jax_own_cache(folder, cache, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    an_encoder(folder).encode("a man")
    assert fresh == [None] and not (tmp_path / "pallas_models").exists()
    an_encoder(folder, True).encode("a man")
    assert len(list((tmp_path / "pallas_models" / "compilation").iterdir())) == 1
    monkeypatch.setattr(compilation_cache, "jax_has_one", lambda: True)
    an_encoder(folder, cache).encode("a man")
    assert fresh[-1] is None and not cache.exists()


def test_options(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    compilation_cache.add_arguments(parser)
    assert parser.parse_args([]).compilation_cache == tmp_path / "pallas_models" / "compilation"
    assert parser.parse_args(["--compilation-cache", "here"]).compilation_cache == Path("here")
    assert parser.parse_args(["--no-compilation-cache"]).compilation_cache is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-compilation-cache", "--compilation-cache", "here"])
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compilation_cache.default_folder() == tmp_path / "home" / ".cache" / "pallas_models" / "compilation"


def test_a_program_turns_on_the_cache_of_jax(cache):
    program = """
import json, pathlib, sys, jax
from pallas_models import compilation_cache
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
compilation_cache.enable(None)
off = compilation_cache.jax_has_one()
compilation_cache.enable(pathlib.Path(sys.argv[1]))
compilation_cache.enable(pathlib.Path(sys.argv[1], "not used"))
on = compilation_cache.jax_has_one()
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
hits = sum(name.endswith("/cache_hits") for name in events)
print(json.dumps({"off": off, "on": on, "hits": hits, "folder": jax.config.jax_compilation_cache_dir}))
"""
    first, second = (run(program, cache) for _ in range(2))
    assert cache.stat().st_mode & 0o077 == 0
    assert first == {"off": False, "on": True, "hits": 0, "folder": str(cache)}
    assert second["hits"] > 0
