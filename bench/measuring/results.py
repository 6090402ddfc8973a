"""Result files: one JSON file per GPU and benchmark, with a schema that is checked when it is read.

A file stores what was measured and under which conditions; rates, ratios and means are derived from it where
they are shown (`bench.reporting.tables`), so that a file cannot contradict itself.
"""

import contextlib
import dataclasses
import datetime
import gzip
import json
import math
import re
import reprlib
import sys
import types
import typing
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bench.measuring import environment, sources
from bench.measuring.timing import Measurement, Timing
from pallas_models import files

FORMAT = "pallas_models.bench"
# 2 has more families, and peak_bytes; 3 names a kernel once; 4 has kernels of ours alone; 5 entries without names;
# 6 has all text of entries once, and leaves out the last fields of an entry where they are defaults;
# 7 has sources; 8 has confirmed
VERSION = 8
READABLE = (1, 2, 3, 4, 5, 6, 7, 8)
_LARGEST = 8 << 20  # bytes of a file, unpacked: what is parsed takes ten times as much
DEFAULT_FOLDER = Path(__file__).parents[1] / "results"

Family = Literal["ours", "ladder", "xla", "torch", "peer"]
Status = Literal["ok", "wrong", "failed", "skipped"]


class ResultError(ValueError):
    """A result file cannot be used: the message names the file and its fault."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How far an output is from the reference.

    Attributes:
      measure: the quantity in `value`, e.g. "1 - cosine".
      value: the largest seen, not a number included.
      limit: above it the output counts as wrong.
    """

    measure: str
    value: float
    limit: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a call spends in a kernel.

    Attributes:
      name: of the kernel.
      us: median duration of its launches in a call, added up.
      calls: how often a call launches it.
    """

    name: str
    us: float
    calls: int = 1


def kernels_of(launches: Sequence[tuple[str, float]]) -> list[Kernel]:
    """The kernels of a call in the order of their first launch, from the name and microseconds of each launch."""
    found: dict[str, list[float]] = {}
    for name, us in launches:
        found.setdefault(name, []).append(us)
    return [Kernel(name=name, us=sum(times), calls=len(times)) for name, times in found.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The outcome of one candidate in one case.

    Attributes:
      name: of the candidate, unique in the case.
      family: whose figure it counts for; the best entry of a family is the family's figure. ladder: variants of
        ours that are shown but count for nothing; peer: other libraries.
      accuracy: of its output, where there is one.
      device, wall: device and wall time; None unless ok, and `device` also without a GPU.
      kernels: of one call, where they were recorded; of ours.
      compile_s: seconds that compilation took.
      peak_bytes: device memory of inputs, results and temporaries of one call, without what a candidate holds for
        itself, such as weights; None where it is not known.
      launches: of kernels in a call, where they were recorded, else 0.
      metrics: further figures by name, with the unit in the name.
      status: ok; wrong: its output was too far from the reference, so it was not timed; failed: it raised;
        skipped: it was not run.
      message: why, unless ok.
    """

    name: str
    family: Family
    accuracy: Accuracy | None = None
    device: Timing | None = None
    wall: Timing | None = None
    kernels: list[Kernel] = dataclasses.field(default_factory=list)
    compile_s: float | None = None
    peak_bytes: float | None = None
    launches: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    status: Status = "ok"
    message: str = ""

    def timed(self, outcome: Measurement) -> "Entry":
        """This entry with its times, launches and, if it is ours, kernels."""
        kernels = kernels_of(outcome.kernels) if self.family == "ours" else []
        times = dict(device=outcome.device, wall=outcome.wall)
        return dataclasses.replace(self, **times, kernels=kernels, launches=len(outcome.kernels))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload that every candidate solves.

    Attributes:
      label: short name, unique in the file.
      dtype: fp32, fp16 or bf16.
      shape: sizes by name.
      flop: floating-point operations of one call; None where they are not counted.
      entries: what became of each candidate.
      bytes: what one call must read and write at the least; None where it is not counted.
      products: dtype of the matrix products, if not `dtype`.
    """

    label: str
    dtype: str
    shape: dict[str, int]
    flop: float | None
    entries: list[Entry]
    bytes: float | None = None
    products: str | None = None

    @property
    def mode(self) -> str:
        """The passes that are timed: forward, backward or both."""
        return next((mode for mode in ("backward", "both") if mode in self.shape), "forward")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One run of one benchmark.

    Attributes:
      benchmark: its name.
      date: ISO 8601, UTC.
      partial: whether the run was shortened (--quick, --shapes, no GPU, interrupted) and is not for
        publication.
      environment: GPU, driver, versions, commit.
      ceilings: rates measured in the same run, by name with the unit.
      settings: options that bear on the figures, and where the weights came from.
      cases: in the order in which they were run.
      sources: digests of the kernels and ops that it times (`bench.measuring.sources`); empty where the run was
        not complete, or before 2026-11-27.
      confirmed: the commit whose programs are the same as those that were timed, where they were compared; then
        `sources` are of that commit.
    """

    benchmark: str
    date: str
    partial: bool
    environment: dict[str, str]
    ceilings: dict[str, float]
    settings: dict[str, str]
    cases: list[Case]
    sources: dict[str, str] = dataclasses.field(default_factory=dict)
    confirmed: str = ""


