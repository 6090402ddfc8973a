"""No kernel's body names the interpreter: what only a GPU runs is a primitive, with its meaning beside it."""

import ast
from collections.abc import Iterator

from parity.dispatch.test_floors import MODULES

KERNELS = "pallas_models.kernels"
TREES = {
    name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items() if name.startswith(KERNELS)
}
# What runs before a kernel is traced: the launches, one of which runs any kernel, and methods of objects of
# kernels that say which memory they want.
BEFORE = {"launch", "launch_in_turns", "scratch_types", "sums_scratch_types", "mail_types"}
Part = tuple[str, ast.FunctionDef | ast.ClassDef]  # of the code of a module


def parts(tree: ast.AST) -> Iterator[ast.AST]:
    """All that is in a piece of code, but for functions that run before a kernel is traced."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.FunctionDef) and node.name in BEFORE):
            yield from parts(node)


def takes_references(function: ast.FunctionDef) -> bool:
    given = function.args
    extra = [x for x in (given.vararg, given.kwarg) if x is not None]
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra]
    names = {x.id for a in arguments if a.annotation for x in ast.walk(a.annotation) if isinstance(x, ast.Name)}
    return bool(names & {"Ref", "Refs"}) or any(a.arg in ("ref", "refs") for a in arguments)


def bodies(trees: dict[str, ast.Module]) -> list[Part]:
    """Functions that take references, and all functions and classes of kernels that these name, and so on."""
    own = {
        f"{module}.{node.name}": (module, node)
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    full_names = {
        module: {node.name: f"{module}.{node.name}" for node in tree.body if hasattr(node, "name")}
        | {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for module, tree in trees.items()
    }
    todo = [
        (module, node)
        for module, tree in trees.items()
        for node in parts(tree)
        if isinstance(node, ast.FunctionDef) and takes_references(node)
    ]
    found: dict[int, Part] = {}
    while todo:
        module, part = todo.pop()
        if id(part) in found:
            continue
        found[id(part)] = module, part
        known = full_names[module]
        for node in parts(part):
            name = ""
            if isinstance(node, ast.Name):
                name = known.get(node.id, "")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{known.get(node.value.id, '')}.{node.attr}"
            todo += [own[name]] if name in own else []
    return list(found.values())


def name_the_interpreter(trees: dict[str, ast.Module]) -> set[str]:
    """The parts of kernels' bodies that name `interpret`, as a variable, an argument or an attribute."""
    return {
        f"{module.removeprefix(KERNELS)[1:]}.{part.name}"
        for module, part in bodies(trees)
        for node in parts(part)
        if "interpret" in (getattr(node, key, None) for key in ("id", "arg", "attr"))
    }


def test_no_body_of_a_kernel_names_the_interpreter():
    for backend in ("mosaic", "triton"):
        names = {part.name for module, part in bodies(TREES) if module.startswith(f"{KERNELS}.{backend}")}
        assert len(names) > 50, backend
    assert name_the_interpreter(TREES) == set()


def test_what_names_the_interpreter_is_seen():
    """In a body, in a function that a body calls from another module, and in an object of a kernel."""
    sources = {
        "a": """
def activate(x, *, interpret):
    return jnp.exp2(x) if interpret else exp2(x)
def of_the_host(x, interpret):
    return launch(kernel, interpret=interpret)(x)
""",
        "b": f"""
from {KERNELS} import a
from {KERNELS}.a import activate
class Rows:
    interpret: bool
def deep(x_ref: Ref) -> None:
    helper(x_ref)
def helper(x):
    return a.activate(x), Rows(x)
def near(*refs: Ref | None, interpret: bool) -> None:
    pass
""",
    }
    trees = {f"{KERNELS}.{name}": ast.parse(source) for name, source in sources.items()}
    assert name_the_interpreter(trees) == {"a.activate", "b.Rows", "b.near"}
