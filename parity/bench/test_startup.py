"""`python -m bench startup`: what its processes measure, and what becomes of their figures."""

import functools
import json
import time
import types
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as cli
from bench.cases import startup
from bench.measuring import environment, results, timing
from bench.models import minilm_models, startup_programs
from bench.reporting import readme
from pallas_models import gpt2, minilm, qwen3
from parity.bench.test_bench import FAST, TINY, make_result
from parity.weights import checkpoints

SECONDS = {"trace_s": 0.25, "lower_s": 0.5, "compile_s": 2.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The processes that were asked for, none of which runs; a machine with a GPU."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def fake(name: str, *, platform: str | None = None, **options: Any) -> dict[str, Any]:
        asked.append((name, options | ({"platform": platform} if platform else {})))
        if name == "compile_program":
            if options["model"] == "qwen3" and options["implementation"] is None:
                raise startup.ProgramError("RuntimeError: no memory")
            factor = {None: 4, "xla": 1, "triton": 0.5}[options["implementation"]]
            return {metric: factor * seconds for metric, seconds in SECONDS.items()}
        if name == "encode":
            assert options["cache"] is None or Path(options["cache"]).is_dir()
            assert options["started"] <= time.time()
            assert json.loads(Path(options["sentences"]).read_text("utf-8")) == ["A b.", "C d.", "E f."]
            parts = {"import_s": 1.5, "load_s": 0.5, "first_encode_s": 8.0, "second_encode_s": 0.3}
            return parts | {"first_compiled_at_s": 3.25, "total_s": 10.0}
        figures = {"queued_us": 100.0, "synchronised_us": 150.0}
        if name == "embed":
            return {"pallas": figures, "xla": figures, "torch-graph": "transformers is not installed"}
        return {"synchronised_us": 350.0} if name == "sentence" else {"pallas": figures, "xla": figures}

    monkeypatch.setattr(startup, "measured", fake)
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    monkeypatch.setattr(environment, "describe", lambda: make_result().environment)
    monkeypatch.setattr(startup, "has_weights", lambda path: True)
    return asked


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "stsb-en-test.csv").write_text("A b.,C d.,2.5\n")
    (tmp_path / "stsb-en-dev.csv").write_text("A b.,E f.,1\n")
    return tmp_path


def rows(table: str, start: str) -> list[list[str]]:
    """The cells of the rows that begin with `start`."""
    lines = [line for line in table.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_everything_is_measured_and_shown(measured, data, tmp_path, capsys):
    options = ["--data", str(data), "--weights", str(tmp_path / "model"), "--output", str(tmp_path)]
    assert cli.main(["startup", *options, "--show-results"]) == 1
    out = capsys.readouterr().out
    assert "pallas failed: RuntimeError: no memory (qwen3 1x2048 bf16)" in out
    assert rows(out, "minilm 512x64 fp16") == [
        ["minilm 512x64 fp16", "1.00", "2.00", "8.00", "11.00", "2.75", "1.38", "4.00"]
    ]
    assert rows(out, "qwen3")[0][4:] == ["-", "2.75", "1.38", "-"]
    assert rows(out, "3 sentences, filled") == [
        ["3 sentences, filled cache", "1.50", "0.50", "8.00", "10.00", "0.30"]
    ]
    assert rows(out, "embed 1x16 fp16, pallas") == [["embed 1x16 fp16, pallas", "100", "150"]]
    assert rows(out, "encode one sentence fp16, pallas") == [["encode one sentence fp16, pallas", "-", "350"]]
    result = results.load(tmp_path / "nvidia-h200" / "startup.json")
    assert result.settings == {"weights": "model"}  # no path of this machine
    assert [case.label for case in result.cases][-2:] == [
        "eager matmul 64x64 cpu fp32",
        "eager matmul 64x64 cuda fp32",
    ]
    torch = next(e for case in result.cases for e in case.entries if e.name == "torch-graph")
    assert (torch.status, torch.message) == ("skipped", "transformers is not installed")
    found = readme.headline(result)
    assert (found.case, found.ours, found.baseline) == (startup.SHOWN, "11.0 s before it runs", "XLA, 2.8 s")
    assert found.ratio == found.mean == 0.25
    platforms = [options["platform"] for name, options in measured if name == "eager"]
    assert platforms == ["cpu", "cuda"] and [name for name, _ in measured].count("encode") == 2
    caches = [options["cache"] for name, options in measured if name == "encode"]
    assert caches[0] == caches[1] and not Path(caches[0]).exists()


def test_a_long_corpus_alone(measured, data, tmp_path, capsys):
    options = ["--data", str(data), "--output", str(tmp_path), "--only", "corpus", "--sentences", "400000"]
    assert cli.main(["startup", *options, "--show-results"]) == 0
    out = capsys.readouterr().out
    assert rows(out, "first, no cache") == [
        ["first, no cache", "50,000", "8.00", "-", "-", "3.25", "-", "-", "-", "-", "-"]
    ]
    assert rows(out, "second, filled cache")[0][1:3] == ["1,333,333", "0.30"]
    assert [(name, options["count"], options["cache"] is None) for name, options in measured] == [
        ("encode", 400000, True),
        ("encode", 400000, False),
        ("encode", 400000, False),
    ]
    assert results.load(tmp_path / "nvidia-h200" / "startup.partial.json").partial


def test_without_data_or_weights(measured, tmp_path, capsys, monkeypatch):
    assert cli.main(["startup", "--quick", "--output", str(tmp_path)]) == 0
    assert "corpus: left out, as it needs --data" in capsys.readouterr().out
    assert "encode" not in [name for name, _ in measured]
    assert results.load(tmp_path / "nvidia-h200" / "startup.partial.json").partial
    monkeypatch.undo()
    assert not startup.has_weights(str(tmp_path / "absent"))
    assert "encode: left out (" in capsys.readouterr().out
    monkeypatch.setattr(startup, "has_weights", lambda path: False)  # sentences are read first
    assert cli.main(["startup", "--data", str(tmp_path / "absent")]) == 2
    assert "stsb-en-test.csv" in capsys.readouterr().out


def test_no_headline_without_figures():
    assert startup.headline(make_result(benchmark="startup", cases=[])) is None
    assert startup.table(make_result(benchmark="startup")) == ""


def test_a_process_that_fails(monkeypatch):
    with pytest.raises(startup.ProgramError, match="ValueError: model='bert'; expected minilm, gpt2"):
        startup.measured("compile_program", model="bert", dtype="float32", sizes=[1, 8], implementation=None)
    monkeypatch.setattr(startup, "LIMIT_S", 0.01)
    with pytest.raises(startup.ProgramError, match="took longer than 0 s"):
        startup.measured("eager", size=4)


def test_a_process_finds_nothing_compiled(monkeypatch):
    """Neither by JAX nor by CUDA's driver; and it uses the platform that it is told to."""
    started: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> types.SimpleNamespace:
        assert not list(Path(env["CUDA_CACHE_PATH"]).iterdir())
        started.append(env)
        return types.SimpleNamespace(returncode=0, stdout='a warning\n{"x_s": 1.5}\n', stderr="")

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "somewhere")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(startup.subprocess, "run", run)
    assert startup.measured("eager", size=4) == {"x_s": 1.5}
    startup.measured("eager", size=4, platform="cpu")
    assert "JAX_PLATFORMS" not in started[0] and started[1]["JAX_PLATFORMS"] == "cpu"
    assert not any("COMPILATION_CACHE" in name for env in started for name in env)