_TIMES = (1e-9, 1e9)  # of seconds or microseconds, within which every ratio is a number, and its logarithm
_ROWS = (Entry, Accuracy, Timing, Kernel)  # in a file lists of their fields in order, text as its place in "names"
_ENTRY_5 = ["name", "family", "status", "message", "accuracy", "device", "wall", "kernels", "compile_s", "metrics"]
_ENTRY_5 += ["peak_bytes", "launches"]


def slug(name: str) -> str:
    """Turns a device name into a folder name: lower case, runs of other characters become a hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def path_of(result: Result, folder: Path) -> Path:
    """Where a result is stored: `<folder>/<gpu>/<benchmark>.json`, or `.partial.json`."""
    suffix = ".partial.json" if result.partial else ".json"
    return folder / slug(result.environment["device"]) / (result.benchmark + suffix)


def save(result: Result, folder: Path) -> Path:
    """Writes a result, replacing an older one of the same GPU and benchmark only once it is complete."""
    path = path_of(result, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    names: dict[str, int] = {}
    data = {"format": FORMAT, "version": VERSION, **_short(result, names), "names": [*names]}
    # A line for each case and for each entry, two places and then no number; strings stay as they are.
    parts = r'("(?:[^"\\]|\\.)*")|(?={"label":|\[\d+,\d+,(?:null|\[))'
    text = re.sub(parts, lambda found: found[1] or "\n", json.dumps(data, separators=(",", ":")))
    files.write(path, text + "\n")
    if not result.partial:
        path.with_name(f"{path.name}.gz").unlink(missing_ok=True)
    return path


def stored(folder: Path, gpu: str = "*") -> list[Path]:
    """The result files of a GPU, or of all; those that are committed are compressed."""
    return sorted(path for suffix in (".json", ".json.gz") for path in folder.glob(f"{gpu}/*{suffix}"))


def begun(benchmark: str, settings: dict[str, str]) -> Result:
    """The result of a run that begins now on this machine: partial until it is `complete`."""
    return Result(
        benchmark=benchmark,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        partial=True,
        environment=environment.describe(),
        ceilings={},
        settings=settings,
        cases=[],
    )


def earlier(benchmark: str, environment: Mapping[str, str], folder: Path) -> Result | None:
    """The whole result of a benchmark that the folder holds of this GPU and commit, if there is one."""
    for path in stored(folder, slug(environment["device"])):
        if path.name.split(".")[0] == benchmark:
            with contextlib.suppress(ResultError):  # what cannot be read is measured again
                found = load(path)
                if not found.partial and found.environment.get("commit") == environment.get("commit"):
                    return found
    return None


def kept(result: Result, folder: Path) -> list[Case]:
    """The cases that an earlier whole run of this GPU, commit and code measured, and `result` did not again."""
    before = earlier(result.benchmark, result.environment, folder)
    if before is None or before.sources != sources.timed(result.benchmark):  # uncommitted changes have one name
        return []
    labels = {case.label for case in result.cases}
    return [case for case in before.cases if case.label not in labels]


def complete(result: Result, folder: Path) -> Result:
    """The result as the result of a whole run, saved in the place of the partial one.

    Cases that are `kept` are in it, so that a benchmark can be run one mode at a time.
    """
    draft = path_of(result, folder)
    timed, cases = sources.timed(result.benchmark), kept(result, folder) + result.cases
    result = dataclasses.replace(result, partial=False, sources=timed, cases=cases)
    save(result, folder)
    draft.unlink()
    return result


def confirm(folder: Path, commit: str) -> list[Path]:
    """Has compressed results of a commit count as of today's code, whose programs are the same, and names them.

    Raises:
      ValueError: the checkout has changes that are not committed, or there are no such results.
    """
    now = environment.commit()
    if now.endswith(environment.CHANGED):
        raise ValueError(f"{now}: commit the changes first, so that results can name what they are confirmed for")
    found = {path: load(path) for path in stored(folder) if path.suffix == ".gz"}
    paths = [path for path, result in found.items() if result.environment.get("commit", "").startswith(commit)]
    if not paths:
        raise ValueError(f"{folder} has no results of {commit}")
    for path in paths:
        timed = sources.timed(found[path].benchmark)
        plain = save(dataclasses.replace(found[path], sources=timed, confirmed=now), folder)
        files.write(path, gzip.compress(plain.read_bytes(), mtime=0))
        plain.unlink()
    return paths


def _short(value: Any, names: dict[str, int]) -> Any:
    """What a file says of `value`: fractions to four digits, no defaults, text of entries as places in `names`."""
    if isinstance(value, float) and math.isfinite(value):
        digits = max(4, len(f"{abs(value):.0f}"))  # no whole number is rounded, so order stays
        return int(value) if value.is_integer() else float(f"{value:.{digits}g}")
    if isinstance(value, list):
        return [_short(item, names) for item in value]
    if isinstance(value, _ROWS):
        fields = dataclasses.fields(value)
        row = [getattr(value, field.name) for field in fields]
        while row[-1] == _default(fields[len(row) - 1]):
            row.pop()
        return _short([names.setdefault(x, len(names)) if isinstance(x, str) else x for x in row], names)
    if dataclasses.is_dataclass(value):
        stated = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        defaults = {field.name: _default(field) for field in dataclasses.fields(value)}
        return _short({name: item for name, item in stated.items() if item != defaults[name]}, names)
    return {k: _short(item, names) for k, item in value.items()} if isinstance(value, dict) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    """What a field is where a file lacks it; MISSING: every file has it."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def load(path: Path) -> Result:
    """Reads and validates a result file.

    Raises:
      ResultError: it cannot be read, is far larger than a result, is no JSON, comes from something else or from
        another version of the schema, or does not fit the schema.
    """
    try:
        with gzip.open(path) if Path(path).suffix == ".gz" else open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ResultError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(content) > _LARGEST:
        raise ResultError(f"{path}: is larger than {_LARGEST >> 20} MiB; a result has some 40 kB")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or too deep
        raise ResultError(f"{path}: is not a JSON file, or was cut short ({error})") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise ResultError(f'{path}: is not a benchmark result (no "format": "{FORMAT}")')
    version = data.pop("version", None)
    if version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise ResultError(f"{path}: has version {version!r} of the schema; this program reads {known}")
    try:
        key = "names" if version > 5 else "kernels"
        names = _build(list[str], data.pop(key, []), key)
        result: Result = _build(Result, data, "", names)
        _check(result)
        return result
    except _MismatchError as error:
        raise ResultError(f"{path}: {error}") from error


