"""The rules of the structure: who imports whom, who must not import torch, which files may be long, what we use of LitServe."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import litserve
import pytest

ROOT = Path(__file__).parent.parent
# In this order: a file imports only files to its left.
ORDER = {
    "models": [
        "colour",
        "images",
        "preprocessing",
        "labels",
        "architectures",
        "checkpoint",
        "progress",
        "data",
        "cache",
        "augmentation",
        "evaluation",
        "recipe",
        "training",
        "weights",
        "export",
        "pretrained",
        "run",
        "__main__",
    ],
    "service": [
        "settings",
        "client",
        "machine",
        "schemas",
        "bodies",
        "slots",
        "conversion",
        "engine",
        "openvino_engine",
        "torch_engine",
        "worker",
        "loop",
        "frontdoor",
        "envelope",
        "openapi",
        "intake",
        "routes",
        "protocols",
        "app",
        "connection",
        "server",
        "__main__",
    ],
}
OF_MODELS_FOR_SERVICE = {"checkpoint", "images", "preprocessing", "architectures"}


def imports(file: Path) -> set[tuple[str, str]]:
    """(package, module) of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ORDER:
            package, _, module = node.module.partition(".")
            found |= {(package, module.split(".")[0])} if module else {(package, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            parts = [alias.name.split(".") for alias in node.names]
            found |= {(part[0], part[1]) for part in parts if part[0] in ORDER and len(part) > 1}
    return found


@pytest.mark.parametrize("package", ORDER)
def test_every_file_is_known_and_imports_only_files_above_it(package: str) -> None:
    files = {file.stem: file for file in (ROOT / package).glob("*.py") if file.stem != "__init__"}
    assert sorted(files) == sorted(ORDER[package])
    for name, file in files.items():
        above = ORDER[package][: ORDER[package].index(name)]
        for owner, module in imports(file):
            if owner == package:
                assert module in above, f"{package}/{name}.py imports {module}"
            else:
                assert package == "service", f"{package}/{name}.py imports {owner}.{module}"
                assert module in OF_MODELS_FOR_SERVICE, f"service/{name}.py imports models.{module}"


def test_what_the_parent_and_the_front_doors_import_brings_no_torch() -> None:
    code = "import sys, service.server, service.routes, models.checkpoint; sys.exit(any(m.split('.')[0] == 'torch' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_file_is_over_400_lines() -> None:
    long = {str(file): len(file.read_text().splitlines()) for package in ORDER for file in (ROOT / package).glob("*.py")}
    assert {file: lines for file, lines in long.items() if lines > 400} == {}


def test_litserve_has_every_name_that_we_use_and_none_begins_with_an_underscore() -> None:
    from litserve.callbacks import CallbackRunner
    from litserve.loops import LitLoop, inference_worker
    from litserve.transport.base import MessageTransport
    from litserve.utils import WorkerSetupStatus

    for thing in (
        CallbackRunner,
        LitLoop,
        inference_worker,
        MessageTransport,
        WorkerSetupStatus.READY,
        litserve.LitServer.register_endpoints,
    ):
        assert thing is not None
    for file in (ROOT / "service").glob("*.py"):
        assert not [
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("litserve")
            and any(alias.name.startswith("_") for alias in node.names)
        ]
