"""Clients of other servers, pointed at this one: Triton's own client over the Open Inference Protocol, and TorchServe's routes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import requests
import tritonclient.http as triton

from models import checkpoint
from models.preprocessing import Preprocessing
from tests.conftest import COLOURS, EXAMPLES, Server, encode
from tests.test_routes import error_code

IMAGES = [encode(colour) for colour in COLOURS[:16]]


@pytest.fixture
def client(tiny_server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(tiny_server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture(scope="module")
def version(tiny: Path) -> str:
    return checkpoint.read_header(tiny).version


@pytest.fixture(scope="module")
def predicted(tiny_server: Server) -> npt.NDArray[np.float64]:
    """What /predict answers for IMAGES: [16, 10]."""
    found = np.zeros((16, 10))
    for row, image in zip(found, IMAGES, strict=True):
        for item in tiny_server.post(image, params={"top_k": 10}).json()["predictions"]:
            row[item["index"]] = item["probability"]
    return found


def image_input(images: list[bytes], *, binary: bool) -> Any:
    tensor = triton.InferInput("image", [len(images)], "BYTES")
    data = images if binary else [base64.b64encode(image) for image in images]
    tensor.set_data_from_numpy(np.array(data, dtype=object), binary_data=binary)
    return tensor


def test_tritons_client_finds_a_live_and_ready_server_and_its_model(client: Any, version: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", version)
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("tiny", "1")
    server = client.get_server_metadata()
    assert (server["name"], set(server["extensions"])) == ("spyglass", {"classification", "binary_tensor_data"})
    assert client.get_model_metadata("tiny") == client.get_model_metadata("tiny", version)
    model = client.get_model_metadata("tiny")
    assert (model["name"], model["versions"]) == ("tiny", [version])
    assert model["inputs"] == [
        {"name": "image", "datatype": "BYTES", "shape": [-1]},
        {"name": "pixels", "datatype": "UINT8", "shape": [-1, 32, 32, 3]},
    ]
    assert model["outputs"] == [{"name": name, "datatype": "FP32", "shape": [-1, 10]} for name in ("probabilities", "logits")]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("count", [1, 16])
def test_tritons_client_gets_what_predict_answers(
    client: Any, predicted: npt.NDArray[np.float64], count: int, binary_in: bool, binary_out: bool
) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("logits", "probabilities")]
    result = client.infer("tiny", [image_input(IMAGES[:count], binary=binary_in)], outputs=outputs, request_id="mine")
    found, logits = result.as_numpy("probabilities"), result.as_numpy("logits")
    assert found.shape == logits.shape == (count, 10)
    assert found.dtype == logits.dtype == np.float32
    np.testing.assert_allclose(found, predicted[:count], rtol=0, atol=1e-6)
    softmax = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(softmax / softmax.sum(1, keepdims=True), predicted[:count], rtol=0, atol=1e-5)
    response = result.get_response()
    assert (response["model_name"], response["id"]) == ("tiny", "mine")
    assert [output["name"] for output in response["outputs"]] == ["logits", "probabilities"]


def test_without_outputs_named_both_come(client: Any, predicted: npt.NDArray[np.float64], version: str) -> None:
    result = client.infer("tiny", [image_input(IMAGES, binary=True)], model_version=version)
    np.testing.assert_allclose(result.as_numpy("probabilities"), predicted, rtol=0, atol=1e-6)
    assert result.as_numpy("logits").shape == (16, 10)
    assert result.get_response()["model_version"] == version


@pytest.mark.parametrize("binary", [True, False])
def test_pixels_are_taken_as_the_model_sees_them(client: Any, tiny: Path, predicted: npt.NDArray[np.float64], binary: bool) -> None:
    preprocessing: Preprocessing = checkpoint.read_header(tiny).preprocessing
    pixels = np.stack([preprocessing.read(image) for image in IMAGES])
    tensor = triton.InferInput("pixels", list(pixels.shape), "UINT8")
    tensor.set_data_from_numpy(pixels, binary_data=binary)
    result = client.infer("tiny", [tensor], outputs=[triton.InferRequestedOutput("probabilities", binary_data=binary)])
    np.testing.assert_allclose(result.as_numpy("probabilities"), predicted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("k", "count"), [(1, 1), (3, 3), (10, 10), (99, 10)])
def test_classification_answers_value_index_label(client: Any, tiny_server: Server, tiny: Path, binary: bool, k: int, count: int) -> None:
    outputs = [triton.InferRequestedOutput("probabilities", binary_data=binary, class_count=k)]
    found = client.infer("tiny", [image_input(IMAGES, binary=True)], outputs=outputs).as_numpy("probabilities")
    assert found.shape == (16, count)
    labels = checkpoint.read_header(tiny).labels
    for row, image in zip(found, IMAGES, strict=True):
        expected = tiny_server.post(image, params={"top_k": k}).json()["predictions"]
        texts = [text.decode() if binary else text for text in row]
        for text, item in zip(texts, expected, strict=True):
            value, index, label = text.split(":")
            assert (int(index), label) == (item["index"], labels[item["index"]])
            assert float(value) == pytest.approx(item["probability"], abs=1e-6)


def test_classification_of_logits_names_the_same_labels(client: Any) -> None:
    outputs = [triton.InferRequestedOutput(name, class_count=3) for name in ("probabilities", "logits")]
    result = client.infer("tiny", [image_input(IMAGES, binary=True)], outputs=outputs)
    by_name = [[text.split(b":")[1:] for text in result.as_numpy(name).ravel()] for name in ("probabilities", "logits")]
    assert by_name[0] == by_name[1]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_tritons_client_may_compress(client: Any, predicted: npt.NDArray[np.float64], encoding: str) -> None:
    result = client.infer("tiny", [image_input(IMAGES, binary=True)], request_compression_algorithm=encoding)
    np.testing.assert_allclose(result.as_numpy("probabilities"), predicted, rtol=0, atol=1e-6)


def test_a_file_alone_is_an_inference_too(tiny_server: Server, predicted: npt.NDArray[np.float64]) -> None:
    for headers in ({"content-type": "application/octet-stream"}, {"inference-header-content-length": "0"}):
        answer = requests.post(f"{tiny_server.url}/v2/models/tiny/infer", data=IMAGES[3], headers=headers, timeout=60)
        assert answer.json()["outputs"][0]["data"] == pytest.approx(predicted[3].tolist(), abs=1e-6)


def test_tritons_client_reads_our_errors(client: Any) -> None:
    for images, status, says in (
        ([IMAGES[0], b"no image"], "415", "image 1: These 8 bytes are no image"),
        ([IMAGES[0][:-30]], "422", "image 0: The PNG"),
        ([b"\xff\xd8\xff" + bytes(1_000_001)], "413", "over 1 MB"),
    ):
        with pytest.raises(triton.InferenceServerException) as caught:
            client.infer("tiny", [image_input(images, binary=True)])
        assert caught.value.status() == status
        assert says in caught.value.message()
    with pytest.raises(triton.InferenceServerException, match="no model other here; this is tiny"):
        client.infer("other", [image_input(IMAGES[:1], binary=True)])
    with pytest.raises(triton.InferenceServerException, match="no such route"):
        client.get_model_config("tiny")


def infer(server: Server, body: object, **options: Any) -> requests.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return requests.post(f"{server.url}/v2/models/tiny/infer", data=data, timeout=60, **options)


def inputs(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(IMAGES[0]).decode()]} | changes
    return {"inputs": [{name: value for name, value in tensor.items() if value is not None}]}


PIXELS: dict[str, Any] = {"name": "pixels", "datatype": "UINT8", "shape": [1, 32, 32, 3]}
OUTPUT = {"name": "probabilities"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "inputs: Field required"),
        (b"", "the body: Invalid JSON"),
        (b"{", "the body: Invalid JSON"),
        ({"inputs": []}, "inputs: List should have at least 1 item"),
        ({"inputs": inputs()["inputs"] * 2}, "inputs: List should have at most 1 item"),
        (inputs(name="picture"), "does not match any of the expected tags: 'image', 'pixels'"),
        (inputs(datatype="FP32"), "datatype: Input should be 'BYTES'"),
        (inputs(shape=[2]), "shape says 2 images, and there are 1"),
        (inputs(shape=[0]), "should be greater than or equal to 1"),
        (inputs(shape=[1, 1]), "at most 1 item"),
        (inputs(data=None), "has neither data nor the parameter binary_data_size"),
        (inputs(data=[5]), "Input should be a valid string"),
        (inputs(data=["@@@"]), "inputs.0.data.0: not valid base64"),
        (inputs(parameters={"binary_data_size": 10}), "0 bytes follow the JSON, and binary_data_size is 10"),
        (inputs(data=None, parameters={"shared_memory_region": "x", "shared_memory_byte_size": 9}), "shared memory is not read"),
        (inputs(**PIXELS, data=[0] * 3071), "shape [1, 32, 32, 3] does not fit 3071 values"),
        (inputs(**PIXELS, data=[256] + [0] * 3071), "whole numbers from 0 to 255"),
        (inputs(**PIXELS, data=[-1] + [0] * 3071), "whole numbers from 0 to 255"),
        (inputs(**PIXELS, data=[0.5] + [0] * 3071), "whole numbers from 0 to 255"),
        (inputs(**PIXELS, data=["0"] * 3072), "whole numbers from 0 to 255"),
        (inputs(**PIXELS, data=[[[[0, 0, 0]] * 31] * 32]), "its nesting does not fit"),
        (inputs(**PIXELS, data=[[[[0, 0, 0]] * 32] * 31 + [[[0, 0, 0]] * 31 + [[0, 0]]]]), "its nesting does not fit"),
        (inputs(**PIXELS, data=[[0] * 3072]), "its nesting does not fit"),
        (inputs(**PIXELS, data=[[5]] + [0] * 3071), "whole numbers from 0 to 255"),
        (inputs(**PIXELS | {"shape": [1, 33, 33, 3]}, data=[0]), "must have the shape [n, 32, 32, 3]"),
        (inputs() | {"outputs": [{"name": "labels"}]}, "outputs.0.name: Input should be 'probabilities' or 'logits'"),
        (inputs() | {"outputs": [OUTPUT] * 3}, "at most 2 items"),
        (inputs() | {"outputs": [OUTPUT | {"parameters": {"classification": 0}}]}, "classification: must be a whole number from 1, not 0"),
        (inputs() | {"outputs": [OUTPUT | {"parameters": {"classification": True}}]}, "must be a whole number from 1, not True"),
        (inputs() | {"outputs": [OUTPUT | {"parameters": {"classification": "3"}}]}, "must be a whole number from 1, not 3"),
        (inputs() | {"outputs": [OUTPUT | {"parameters": {"shared_memory_region": "x"}}]}, "shared memory is not written"),
    ],
)
def test_a_bad_inference_says_what_is_wrong(tiny_server: Server, body: object, says: str) -> None:
    answer = infer(tiny_server, body)
    assert answer.status_code == 400
    assert says in answer.json()["error"], answer.text
    assert answer.json()["code"] == "bad_request"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("length", "binary", "says"),
    [
        ("x", b"", "Inference-Header-Content-Length: 'x'"),
        ("-1", b"", "Inference-Header-Content-Length: '-1'"),
        ("99999", b"", "Inference-Header-Content-Length: '99999'"),
        (None, b"", "0 bytes follow the JSON, and binary_data_size is 100"),
        ("all", b"x" * 99, "99 bytes follow the JSON, and binary_data_size is 100"),
        ("all", b"x" * 100, "each led by its length in 4 bytes"),
        ("all", b"\x5f\0\0\0" + b"x" * 96, "each led by its length in 4 bytes"),
        ("all", b"\x61\0\0\0" + b"x" * 96, "each led by its length in 4 bytes"),
        ("all", bytes(100), "shape says 1 images, and there are 25"),
    ],
)
def test_a_bad_binary_tensor_says_what_is_wrong(tiny_server: Server, length: str | None, binary: bytes, says: str) -> None:
    head = json.dumps(inputs(data=None, parameters={"binary_data_size": 100})).encode()
    headers = {} if length is None else {"inference-header-content-length": str(len(head)) if length == "all" else length}
    answer = infer(tiny_server, head + binary, headers=headers)
    assert answer.status_code == 400
    assert says in answer.json()["error"], answer.text


def test_more_images_than_one_inference_takes_are_refused(tiny_server: Server) -> None:
    head = json.dumps(inputs(data=None, shape=[600], parameters={"binary_data_size": 600 * 4})).encode()
    answer = infer(tiny_server, head + bytes(600 * 4), headers={"inference-header-content-length": str(len(head))})
    assert answer.status_code == 400
    assert "must be 1 to 512 images" in answer.text
    many = inputs(**PIXELS | {"shape": [300, 32, 32, 3]}, data=[0])
    assert infer(tiny_server, many).status_code == 400


def test_a_tensor_nested_into_too_many_lists_is_refused(tiny_server: Server) -> None:
    head, tail = json.dumps(inputs(**PIXELS, data=["here"])).split('"here"')
    answer = infer(tiny_server, f"{head}{'[],' * 260_000}[]{tail}".encode())
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")
    assert "250000 lists" in answer.text
    assert "flat or binary" in answer.text


def test_errors_of_the_protocols_paths_are_sentences(tiny_server: Server) -> None:
    answer = tiny_server.get("/v2/nowhere")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert isinstance(answer.json()["error"], str)
    answer = tiny_server.get("/v2/models/tiny/infer")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert isinstance(answer.json()["error"], str)


def test_put_as_curl_t_sends_it_and_every_body_form_get_torchserves_answer(tiny_server: Server, version: str) -> None:
    photograph = EXAMPLES / "cat.jpg"
    expected = {item["label"]: item["probability"] for item in tiny_server.post(photograph.read_bytes()).json()["predictions"]}
    assert len(expected) == 5
    url = f"{tiny_server.url}/predictions/tiny"
    for path in (url, f"{url}/{version}"):
        for method in ("POST", "PUT"):
            raw = requests.request(method, path, data=photograph.read_bytes(), timeout=60)
            form = requests.request(method, path, files={"data": photograph.read_bytes()}, timeout=60)
            assert raw.json() == form.json() == expected
    assert len(requests.post(f"{url}?top_k=2", data=photograph.read_bytes(), timeout=60).json()) == 2


def test_torchserves_errors_and_unknown_models(tiny_server: Server) -> None:
    for path in ("other", "tiny/1.0"):
        answer = requests.post(f"{tiny_server.url}/predictions/{path}", data=IMAGES[0], timeout=60)
        assert error_code(answer) == (404, "model_not_found")
        assert error_code(tiny_server.get(f"/models/{path}")) == (404, "model_not_found")
    assert error_code(requests.post(f"{tiny_server.url}/predictions/tiny", data=b"x", timeout=60)) == (415, "not_an_image")
    answer = tiny_server.get("/predictions/tiny")
    assert error_code(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST, PUT"


def test_torchserves_management_routes_tell_of_the_model(tiny_server: Server, version: str) -> None:
    assert tiny_server.get("/ping").json() == {"status": "Healthy"}
    assert tiny_server.get("/models").json() == {"models": [{"modelName": "tiny", "modelUrl": "tiny.safetensors"}]}
    (model,) = tiny_server.get("/models/tiny").json()
    assert tiny_server.get(f"/models/tiny/{version}").json() == [model]
    assert (model["modelName"], model["modelVersion"], model["batchSize"], model["maxWorkers"]) == ("tiny", version, 32, 1)
    (worker,) = model["workers"]
    assert (worker["status"], worker["gpu"]) == ("READY", False)
    assert worker["pid"] in tiny_server.processes
