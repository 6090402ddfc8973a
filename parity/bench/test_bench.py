"""The benchmarks' own logic: statistics, timing, result files, tables, and what commands say when they cannot."""

import dataclasses
import functools
import gzip
import importlib.util
import json
import re
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as cli
from bench.cases import minilm as benchmark
from bench.cases import sts
from bench.measuring import environment, harness, results, timing
from bench.measuring.results import Accuracy, Case, Entry, Kernel, Result, ResultError
from bench.measuring.timing import Budget, Candidate, DeviceTimerError, Timing
from bench.models import minilm_models
from bench.reporting import readme, reasons, report, tables
from pallas_models import minilm
from pallas_models.minilm import MiniLMConfig
from parity.support.common import KERNEL

# Not what was measured in this checkout.
COMMITTED = [path for path in results.stored(results.DEFAULT_FOLDER) if path.suffix == ".gz"]
TINY = MiniLMConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, max_positions=24
)
FAST = Budget(warmup_s=0.001, queue_s=0.001, wall_samples=5, device_groups=2, device_calls=3, pause_s=0)


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch) -> minilm_models.Checkpoint:
    """A small random encoder, which the commands load in place of the real one, on a machine without GPU."""
    tiny = minilm_models.Checkpoint(tensors=minilm_models.random_tensors(TINY), config=TINY, origin="random")
    monkeypatch.setattr(minilm_models, "load_checkpoint", lambda path: tiny)
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(timing, "QUICK", FAST)
    return tiny


@pytest.fixture
def with_torch() -> None:
    """The test is skipped where torch's models cannot run."""
    if missing := minilm_models.torch_missing():
        pytest.skip(missing)


def entry(family: str, us: float, **changes: object) -> Entry:
    time = Timing(median_us=us, p20_us=round(0.9 * us, 3), p80_us=round(1.1 * us, 3), samples=24, method="cupti")
    fields = dict(name=f"{family}-{us:g}", family=family, status="ok", device=time, wall=time)
    return Entry(**{**fields, **changes})


def make_result(**changes: object) -> Result:
    lost = dict(device=None, wall=None, message="out of memory", status="failed")
    cases = [
        Case(
            label=label,
            dtype="fp16",
            shape={"batch": 1, "seq": 16},
            flop=8e8,
            entries=[
                entry("ours", 10.0, kernels=[Kernel(name="k", us=10.0)], compile_s=1.5),
                entry("xla", xla, accuracy=Accuracy(measure="1 - cosine", value=1e-6, limit=1e-5)),
                entry("xla", 50.0),
                entry("torch", 40.0),
                entry("torch", 1.0, name="torch-graph", **lost),
            ],
        )
        for label, xla in (("1x16 fp16", 20.0), ("1x128 fp16", 45.0))
    ]
    fields = dict(
        benchmark="minilm",
        date="2026-11-20T12:00:00+00:00",
        partial=False,
        environment={"device": "NVIDIA H200", "driver": "580.1", "jax": "0.11.2", "commit": "abc123"},
        ceilings={"matmul_bf16_tflop_per_s": 800.0, "copy_tb_per_s": 4.2},
        settings={"weights": "random"},
        cases=cases,
    )
    return Result(**{**fields, **changes})


