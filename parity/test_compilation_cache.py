"""Compiled code kept between processes: found again, never in the way, and no setting of JAX changed."""

import argparse
import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_models import compilation_cache
from pallas_models.minilm import Encoder, programs
from parity import checkpoints

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "checkpoint")


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
from pallas_models.minilm import Encoder, programs
before, lowered = dict(jax.config.values), []
lower = programs.Programs._lower
programs.Programs._lower = lambda *args: lowered.append(args[1]) or lower(*args)
encoder = Encoder.from_pretrained(sys.argv[1], compilation_cache=sys.argv[2])
embeddings = encoder.encode(["a man", "the guitar is playing today", "a woman"], batch_size=2)
assert jax.config.values == before
print(json.dumps({"lowered": lowered, "embeddings": embeddings.tolist()}))
"""
    first, second = (run(program, folder, cache) for _ in range(2))
    assert first["lowered"] == [[2, 16]] and second["lowered"] == []
    assert first["embeddings"] == second["embeddings"]
    assert [path.suffix for path in cache.iterdir()] == [".executable"]
    assert cache.stat().st_mode & 0o077 == 0


def test_what_a_program_depends_on(folder, cache, fresh, monkeypatch):
    def encode(**options):
        monkeypatch.setattr(programs, "_COMPILED", {})
        fresh.clear()
        Encoder.from_pretrained(folder, compilation_cache=cache, **options).encode("a man")
        return len(fresh)

    assert [encode(), encode()] == [1, 0]
    assert [encode(dtype="bfloat16"), encode(dtype="bfloat16")] == [1, 0]
    assert [encode(implementation="xla"), encode(implementation="xla")] == [1, 0]
    with jax.default_matmul_precision("highest"):
        assert [encode(), encode()] == [1, 0]
    for name, value in (("_circumstances", ("other code",)), ("_describe", ("another GPU",))):
        with monkeypatch.context() as patch:
            patch.setattr(compilation_cache, name, lambda *_, value=value: value)
            assert encode() == 1
    assert encode() == 0 and len(list(cache.iterdir())) == 6


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
def test_a_broken_file_is_passed_over_and_replaced(folder, cache, fresh, monkeypatch, change, message):
    expected = Encoder.from_pretrained(folder, compilation_cache=cache).encode("a man")
    (path,) = cache.iterdir()
    content = path.read_bytes()
    path.write_bytes(change(content))
    monkeypatch.setattr(programs, "_COMPILED", {})
    with pytest.warns(UserWarning, match=message) as warned:
        found = Encoder.from_pretrained(folder, compilation_cache=cache).encode("a man")
    np.testing.assert_array_equal(found, expected)
    assert len(warned) == 1 and str(path) in str(warned[0].message)
    monkeypatch.setattr(programs, "_COMPILED", {})
    fresh.clear()
    np.testing.assert_array_equal(
        Encoder.from_pretrained(folder, compilation_cache=cache).encode("a man"), expected
    )
    assert not fresh and list(cache.iterdir()) == [path]


def test_a_folder_that_cannot_be_written(folder, tmp_path, fresh):
    (tmp_path / "file").touch()
    encoder = Encoder.from_pretrained(folder, compilation_cache=tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="compilation cache passed over") as warned:
        assert encoder.encode(["a man"] * 3).shape == (3, 64)
        assert encoder.encode("a man").shape == (64,)
    assert len(warned) == 1 and len(fresh) == 2


def test_a_full_disk(folder, cache, fresh, monkeypatch):
    def replace(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.warns(UserWarning, match="no space left"):
        Encoder.from_pretrained(folder, compilation_cache=cache).encode("a man")
    assert list(cache.iterdir()) == []


def test_nothing_is_kept_unless_asked_for_or_beside_jax_own_cache(folder, cache, fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Encoder.from_pretrained(folder).encode("a man")
    assert fresh == [None] and not (tmp_path / "pallas_models").exists()
    Encoder.from_pretrained(folder, compilation_cache=True).encode("a man")
    assert len(list((tmp_path / "pallas_models" / "compilation").iterdir())) == 1
    monkeypatch.setattr(compilation_cache, "jax_has_one", lambda: True)
    Encoder.from_pretrained(folder, compilation_cache=cache).encode("a man")
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
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
compilation_cache.enable(None)
off = compilation_cache.jax_has_one()
compilation_cache.enable(pathlib.Path(sys.argv[1]))
compilation_cache.enable(pathlib.Path(sys.argv[1], "not used"))
on = compilation_cache.jax_has_one()
jax.jit(lambda x: x * 3 + 1)(2.0).block_until_ready()
print(json.dumps({"off": off, "on": on, "hits": len(hits), "folder": jax.config.jax_compilation_cache_dir}))
"""
    first, second = (run(program, cache) for _ in range(2))
    assert first == {"off": False, "on": True, "hits": 0, "folder": str(cache)}
    assert second["hits"] > 0