def _check(result: Result) -> None:
    """Raises _MismatchError for values that have the right type and cannot be."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 _.-]*", result.benchmark):  # it is part of names and links
        raise _MismatchError(f"benchmark: expected a name such as gated-mlp, got {reprlib.repr(result.benchmark)}")
    try:
        datetime.datetime.fromisoformat(result.date)
    except ValueError:
        raise _MismatchError(f"date: expected ISO 8601, got {reprlib.repr(result.date)}") from None
    _check_numbers("ceilings", result.ceilings)
    for case in result.cases:
        _check_numbers(case.label, {"flop": case.flop, "bytes": case.bytes})
        for entry in case.entries:
            place = f"{case.label}, {entry.name}"
            _check_numbers(place, {"compile_s": entry.compile_s, "peak_bytes": entry.peak_bytes})
            times = {name: value for name, value in entry.metrics.items() if name.endswith(("_s", "_us"))}
            _check_numbers(place, times, *_TIMES)
            for time in (entry.device, entry.wall):
                if time and not _TIMES[0] <= time.p20_us <= time.median_us <= time.p80_us <= _TIMES[1]:
                    raise _MismatchError(f"{place}: impossible times {time}")


def _check_numbers(
    place: str, values: Mapping[str, float | None], least: float = 0.0, most: float = sys.float_info.max
) -> None:
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            raise _MismatchError(
                f"{place}: {name} is {value}; expected a finite number from {least:g} to {most:g}"
            )


class _MismatchError(ValueError):
    pass


def _printable(text: str) -> str:
    """The text in one line, without what a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def _named(value: Any, names: Sequence[str], here: str) -> Any:
    """The text at a place in `names`; older files have some of it in its own place."""
    if type(value) is not int:
        return value
    if not 0 <= value < len(names):
        raise _MismatchError(f"{here}: expected a place among {len(names)} names, got {value}")
    return names[value]


