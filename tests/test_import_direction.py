"""No import runs upwards: infra < blocks < tasks < flows."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ["infra", "blocks", "tasks", "flows"]


def imported_packages(source: str) -> set[str]:
    """Top-level packages that a module imports, wherever in it."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            packages.add(node.module.split(".")[0])
    return packages


@pytest.mark.parametrize("layer", ORDER)
def test_a_layer_imports_only_those_below_it(layer: str) -> None:
    modules = sorted((ROOT / layer).rglob("*.py"))
    assert modules
    above = set(ORDER[ORDER.index(layer) + 1 :]) | {"tests", "notebooks"}
    upward = {
        str(module): found for module in modules if (found := imported_packages(module.read_text()) & above)
    }
    assert upward == {}


def test_environment_hosts_stay_light() -> None:
    """What runs beside every environment must not pull in torch, Prefect or Dask."""
    seen: set[str] = set()
    queue = ["tasks.environment.host"]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        path = ROOT / (name.replace(".", "/") + ".py")
        if not path.exists():
            path = ROOT / name.replace(".", "/") / "__init__.py"
        if not path.exists():
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                queue += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
    assert {name.split(".")[0] for name in seen} & {
        "torch",
        "prefect",
        "distributed",
        "transformers",
    } == set()
