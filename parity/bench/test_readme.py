"""README.md and docs: short, their links lead somewhere, and their examples run as they stand."""

import re

import jax
import numpy as np
import pytest

import weights
from pallas_models import qwen3
from parity import ROOT
from parity.support.common import ON_GPU, float64

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHER_PAGES = [ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "bench/NOTES.md")]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
    # That needs real weights, and test_encoder.py runs it; test_meshes.py runs these on 8 devices.
    if (page.name, number) != ("README.md", 0) and page.name != "meshes.md"
]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 12_000


def slug(heading):
    """The anchor that GitHub and mkdocs give a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        if link.startswith("http"):
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in map(slug, headings), link


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(monkeypatch, tmp_path, code):
    """As they stand, but with a small Qwen3 in place of one that would be downloaded."""
    if "autotune" in code and not ON_GPU:
        compile(code, "example", "exec")
        pytest.skip("tuning times kernels on a GPU")
    if "serialize" in code:
        pytest.importorskip("flatbuffers", reason="flatbuffers is not installed: programs cannot be bytes")
    config = qwen3.Qwen3Config(
        vocab_size=10_000,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=32,
    )
    monkeypatch.setattr(weights, "load_qwen3", lambda name: qwen3.init(jax.random.key(0), config))
    monkeypatch.setattr(weights, "load_qwen3_config", lambda name: config)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    arrays = [value for value in names.values() if isinstance(value, jax.Array)]
    assert all(np.isfinite(float64(array)).all() for array in arrays)  # JAX would compile programs for each shape
    assert arrays or names.keys() & {"logits", "lowered"}


def test_every_op_and_model_is_listed():
    from pallas_models import ops

    text = "".join((ROOT / "docs" / page).read_text("utf-8") for page in ("operations.md", "models.md"))
    operations = {name for name in ops.__all__ if callable(getattr(ops, name)) and name[0].islower()}
    helpers = {"rotary_table", "segment_ids_from_cu_seqlens", "stack_gate_up", "unstack_gate_up", "zigzag_order"}
    assert not [name for name in sorted(operations - helpers) if f"`{name}`" not in text]
    assert not [
        name for name in weights.__all__ if re.fullmatch(r"load_\w+(?<!config)", name) and name not in text
    ]
