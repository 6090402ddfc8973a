"""What the project says of itself beside its code: one version everywhere, and issue forms that can be read."""

import re

import pytest

import pallas_models
from parity import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
FORMS = sorted((ROOT / ".github").rglob("*.yml"))


def test_one_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == pallas_models.__version__
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == pallas_models.__version__


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_and_workflows(path):
    """An issue form needs a name and fields with ids; a workflow needs jobs whose every step does something."""
    content = yaml.safe_load(path.read_text())
    assert content["name"]
    if path.parent.name == "ISSUE_TEMPLATE":
        assert content["description"]
        ids = [field["id"] for field in content["body"]]
        assert ids and len(ids) == len(set(ids))
    else:
        steps = [step for job in content["jobs"].values() for step in job["steps"]]
        assert steps and all("uses" in step or "run" in step for step in steps)


def test_forms_are_found():
    assert len(FORMS) >= 5


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md", "docs/glossary.md"])
def test_pages_name_modules_that_exist(name):
    for module in re.findall(r"`(pallas_models(?:\.\w+)*|weights)`", (ROOT / name).read_text()):
        assert (ROOT / module.replace(".", "/")).exists() or (ROOT / f"{module.replace('.', '/')}.py").exists()