def test_a_second_process_compiles_nothing(tmp_path):
    """The folder of the cache has all that the first one compiled."""
    model, sentences, cache = (
        checkpoints.write(tmp_path / "model"),
        tmp_path / "sentences.json",
        tmp_path / "cache",
    )
    sentences.write_text(json.dumps(["a man is playing", "the guitar"]))
    options = {"sentences": str(sentences), "weights": str(model), "dtype": "float32", "cache": str(cache)}
    kept = []
    for _ in range(2):
        start = time.time()
        found = startup.measured("encode", platform="cpu", **options, started=start, count=500)
        assert min(found.values()) >= 0
        if not kept:  # it compiles; the second process finds all, so that both of its calls are as quick
            assert found["second_encode_s"] < found["first_encode_s"]
        assert (
            found["import_s"] + found["load_s"] + found["first_encode_s"] <= found["total_s"] < time.time() - start
        )
        assert ("first_lowering_s" in found) == (not kept) and "second_lowering_s" not in found
        assert 0 < found["first_tokens_awaited_s"] < found["first_collected_at_s"] <= found["first_encode_s"]
        kept.append(sorted(path.name for path in cache.iterdir() if not path.name.endswith("-atime")))
    assert kept[0] and kept[0] == kept[1]


@pytest.mark.parametrize(
    "model, sizes", [("minilm", (2, 8)), ("gpt2", (1, 8)), ("qwen3", (1, 8)), ("trimul", (1, 8, 8, 16))]
)
def test_every_program_compiles(monkeypatch, model, sizes):
    small = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    monkeypatch.setattr(minilm, "MiniLMConfig", functools.partial(minilm.MiniLMConfig, num_layers=1, **small))
    monkeypatch.setattr(gpt2, "GPT2Config", functools.partial(gpt2.GPT2Config, **small))
    small |= {"num_kv_heads": 1, "head_dim": 16}
    monkeypatch.setattr(qwen3, "Qwen3Config", functools.partial(qwen3.Qwen3Config, **small))
    found = startup_programs.compile_program(model, "bfloat16", sizes, "xla")
    assert found.keys() == SECONDS.keys() and min(found.values()) > 0


@pytest.mark.usefixtures("on_cpu")
def test_short_calls(monkeypatch):
    tiny = minilm_models.Checkpoint(tensors=minilm_models.random_tensors(TINY), config=TINY, origin="random")
    monkeypatch.setattr(minilm_models, "load_checkpoint", lambda path: tiny)
    monkeypatch.setattr(timing, "STANDARD", FAST)
    monkeypatch.setattr(startup_programs, "SECONDS", 0.0)
    found = startup_programs.embed(1, 16, "fp32", gpu=False)
    assert found.pop("torch-graph") == (minilm_models.torch_missing() or "CUDA graphs need a GPU")
    found |= {f"eager {name}": figures for name, figures in startup_programs.eager(8).items()}
    programs = {"pallas", "pallas-bound", "xla", "xla-bound", "one-kernel"}
    assert found.keys() == programs | {"eager pallas", "eager xla"}
    assert all(us > 0 for figures in found.values() for us in figures.values())
    assert found["pallas"].keys() == {"queued_us", "synchronised_us"}


def test_the_median_call(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(startup_programs.time, "perf_counter", lambda: float(next(clock)))
    calls = []
    assert startup_programs.microseconds(calls.append) == 1e6  # a call takes one tick
    assert calls[:6] == [0, 1, 2, 3, 4, 0] and len(calls) == 15