def _build(expected: Any, data: Any, where: str, names: Sequence[str] = ()) -> Any:
    """Builds a value of type `expected` from parsed JSON; `where` is its place in the file."""
    here = where or "the file"
    if expected in _ROWS and isinstance(data, list):
        fields = [field.name for field in dataclasses.fields(expected)]
        if expected is Entry and len(data) > 2 and isinstance(data[2], str):
            fields = _ENTRY_5
        data = dict(zip(fields, data, strict=False)) if len(data) <= len(fields) else data
    if isinstance(expected, type) and dataclasses.is_dataclass(expected):
        if not isinstance(data, dict):
            raise _MismatchError(f"{here}: expected an object, got {reprlib.repr(data)}")
        known = {field.name: field for field in dataclasses.fields(expected)}
        hints = typing.get_type_hints(expected)
        if unknown := sorted(data.keys() - known.keys()):
            raise _MismatchError(f"{here}: unknown field {', '.join(unknown)}")
        if missing := [
            n for n, field in known.items() if n not in data and _default(field) is dataclasses.MISSING
        ]:
            raise _MismatchError(f"{here}: lacks {', '.join(missing)}")
        if expected in _ROWS:
            text = (str, Family, Status)
            data = {n: _named(value, names, here) if hints[n] in text else value for n, value in data.items()}
        built = {n: _build(hints[n], value, f"{where}.{n}".strip("."), names) for n, value in data.items()}
        return expected(**built)
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is list and isinstance(data, list):
        return [_build(arguments[0], value, f"{where}[{i}]", names) for i, value in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {_printable(k): _build(arguments[1], value, f"{where}.{k}", names) for k, value in data.items()}
    if origin is types.UnionType:  # X | None
        return None if data is None else _build(arguments[0], data, where, names)
    if origin is Literal:
        if data in arguments:
            return data
        raise _MismatchError(f"{here}: expected one of {', '.join(arguments)}, got {reprlib.repr(data)}")
    if expected is float and type(data) in (int, float):
        try:
            return float(data)
        except OverflowError:
            raise _MismatchError(f"{here}: an integer of {data.bit_length()} bits is no float") from None
    if expected is str and isinstance(data, str):
        return _printable(data)
    if type(data) is not expected:
        name = getattr(origin or expected, "__name__", str(expected))
        raise _MismatchError(f"{here}: expected {name}, got {reprlib.repr(data)}")
    return data
