"""The OpenAPI document says what is there and nothing else: by its parts, and by a client that tries all that it allows and more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models import checkpoint
from tests.conftest import Server, encode

_PREDICTING = {"200", "400", "413", "415", "422", "500", "503", "504"}
# Where the operations of this document get images, which none of its schemas could make up.
_HOOKS = """
import base64
import schemathesis
from hypothesis import strategies

images = strategies.sampled_from([bytes.fromhex(line) for line in open({images!r})])
for media_type in ("image/*", "application/octet-stream"):
    schemathesis.openapi.media_type(media_type, images)
schemathesis.openapi.format("binary", images)
schemathesis.openapi.format("byte", images.map(lambda image: base64.b64encode(image).decode()))


@schemathesis.hook
def before_call(context, case, kwargs):
    # No schema can say that a tensor's shape is that of its data.
    if case.path.endswith("/infer") and case.meta.generation.mode == "positive" and isinstance(case.body, dict):
        (tensor,) = case.body["inputs"]
        if tensor["name"] == "image":
            tensor["shape"] = [len(tensor["data"])]
        else:
            tensor |= {{"shape": [1, 32, 32, 3], "data": [7] * 3072}}
        tensor.pop("parameters", None)
        for output in case.body.get("outputs") or []:
            output["parameters"] = {{"classification": 2}}
"""


@pytest.fixture(scope="module")
def keyed(tiny: Path) -> Iterator[Server]:
    server = Server(tiny, "--precision", "fp32", "--api-keys", "alpha,beta")
    yield server
    assert server.stop() == 0


def operations(document: dict[str, Any]) -> dict[str, Any]:
    return {f"{method} {path}": operation for path, methods in document["paths"].items() for method, operation in methods.items()}


def test_the_document_has_exactly_our_operations_with_their_answers(tiny_server: Server) -> None:
    found = operations(tiny_server.get("/openapi.json").json())
    model = ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"]
    named = ["/predictions/{model}", "/predictions/{model}/{version}"]
    assert {name: set(operation["responses"]) for name, operation in found.items()} == {
        "post /predict": _PREDICTING,
        "post /predict/batch": _PREDICTING,
        **{f"get {path}": {"200", "400", "500", "503"} for path in ("/livez", "/readyz", "/health", "/ping")},
        **{f"get /v2/health/{kind}": {"200", "400", "500", "503"} for kind in ("live", "ready")},
        **{f"get {path}": {"200", "400", "500"} for path in ("/info", "/v2", "/models")},
        **{f"get {path}": {"200", "400", "404", "500"} for path in (*model, "/models/{model}", "/models/{model}/{version}")},
        **{f"get {path}/ready": {"200", "400", "404", "500", "503"} for path in model},
        **{f"post {path}/infer": {*_PREDICTING, "404"} for path in model},
        **{f"{method} {path}": {*_PREDICTING, "404"} for path in named for method in ("post", "put")},
    }
    assert len({operation["operationId"] for operation in found.values()}) == len(found)
    forms = {"image/*", "application/octet-stream", "multipart/form-data", "application/x-www-form-urlencoded", "application/json"}
    assert set(found["post /predict"]["requestBody"]["content"]) == forms
    assert set(found["put /predictions/{model}"]["requestBody"]["content"]) == forms
    assert set(found["post /predict/batch"]["requestBody"]["content"]) == {"multipart/form-data", "application/json"}
    for operation in found.values():
        assert "security" not in operation
        for status, answer in operation["responses"].items():
            assert set(answer["headers"]) == {"x-request-id", *(["retry-after"] if status == "503" else [])}


def test_with_keys_set_the_document_says_where_one_is_needed_and_the_server_asks_there_only(keyed: Server, tiny: Path) -> None:
    document = keyed.get("/openapi.json").json()
    assert set(document["components"]["securitySchemes"]) == {"X-API-Key", "Bearer"}
    version = checkpoint.read_header(tiny).version
    for name, operation in operations(document).items():
        method, path = name.split(" ")
        url = path.replace("{model}", "tiny").replace("{version}", version)
        answer = keyed.request(method, url)
        if "security" in operation:
            assert operation["security"] == [{"X-API-Key": []}, {"Bearer": []}]
            assert "401" in operation["responses"]
            assert answer.status_code == 401, name
        else:
            assert answer.status_code == 200, name
            assert path.rpartition("/")[2] in ("livez", "readyz", "health", "live", "ready", "ping")


@pytest.mark.parametrize("key", [None, "beta"])
def test_all_that_the_document_allows_and_more_is_answered_as_it_says(
    tiny: Path, tiny_server: Server, keyed: Server, tmp_path: Path, key: str | None
) -> None:
    images = [encode((number * 40, 90, 7), kind, (8, 8)) for number in range(3) for kind in ("PNG", "JPEG", "WEBP")]
    (tmp_path / "images").write_text("\n".join(image.hex() for image in images))
    (tmp_path / "hooks.py").write_text(_HOOKS.format(images=str(tmp_path / "images")))
    header = checkpoint.read_header(tiny)
    settings = f"[parameters]\nmodel = {json.dumps(header.name)}\nversion = {json.dumps(header.version)}\n"
    (tmp_path / "schemathesis.toml").write_text(settings)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{(keyed if key else tiny_server).url}/openapi.json"]
    command += ["--checks", "all", "--max-examples", "8", "--seed", "1", "--no-color", "--request-timeout", "60"]
    run = subprocess.run(
        command + (["--header", f"X-API-Key: {key}"] if key else []),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "SCHEMATHESIS_HOOKS": "hooks"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:]
    assert "23 selected / 23 total" in run.stdout


def test_the_examples_in_the_document_work(tiny_server: Server) -> None:
    for name, operation in operations(tiny_server.get("/openapi.json").json()).items():
        content = operation.get("requestBody", {}).get("content", {})
        if "application/json" in content:
            method, path = name.split(" ")
            for parameter in operation["parameters"]:
                if parameter["in"] == "path":
                    path = path.replace(f"{{{parameter['name']}}}", parameter["description"].rpartition(" ")[2])
            assert tiny_server.request(method, path, json=content["application/json"]["example"]).status_code == 200, name
