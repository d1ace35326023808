"""Nothing that a shared store holds is unpickled: no module of Tutti can."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["infra", "blocks", "tasks", "flows"]
PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def unpickling(source: str) -> list[str]:
    """What in a module's source could unpickle, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [f"{node.lineno}: import {name}" for name in names if PICKLERS & set(name.split("."))]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if called in ("torch.load", "torch.serialization.load") and not _is(
            keywords.get("weights_only"), True
        ):
            found.append(f"{node.lineno}: {called} without weights_only=True")
        if "allow_pickle" in keywords and not _is(keywords["allow_pickle"], False):
            found.append(f"{node.lineno}: allow_pickle")
        if called in ("pd.read_pickle", "pandas.read_pickle") or called.endswith(".PickleSerializer"):
            found.append(f"{node.lineno}: {called}")
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(f"{node.lineno}: {called}")
        if called.endswith("import_module") or called == "__import__":
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and argument.value in PICKLERS:
                found.append(f"{node.lineno}: import {argument.value}")
    return found


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("layer", LAYERS)
def test_no_module_unpickles(layer: str) -> None:
    modules = sorted((ROOT / layer).rglob("*.py"))
    assert modules
    found = {str(module): lines for module in modules if (lines := unpickling(module.read_text()))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import cloudpickle as c",
        "from joblib import load",
        "from multiprocessing import pickle",
        "def f():\n    import dill",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "torch.load(x, weights_only=flag)",
        "np.load(x, allow_pickle=True)",
        "pd.read_pickle(x)",
        "yaml.load(x)",
        "importlib.import_module('pickle')",
    ],
)
def test_what_unpickles_is_seen(source: str) -> None:
    assert unpickling(source)


def test_what_does_not_is_let_be() -> None:
    assert unpickling("import json\ntorch.load(x, weights_only=True)\nnp.load(x)\nyaml.safe_load(x)") == []