class TestTiming:
    def test_summary(self):
        time = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0], "wall")
        assert (time.median_us, time.p20_us, time.p80_us, time.samples) == (3.5, 2.0, 5.0, 6)
        with pytest.raises(ValueError, match="no samples"):
            Timing.of([], "wall")

    def test_split_calls(self):
        kernels = [("a", 1.0), ("b", 2.0)] * 3
        assert timing.split_calls(kernels, 3) == [[("a", 1.0), ("b", 2.0)]] * 3
        assert timing.split_calls(kernels, 4) is None
        assert timing.split_calls([("a", 1.0), ("a", 1.0), ("b", 1.0), ("a", 1.0)], 2) is None

    def measure(self, monkeypatch, record, **candidate):
        queued = []

        def record_kernels(run):
            queued.clear()
            run()
            return record(len(queued))

        monkeypatch.setattr(timing, "record_kernels", record_kernels)
        fake = Candidate(call=queued.append, wait=lambda _: None, **candidate)
        return timing.measure({"fake": fake}, FAST)["fake"]

    def test_device_time_is_that_of_the_kernels(self, monkeypatch):
        found = self.measure(monkeypatch, lambda calls: [("a", 3.0), ("b", 4.0)] * calls)
        assert found.device == Timing(median_us=7.0, p20_us=7.0, p80_us=7.0, samples=6, method="trace")
        assert found.kernels == [("a", 3.0), ("b", 4.0)]
        assert found.wall.samples == FAST.wall_samples and found.wall.method == "wall"

    def test_calls_that_differ_are_averaged(self, monkeypatch):
        found = self.measure(monkeypatch, lambda calls: [("a", 3.0)] * calls + [("once", 4.0)])
        assert found.device.method == "trace_mean" and found.device.median_us == 4.0
        assert found.device.samples == FAST.device_groups and not found.kernels

    def test_kernels_that_the_profiler_does_not_see(self, monkeypatch):
        def events(queue):
            queue()
            return 500.0

        found = self.measure(
            monkeypatch, lambda calls: [("copy", 1.0)] * calls, events=events, launches_at_least=2
        )
        assert found.device.method == "cuda_events" and found.device.samples == 6

    def test_groups_go_on_with_other_input_sets(self, monkeypatch):
        """Not with those that the group before has just brought into the cache."""
        groups, seen = [], []

        def record_kernels(run):
            seen.clear()
            run()
            groups.append(list(seen))
            return [("k", 1.0)] * len(seen)

        monkeypatch.setattr(timing, "record_kernels", record_kernels)
        fake = Candidate(call=seen.append, wait=lambda _: None)
        timing.measure({"a": fake, "b": fake}, FAST)
        sets = [number for group in groups for number in group]
        assert len(groups) == 4 and len(set(sets)) == len(sets) == 4 * (FAST.device_calls + 1)

    def test_without_profiler_or_events(self, monkeypatch):
        def record(calls):
            raise DeviceTimerError("another profiler is attached")

        found = self.measure(monkeypatch, record)
        assert found.device == found.wall and found.device.method == "wall"

    def test_a_failure_stops_nobody_else(self):
        def fail(i):
            if i > 2:
                raise RuntimeError("illegal address")

        good = Candidate(call=lambda i: i, wait=lambda _: None)
        found = timing.measure({"bad": dataclasses.replace(good, call=fail), "good": good}, FAST, on_device=False)
        assert isinstance(found["bad"], RuntimeError)
        assert found["good"].device is None and found["good"].wall.median_us > 0

    def test_what_overlaps_counts_once(self):
        """Kernels in the order of their starts; one that ends before another that began earlier adds nothing."""
        kernels = [(5000.0, 2000.0, "c"), (0.0, 1000.0, "a"), (500.0, 1500.0, "b"), (5100.0, 100.0, "d")]
        assert timing.parts(kernels) == [("a", 1.0), ("b", 1.0), ("c", 2.0), ("d", 0.0)]

    def test_record_kernels(self, monkeypatch):
        made = types.SimpleNamespace

        def event(start, name):
            return made(start_ns=start, duration_ns=300.0, name=name)

        events = [event(700.0, "second"), event(0.0, "first"), event(400.0, "MemcpyD2D"), event(450.0, "Memset")]
        planes = [
            made(name="/device:GPU:0 (model)", lines=[made(name="Stream #7(Compute,MemcpyD2D)", events=events)]),
            made(name="/host:CPU", lines=[made(name="Stream", events=[event(100.0, "of the host")])]),
            made(name="/device:GPU:1", lines=[made(name="XLA Ops", events=[event(100.0, "of XLA")])]),
        ]
        log = []

        def start_trace(folder, profiler_options):
            assert profiler_options.host_tracer_level == profiler_options.python_tracer_level == 0
            (Path(folder) / "run").mkdir()
            (Path(folder) / "run/machine.xplane.pb").touch()
            log.append("start")

        monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append("stop"))
        data = made(from_file=lambda path: made(planes=planes))
        monkeypatch.setattr(jax.profiler, "ProfileData", data)
        assert timing.record_kernels(lambda: log.append("run")) == [("first", 0.3), ("second", 0.3)]  # ns to us
        assert log == ["start", "run", "stop"]

        def fail():
            raise ValueError("of the computation")

        with pytest.raises(ValueError, match="of the computation"):
            timing.record_kernels(fail)
        assert log[3:] == ["start", "stop"]
        planes.clear()
        with pytest.raises(DeviceTimerError, match="saw no kernel"):
            timing.record_kernels(lambda: None)

        def busy(*_, **__):
            raise RuntimeError("Only one profile may be run at a time.")

        monkeypatch.setattr(jax.profiler, "start_trace", busy)
        with pytest.raises(DeviceTimerError, match="Only one profile"):
            timing.record_kernels(lambda: None)

    @pytest.mark.skipif(environment.has_gpu(), reason="CUPTI serves one profiler of a process, of others' tests")
    def test_the_profiler_runs_without_a_gpu(self):
        """What is asked of JAX's profiler is there, in every version."""
        with pytest.raises(DeviceTimerError, match="saw no kernel"):
            timing.record_kernels(lambda: jnp.ones(8).block_until_ready())


def with_names(data: dict) -> dict:
    """What a result file holds, its entries with the names of their fields, as version 4 had them."""
    fields = [field.name for field in dataclasses.fields(results.Entry)]
    for case in data["cases"]:
        case["entries"] = [dict(zip(fields, found, strict=False)) for found in case["entries"]]
    return data


class TestResults:
    def test_round_trip(self, tmp_path):
        result = make_result()
        path = results.save(result, tmp_path)
        assert path == tmp_path / "nvidia-h200" / "minilm.json"
        assert results.load(path) == result
        assert [p.name for p in path.parent.iterdir()] == ["minilm.json"]

    def test_a_file_is_short(self, tmp_path):
        """Four digits, a line for each case and entry, a kernel once a call, text once: files are kept."""
        case = make_result().cases[0]
        launches = results.kernels_of([("long", 1 / 3), ("b", 12345.6), ("long", 1 / 3)])
        entries = [
            dataclasses.replace(case.entries[0], kernels=launches, name='{"label":[1,2,['),
            *case.entries[1:],
        ]
        path = results.save(make_result(cases=[dataclasses.replace(case, entries=entries)] * 2), tmp_path)
        text = path.read_text()
        assert len(text.splitlines()) == 1 + 2 * (1 + len(entries)) and text.count('"long"') == 1
        first = results.load(path).cases[1].entries[0]
        assert first.kernels == [Kernel(name="long", us=0.6667, calls=2), Kernel(name="b", us=12346.0)]
        assert first.name == '{"label":[1,2,['

    def test_kernels_of_ours_and_launches_of_all(self):
        time = entry("ours", 10.0).wall
        measured = timing.Measurement(device=time, wall=time, kernels=[("a", 1.0), ("b", 2.0), ("a", 3.0)])
        ours, other = (entry(family, 5.0).timed(measured) for family in ("ours", "torch"))
        assert ours.kernels == [Kernel(name="a", us=4.0, calls=2), Kernel(name="b", us=2.0)]
        assert other.kernels == [] and ours.launches == other.launches == 3 and other.device == time

    def test_partial_results_do_not_replace_complete_ones(self, tmp_path):
        assert results.save(make_result(partial=True), tmp_path).name == "minilm.partial.json"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d.update(format="other"), "is not a benchmark result"),
            (lambda d: d.update(version=99), "version 99"),
            (lambda d: d.pop("cases"), "lacks cases"),
            (lambda d: d.update(more=1), "unknown field more"),
            (lambda d: d.update(partial="no"), "partial: expected bool, got 'no'"),
            (lambda d: d["ceilings"].update(copy="fast"), "ceilings.copy: expected float, got 'fast'"),
            (lambda d: d["cases"][1]["entries"][0].pop("family"), r"cases\[1\].entries\[0\]: lacks family"),
            (lambda d: d["cases"][0]["entries"][0].update(status="fine"), "expected one of ok, wrong"),
            (lambda d: d["cases"][0]["entries"].insert(0, ["a"]), r"entries\[0\]: lacks family"),
            (lambda d: d["cases"][0]["entries"].insert(0, [1] * 13), r"entries\[0\]: expected an object, got \["),
            (lambda d: d["cases"][0].update(entries={}), r"cases\[0\].entries: expected list, got {}"),
            (lambda d: d["cases"][0]["entries"][0].update(wall=3), "wall: expected an object, got 3"),
            (
                lambda d: d["cases"][0]["entries"][0]["wall"].__setitem__(1, 0),
                "1x16 fp16, ours-10: impossible times",
            ),
            (lambda d: d["cases"][0]["entries"][0]["wall"].__setitem__(2, 9), "impossible times"),
            (lambda d: d["cases"][0]["entries"][0]["wall"].pop(), "wall: lacks method"),
            (lambda d: d["cases"][0]["entries"][0]["wall"].append(1), r"wall: expected an object, got \["),
            (lambda d: d["cases"][0].update(flop=10**400), "flop: an integer of 1329 bits is no float"),
            (
                lambda d: d["cases"][0].update(flop=float("nan")),
                "1x16 fp16: flop is nan; expected a finite",
            ),
            (lambda d: d["cases"][0].update(bytes=-1), "1x16 fp16: bytes is -1.0; expected a finite number"),
            (lambda d: d["ceilings"].update(copy=float("inf")), "ceilings: copy is inf; expected a finite number"),
            (
                lambda d: d["cases"][0]["entries"][0].update(metrics={"total_s": 0}),
                "total_s is 0.0; expected a",
            ),
            (
                lambda d: d["cases"][0]["entries"][0].update(metrics={"total_s": 1e-320}),
                r"total_s is 1e-320; expected a finite number from 1e-09 to 1e\+09",
            ),
            (
                lambda d: d["cases"][0]["entries"][0]["wall"].__setitem__(0, 1e-320),
                "1x16 fp16, ours-10: impossible times",
            ),
            (lambda d: d["cases"][0]["entries"][0].update(peak_bytes=-5), "peak_bytes is -5.0; expected a finite"),
            (lambda d: d.update(benchmark="../minilm"), "benchmark: expected a name such as gated-mlp"),
            (lambda d: d.update(benchmark="<script>"), "benchmark: expected a name such as gated-mlp"),
            (lambda d: d.update(date="<script>"), "date: expected ISO 8601, got '<script>'"),
            (
                lambda d: d["cases"][0]["entries"][0].update(kernels=[[99, 2.0]]),
                r"cases\[0\].entries\[0\].kernels\[0\]: expected a place among \d+ names, got 99",
            ),
            (lambda d: d.update(names="k"), "names: expected list, got 'k'"),
            (lambda d: d.update(cases=[[[[[[[[[[]]]]]]]]]]), r"cases\[0\]: expected an object, got \[\["),
        ],
    )
    def test_invalid(self, tmp_path, change, message):
        path = results.save(make_result(), tmp_path)
        data = with_names(json.loads(path.read_text()))
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(ResultError, match=message) as error:
            results.load(path)
        assert str(path) in str(error.value)

    @pytest.mark.parametrize(
        "content", [b"", b'{"format": "pallas', b"\xff\xfe\x00", b"[1]", b"null", b"[" * 100_000]
    )
    def test_corrupt(self, tmp_path, content):
        path = tmp_path / "minilm.json"
        path.write_bytes(content)
        with pytest.raises(ResultError, match=r"minilm\.json: is not a"):
            results.load(path)

    @pytest.mark.parametrize("version", [1, 5])
    def test_older_versions(self, tmp_path, version):
        """Files of before there were peers, and defaults were left out; of before only kernels were named once."""
        path = results.save(make_result(), tmp_path)
        data = with_names(json.loads(path.read_text())) | {"version": version}
        names = data.pop("names")
        default = dict(status="ok", message="", compile_s=None, metrics={}, peak_bytes=None, launches=0)
        for case in data["cases"]:
            for i, entry in enumerate(case["entries"]):
                texts = entry.keys() & {"name", "family", "status", "message"}
                entry |= {name: names[entry[name]] for name in texts}
                for name, kind, place in (("accuracy", Accuracy, 0), ("device", Timing, 4), ("wall", Timing, 4)):
                    if row := entry.setdefault(name, None):
                        row[place] = names[row[place]]
                        fields = [field.name for field in dataclasses.fields(kind)]
                        entry[name] = dict(zip(fields, row, strict=True)) if version == 1 else row
                kernels = [(names[i], us) for i, us in entry.get("kernels", [])]
                if version == 1:
                    entry["kernels"] = [{"name": name, "us": us} for name, us in kernels]
                    entry.setdefault("status", "ok")
                else:
                    entry["kernels"] = [[0, us, 1] for _, us in kernels]
                    case["entries"][i] = [(default | entry)[name] for name in results._ENTRY_5]
        path.write_text(json.dumps(data if version == 1 else data | {"kernels": ["k"]}))
        assert results.load(path) == make_result()

    @pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
    def test_committed(self, path):
        assert results.load(path).cases

    def test_compressed(self, tmp_path):
        path = results.save(make_result(), tmp_path)
        packed = path.with_name("minilm.json.gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        assert results.stored(tmp_path) == [packed] and results.load(packed) == make_result()
        content = packed.read_bytes()
        for damaged in (content[:-9], content[:12] + b"\xff" + content[13:]):
            packed.write_bytes(damaged)
            with pytest.raises(ResultError, match=r"minilm\.json\.gz: cannot be read"):
                results.load(packed)
        assert results.stored(tmp_path) == [packed]
        results.save(make_result(), tmp_path)
        assert results.stored(tmp_path) == [path]

    def test_too_large(self, tmp_path):
        """As it is, and packed to a thousandth."""
        content = b"[" + b"0," * (4 << 20) + b"0]"
        for name, stored in (("minilm.json", content), ("minilm.json.gz", gzip.compress(content))):
            (tmp_path / name).write_bytes(stored)
            with pytest.raises(ResultError, match=rf"{name}: is larger than 8 MiB; a result has some 40 kB"):
                results.load(tmp_path / name)

    def test_absent(self, tmp_path):
        with pytest.raises(ResultError, match="cannot be read"):
            results.load(tmp_path / "none.json")


class TestTables:
    def test_best_and_means(self):
        result = make_result()
        case = result.cases[0]
        assert tables.best(case, "xla", tables.device)[0].name == "xla-20"
        assert tables.speedup(case, "xla", tables.device) == 2.0
        assert tables.mean_speedup(result.cases, "xla", tables.device) == pytest.approx(3.0)  # sqrt(2 * 4.5)
        bare = dataclasses.replace(case, entries=case.entries[:1])
        assert tables.speedup(bare, "torch", tables.wall) is None
        assert tables.mean_speedup([case, bare], "torch", tables.wall) is None

    def test_comparison(self):
        text = tables.comparison(make_result())
        device, wall = text.split("\n\nWall time")
        row = [cell.strip() for cell in device.splitlines()[4].strip("|").split("|")]
        assert row == ["1x16 fp16", "10", "20", "40", "2.00", "4.00", "80 TFLOP/s", "10%", "matmul"]
        assert "3.00" in device.splitlines()[-1] and "3.00" in wall.splitlines()[-1]
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert len({len(row) for row in rows[: len(rows) // 2]}) == 1, "columns are not aligned"

    def test_floors_and_ladder(self):
        case = make_result().cases[0]  # 8e8 flop: 1 us at 800 TFLOP/s; 8.4e6 bytes: 2 us at 4.2 TB/s
        variants = [*case.entries, entry("ladder", 40.0, name="naive"), entry("peer", 5.0)]
        result = make_result(cases=[dataclasses.replace(case, entries=variants, bytes=8.4e6)])

        def last(table: str) -> list[str]:
            return [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")]

        assert last(tables.floors(result)) == ["1x16 fp16", "95.2", "2", "memory", "20%", "10%", "5%", "40%"]
        ladder = ["0.21 (50, 5%)", "0.84 (200, 20%)", "0.42 (100, 10%)"]
        assert last(tables.ladder(result)) == ["1x16 fp16, TB/s", *ladder]
        assert tables.best(result.cases[0], "ours", tables.device)[1].median_us == 10, "variants do not count"
        assert "peers / ours" in tables.comparison(result) and "0.50" in tables.comparison(result)
        assert tables.ladder(result) in tables.full(result) and tables.ladder(result) in tables.brief(result)
        assert tables.full(result, "own").startswith("own\n\nFloor") and "naive" not in tables.full(result, "own")
        assert not tables.ladder(make_result()) and "Floor" not in tables.full(make_result(ceilings={}))

    def test_float32_products_have_no_floor(self):
        case = dataclasses.replace(make_result().cases[0], dtype="fp32", bytes=8.4e6)
        assert not tables.floors(make_result(cases=[case]))
        half = dataclasses.replace(case, products="fp16")
        assert "memory" in tables.floors(make_result(cases=[half]))
        assert "memory" in tables.floors(make_result(cases=[dataclasses.replace(case, flop=None)]))

    def test_steps(self):
        case = make_result().cases[0]
        found = [entry("xla", 100.0, name="xla-ops"), entry("ladder", 70.0, name="step-1"), entry("ours", 50.0)]
        found[2] = dataclasses.replace(found[2], name="pallas")
        result = make_result(cases=[dataclasses.replace(case, entries=found), case])
        rows = [line.strip("|").split("|") for line in benchmark.steps(result).splitlines()[2:]]
        assert [[cell.strip() for cell in row] for row in rows] == [
            ["nothing, all in XLA", "100", "-"],
            ["step-1", "70", "30"],
            ["step-5-norms-in-the-products", "50", "20"],
        ]
        assert benchmark.steps(result) in benchmark.table(result)
        assert not benchmark.steps(make_result())

    def test_nothing_measured_is_shown_as_such(self):
        case = make_result().cases[0]
        lost = [dataclasses.replace(e, device=None) for e in case.entries]
        result = make_result(cases=[dataclasses.replace(case, entries=lost, flop=None)], ceilings={})
        assert "Device time" not in tables.comparison(result)
        assert "torch-graph" in tables.entries(result)

    def test_failures(self):
        assert tables.failures(make_result()) == ["torch-graph failed: out of memory (all cases)"]

    def test_replace_marked(self):
        text = "a\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nb"
        new = readme.replace_marked(text, "x", r"\1 new")
        assert new == "a\n<!-- bench:x -->\n\\1 new\n<!-- /bench:x -->\nb"
        assert readme.replace_marked(new, "x", r"\1 new") == new
        for broken in ("", "<!-- /bench:x --><!-- bench:x -->", text + text):
            with pytest.raises(ValueError, match="exactly once"):
                readme.replace_marked(broken, "x", "new")


MARKED = "# Title\n<!-- bench:summary -->\n<!-- /bench:summary -->\nend\n"


class TestReport:
    def run(self, tmp_path: Path, text: str) -> tuple[int, str]:
        """The exit code, and README.md afterwards."""
        path = tmp_path / "README.md"
        path.write_text(text)
        code = cli.main(["report", "--results", str(tmp_path), "--readme", str(path), "--no-html"])
        return code, path.read_text()

    def test_writes_summary_and_page(self, tmp_path):
        results.save(make_result(), tmp_path)
        results.save(make_result(benchmark="gemm"), tmp_path)
        code, text = self.run(tmp_path, MARKED)
        assert code == 0
        assert text.startswith("# Title\n") and text.endswith("<!-- /bench:summary -->\nend\n")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "](" in line]
        assert rows == [
            [
                f"[{title}](nvidia-h200/README.md#{name}){readme.MARK}",
                "1x16 fp16",
                "10 us, 80 TFLOP/s",
                "XLA, 20 us",
                *ratios,
            ]
            for title, name, ratios in (
                ("MiniLM forward pass", "minilm", ("2.00", "2.83", "2.83")),  # sqrt(2 * 4)
                ("Matrix products", "gemm", ("2.00", "2.83", "2.83")),
            )
        ]
        page = (tmp_path / "nvidia-h200" / "README.md").read_text()
        assert readme.unaligned(tables.comparison(make_result())) in page and "\n## gemm\n" in page
        assert "\n|1x16 fp16|10|20|40|2.00|" in page
        for condition in ("Generated by", "NVIDIA H200", "2026-11-20", "abc123", "800 TFLOP/s", "weights: random"):
            assert condition in page

    def test_the_case_that_a_benchmark_shows(self):
        assert tables.headline(make_result(), "1x128 fp16").case == "1x128 fp16"
        assert tables.headline(make_result(), "1x1 fp16").case == "1x16 fp16"
        case = make_result().cases[0]
        ours = dataclasses.replace(case, entries=case.entries[:1])
        assert tables.headline(make_result(cases=[ours]), "") is None
        peer = dataclasses.replace(case, entries=[case.entries[0], entry("peer", 5.0)])
        assert tables.headline(make_result(cases=[peer]), "").baseline == "peer-5, 5 us"
        assert tables.headline(make_result(cases=[peer]), "").mean is None
        missing = [name for name in cli.BENCHMARKS if not hasattr(cli.module_of(name), "SHOWN")]
        assert not missing

    @pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
    def test_committed_results_have_the_case(self, path):
        result = results.load(path)
        assert readme.headline(result).case == cli.module_of(result.benchmark).SHOWN

    def test_what_a_file_says_stays_text(self, tmp_path):
        case = dataclasses.replace(make_result().cases[0], label="a|b\n\x1b[31m<script>alert(1)</script>")
        results.save(make_result(cases=[case], settings={"weights": "<img src=x>"}), tmp_path)
        assert self.run(tmp_path, MARKED)[0] == 0
        for path in (tmp_path / "README.md", tmp_path / "nvidia-h200" / "README.md"):
            text = path.read_text()
            assert r"a\|b  [31m&lt;script&gt;" in text
            assert not {"<script", "<img", "\x1b"} & set(re.findall(r"<\w+|\x1b", text))

    def test_no_text_of_a_file_is_markup(self, tmp_path):
        """Every text that is not one of a few words, in all that the report writes."""
        evil = "<script>alert(1)</script>\n# Heading\n\n| a |\x1b[31m"
        path = results.save(make_result(), tmp_path)
        words = {"pallas_models.bench", "minilm", "ok", "wrong", "failed", "skipped", *tables.FAMILIES, "ladder"}

        def spoil(value):
            if isinstance(value, dict):
                return {key: spoil(inner) for key, inner in value.items() if key != "date"} | {
                    key: inner for key, inner in value.items() if key == "date"
                }
            if isinstance(value, list):
                return [spoil(inner) for inner in value]
            return evil if isinstance(value, str) and value not in words else value

        path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
        assert self.run(tmp_path, MARKED)[0] == 0
        for page in (tmp_path / "README.md", path.parent / "README.md"):
            text = page.read_text()
            assert "&lt;script&gt;" in text
            assert "<script" not in text and "\x1b" not in text and "\n# Heading" not in text

    def test_generated_files_are_those_of_the_committed_results(self, tmp_path):
        """Run `python -m bench report` after a new result, or a change to a table."""
        found, failed = report.load_all(results.DEFAULT_FOLDER / report.README_GPU)
        complete = [result for result in found if not result.partial]
        folder = results.DEFAULT_FOLDER / report.README_GPU
        page = readme.page(complete, list(readme.PLOTS), reasons.load(folder))
        assert not failed and page == (folder / readme.NAME).read_text("utf-8")
        copy = tmp_path / "README.md"
        copy.write_text(report.README.read_text("utf-8"), "utf-8")
        readme.rewrite(copy, complete, f"bench/results/{report.README_GPU}/README.md")
        assert copy.read_text("utf-8") == report.README.read_text("utf-8")
        assert all((folder / report.PLOTS / f"{name}.png").is_file() for name in readme.PLOTS)

    def test_without_markers(self, tmp_path, capsys):
        results.save(make_result(), tmp_path)
        assert self.run(tmp_path, "# Title\n") == (0, "# Title\n")
        assert "has no <!-- bench:summary -->" in capsys.readouterr().out
        assert self.run(tmp_path, MARKED * 2) == (1, MARKED * 2)
        assert "each exactly once" in capsys.readouterr().err

    def test_without_results(self, tmp_path, capsys):
        assert self.run(tmp_path, MARKED) == (1, MARKED)
        assert "run `python -m bench minilm`" in capsys.readouterr().out

    def test_partial_results_are_not_published(self, tmp_path):
        results.save(make_result(partial=True), tmp_path)
        assert self.run(tmp_path, MARKED) == (0, MARKED)
        assert not (tmp_path / "nvidia-h200" / "README.md").exists()

    def test_corrupt_result(self, tmp_path, capsys):
        results.save(make_result(), tmp_path).write_text("{")
        assert self.run(tmp_path, "# Title\n") == (1, "# Title\n")
        assert "is not a JSON file" in capsys.readouterr().err

    def test_accuracy_table(self, tmp_path):
        accuracy = Accuracy(measure="1 - cosine", value=7.431e-05, limit=1e-4)
        metrics = dict(spearman=82.03, encode_sentences_per_s=12345.6)
        ours = Entry(name="pallas", family="ours", status="ok", accuracy=accuracy, metrics=metrics)
        torch = Entry(name="torch", family="torch", status="ok", metrics={"forward_sentences_per_s": 1e5})
        case = Case(label="fp16", dtype="fp16", shape={}, flop=None, entries=[ours, torch])
        bare = dataclasses.replace(case, entries=[ours])
        head, _, *rows = sts.table(make_result(benchmark="sts", cases=[case, bare])).splitlines()
        assert "text in" in head and "padded" not in head  # only columns of which something was measured
        first, last = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
        assert first == ["fp16", "0.999926", "82.03", "12,346", "100,000"]
        assert last[-2:] == ["12,346", "-"]


class TestMiniLM:
    def test_flop(self):
        # 8192 tokens: 6 layers * (2 * 8192 * 1769472 + 4 * 64 * 128**2 * 384)
        assert minilm_models.flop(MiniLMConfig(), 64, 128) == 183_609_851_904

    def test_least_bytes(self):
        # 6 layers of 1774464 parameters in float16, 512 words, 128 positions, 3 vectors, 4 outputs; ids and mask
        expected = 2 * (6 * 1774464 + (512 + 128 + 3 + 4) * 384) + 8 * 512
        assert minilm_models.least_bytes(MiniLMConfig(), 4, 128, 2) == expected

    @pytest.mark.usefixtures("with_torch")
    def test_baselines_agree(self, checkpoint):
        import torch

        ids, mask = benchmark.random_inputs((5, 12), TINY.vocab_size, "ragged", seed=0)
        assert mask.min() == 0
        expected = minilm_models.torch_model(checkpoint, "fp32", "cpu")(*map(torch.from_numpy, (ids, mask)))
        params, plain = minilm_models.plain_jax(checkpoint, "fp32")
        assert harness.cosine_distance(jax.jit(plain)(params, ids, mask), expected.numpy()) < 1e-6
        ours = jax.jit(functools.partial(minilm.embed, config=TINY))(checkpoint.params("fp32"), ids, mask)
        assert harness.cosine_distance(ours, expected.numpy()) < 1e-6

    def test_steps(self, checkpoint, monkeypatch):
        """Every step has kernels that the one before has not, and they compute what plain XLA does."""
        ids, mask = (jnp.asarray(x) for x in benchmark.random_inputs((3, 12), TINY.vocab_size, "ragged", seed=0))
        params = checkpoint.params("fp32")
        steps = [minilm_models.stepped(TINY, name) for name in minilm_models.STEPS]
        untraced = [minilm_models.stepped(TINY, list(minilm_models.STEPS)[i]) for i in (0, -1)]

        def kernels(jaxpr):
            inner = [x for eqn in jaxpr.eqns for x in jax.tree.leaves(list(eqn.params.values()))]
            below = [getattr(x, "jaxpr", x) for x in inner if hasattr(getattr(x, "jaxpr", x), "eqns")]
            return sum(eqn.primitive.name == "pallas_call" for eqn in jaxpr.eqns) + sum(map(kernels, below))

        counts = [kernels(jax.make_jaxpr(step)(params, ids, mask).jaxpr) for step in steps]
        assert counts == [8, 8, 10, 16]  # two layers: 4 products, an attention and 2 norms each; 2 more

        def here(op):
            return lambda *args, implementation, **options: op(
                *args, implementation=KERNEL if implementation == "triton" else implementation, **options
            )

        names = ("matmul", "attention_qkv", "layer_norm", "embed_tokens", "mean_pool")
        ops = types.SimpleNamespace(**{name: here(getattr(minilm_models.ops, name)) for name in names})
        monkeypatch.setattr(minilm_models, "ops", ops)
        plain_params, plain = minilm_models.plain_jax(checkpoint, "fp32")
        expected = jax.jit(plain)(plain_params, ids, mask)
        for step in untraced:
            assert harness.cosine_distance(jax.jit(step)(params, ids, mask), expected) < 1e-6

    def test_cosine_distance(self):
        a = np.eye(3)
        assert harness.cosine_distance(2 * a, a) == 0
        assert harness.cosine_distance(a[[0, 1, 0]], a) == 1
        assert harness.cosine_distance(a * np.nan, a) == 2
        assert harness.cosine_distance(a * 0, a) == 2
        with pytest.raises(ValueError, match="shape"):
            harness.cosine_distance(a[:2], a)

    def run(self, tmp_path, *options, shapes="2x5"):
        code = cli.main(["minilm", "--shapes", shapes, "--output", str(tmp_path), "--show-results", *options])
        return code, results.load(tmp_path / "cpu" / "minilm.partial.json")

    @pytest.mark.usefixtures("on_cpu", "with_torch")
    def test_without_gpu(self, checkpoint, tmp_path, capsys):
        code, result = self.run(tmp_path, "--dtype", "fp32,bf16", "--masks", "ragged")
        out = capsys.readouterr().out
        assert code == 0 and "No CUDA GPU found" in out and "Wall time" in out
        assert [case.label for case in result.cases] == ["2x5 fp32", "2x5 bf16"]
        for case in result.cases:
            found = {entry.name: entry for entry in case.entries}
            for name in ("xla-plain", "xla-ops", "torch-eager"):
                assert found[name].status == "ok", found[name].message
                assert found[name].wall.samples == FAST.wall_samples and found[name].device is None
            for name in ("xla-cudnn", "torch-graph", "torch-compile", "torch-compile-graph"):
                assert found[name].status == "skipped" and "GPU" in found[name].message

    def test_without_torch(self, checkpoint, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(minilm_models, "torch_missing", lambda: "transformers is not installed")
        code, result = self.run(tmp_path)
        assert code == 0 and "torch-graph" in (out := capsys.readouterr().out)
        missing = "transformers" if importlib.util.find_spec("torch") else "torch"
        assert f"skipped: {missing} is not installed (2x5 fp16)" in out
        status = {entry.name: entry.status for entry in result.cases[0].entries}
        assert status["xla-plain"] == "ok" and status["torch-eager"] == "skipped"

    @pytest.mark.usefixtures("on_cpu")
    def test_wrong_and_failing_candidates(self, checkpoint, tmp_path, capsys, monkeypatch):
        def broken(params, ids, mask, **_):
            if ids.shape == (1, 8):
                raise RuntimeError("cannot do 8")
            return jnp.ones((ids.shape[0], TINY.hidden_size))

        monkeypatch.setattr(minilm, "embed", broken)
        _, result = self.run(tmp_path, shapes="2x5,1x8")
        wrong, failed = ({e.name: e for e in case.entries}["xla-ops"] for case in result.cases)
        assert wrong.status == "wrong" and wrong.wall is None and "1 - cosine is" in wrong.message
        assert failed.status == "failed" and "cannot do 8" in failed.message
        assert all({e.name: e.status for e in case.entries}["xla-plain"] == "ok" for case in result.cases)
        assert "xla-ops wrong" in capsys.readouterr().out

    def test_too_long(self, checkpoint, capsys):
        assert cli.main(["minilm", "--shapes", "1x25"]) == 2
        assert "1x25: longer than the model's 24 positions" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["minilm", "--shapes", "1x16,7"], "'7' is no shape"),
            (["minilm", "--shapes", "0x16"], "'0x16' is no shape"),
            (["minilm", "--dtype", "fp8"], "unknown dtype fp8"),
            (["sts"], "--data"),
            (["unknown"], "invalid choice: 'unknown'"),
        ],
    )
    def test_wrong_options(self, capsys, options, message):
        with pytest.raises(SystemExit, match="2"):
            cli.main(options)
        assert message in capsys.readouterr().err


class TestSts:
    def test_read_pairs(self, tmp_path):
        path = tmp_path / "pairs.csv"
        path.write_text('"A ""b"", c.",D.,2.5\nE.,"F\ng",0\n', encoding="utf-8")
        assert sts.read_pairs(path) == [('A "b", c.', "D.", 2.5), ("E.", "F\ng", 0.0)]
        path.write_text("a,b,1\na,b\n")
        with pytest.raises(ValueError, match=r"pairs\.csv, row 2: expected sentence1"):
            sts.read_pairs(path)

    def test_batches(self):
        tokens = [[1], [2] * 9, [3] * 3, [4] * 8]
        (rows, ids, mask), (last, *_, last_mask) = sts.batches(tokens, batch_size=3)
        assert rows == [1, 3, 2] and last == [0]
        assert ids.shape == (3, 16) and last_mask.shape == (3, 8)
        assert mask.sum(-1).tolist() == [9, 8, 3] and last_mask.sum(-1).tolist() == [1, 0, 0]
        assert all(ids[i, : mask[i].sum()].tolist() == tokens[row] for i, row in enumerate(rows))

    def test_rates_of_packed_and_padded_rows(self):
        config = minilm.MiniLMConfig(
            vocab_size=30, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=16, max_positions=20
        )
        tensors = minilm_models.random_tensors(config)
        checkpoint = minilm_models.Checkpoint(tensors=tensors, config=config, origin="random")
        tokens = [[1], [2] * 9, [3] * 3, [4] * 15]
        assert sts.forward_rate(checkpoint, "fp32", tokens) > 0
        assert sts.padded_rate(checkpoint, "fp32", tokens, batch_size=2) > 0

    def test_spearman(self):
        embeddings = np.array([[1.0, 0], [0.9, 0.1], [0.5, 0.5], [0, 1.0]])
        index = {name: i for i, name in enumerate("abcd")}
        pairs = [("a", "b", 5.0), ("a", "c", 3.0), ("a", "d", 0.0)]
        assert sts.spearman(embeddings, index, pairs) == pytest.approx(100)
        assert sts.spearman(embeddings, index, [(a, b, -s) for a, b, s in pairs]) == pytest.approx(-100)

    def test_entry_of(self):
        def raises(error):
            def measure():
                raise error

            return measure

        found = sts.entry_of("st", "peer", lambda: {"encode_sentences_per_s": 5.0})
        assert (found.status, found.metrics) == ("ok", {"encode_sentences_per_s": 5.0})
        missing = ModuleNotFoundError("No module named 'sentence_transformers'", name="sentence_transformers")
        found = sts.entry_of("st", "peer", raises(missing))
        assert (found.status, found.message) == ("skipped", "sentence_transformers is not installed")
        for error in (RuntimeError("out of memory"), TypeError("no such argument")):
            found = sts.entry_of("st", "peer", raises(error))
            assert (found.status, found.message) == ("failed", f"{type(error).__name__}: {error}")

    def test_peers_have_a_column_where_they_were_measured(self):
        ours = Entry(name="pallas", family="ours", status="ok", metrics={"encode_sentences_per_s": 2000.0})
        peer = sts.entry_of("st", "peer", lambda: {"encode_sentences_per_s": 1000.0})
        case = Case(label="fp16", dtype="fp16", shape={}, flop=None, entries=[ours, peer])
        table = sts.table(make_result(benchmark="sts", cases=[case]))
        assert "sentence-transformers" in table and "2,000" in table and "1,000" in table
        bare = dataclasses.replace(case, entries=[ours])
        assert "sentence-transformers" not in sts.table(make_result(benchmark="sts", cases=[bare]))

    def test_without_data(self, tmp_path, capsys):
        assert cli.main(["sts", "--data", str(tmp_path)]) == 2
        assert "stsb-en-test.csv" in capsys.readouterr().out
