"""Our own API over HTTP, against the real server: body forms, the error table, ids, keys, health, OpenAPI."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import io
import itertools
import json
import random
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
import torch
from PIL import Image

from models import checkpoint
from models.export import logits
from tests.conftest import COLOURS, EXAMPLES, Server, StartServer, encode


def probabilities(answer: requests.Response) -> list[tuple[int, float]]:
    assert answer.status_code == 200, answer.text
    return [(item["index"], item["probability"]) for item in answer.json()["predictions"]]


def error_code(answer: requests.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "request_id"}
    assert error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    return answer.status_code, error["code"]


def in_process(path: Path, *images: bytes) -> torch.Tensor:
    """What the checkpoint's model in torch gives for them: float32 [N, C]."""
    loaded = checkpoint.load(path)
    pixels = torch.stack([torch.from_numpy(loaded.header.preprocessing.read(image)) for image in images])
    return logits(loaded.model, loaded.header.preprocessing, pixels).softmax(1)


def test_all_body_forms_answer_alike_and_as_the_engine_in_process(tiny_server: Server, tiny: Path) -> None:
    photograph = (EXAMPLES / "cat.jpg").read_bytes()
    encoded = base64.b64encode(photograph).decode()
    forms = [
        tiny_server.post(photograph, headers={"content-type": "image/jpeg"}),
        tiny_server.post(photograph, headers={"content-type": "application/x-www-form-urlencoded"}),  # curl --data-binary
        tiny_server.post(photograph),
        requests.post(f"{tiny_server.url}/predict", files={"any name": ("cat.jpg", photograph)}, timeout=60),
        requests.post(f"{tiny_server.url}/predict", json={"image": encoded}, timeout=60),
        requests.post(f"{tiny_server.url}/predict", json={"image": f"data:image/jpeg;base64,{encoded}"}, timeout=60),
    ]
    expected = in_process(tiny, photograph)[0]
    best = expected.argsort(descending=True)[:5].tolist()
    for form in forms:
        assert [index for index, _ in probabilities(form)] == best
        assert [probability for _, probability in probabilities(form)] == pytest.approx(expected[best].tolist(), abs=1e-6)
    assert len({json.dumps(form.json()["predictions"]) for form in forms}) == 1


def test_an_answer_carries_model_labels_timing_and_id(tiny_server: Server, tiny: Path) -> None:
    answer = tiny_server.post(encode((1, 2, 3)), headers={"x-request-id": "mine-17"}, params={"top_k": 3}).json()
    header = checkpoint.read_header(tiny)
    assert answer["model"] == {"name": "tiny", "version": header.version}
    assert answer["request_id"] == "mine-17"
    assert [item["label"] for item in answer["predictions"]] == [header.labels[item["index"]] for item in answer["predictions"]]
    assert answer["predictions"] == sorted(answer["predictions"], key=lambda item: -item["probability"])
    timing = answer["timing_ms"]
    assert set(timing) == {"decode", "queue", "forward", "total"}
    assert 0 < timing["decode"] + timing["queue"] + timing["forward"] <= timing["total"]


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (10, 10), (1000, 10)])
def test_top_k_is_at_most_all_labels(tiny_server: Server, top_k: int, count: int) -> None:
    answer = probabilities(tiny_server.post(encode((9, 9, 9)), params={"top_k": top_k}))
    assert len({index for index, _ in answer}) == count
    if count == 10:
        assert sum(probability for _, probability in answer) == pytest.approx(1, abs=1e-5)


def test_64_colours_at_once_twenty_times_everyone_gets_their_own(tiny_server: Server, tiny: Path) -> None:
    images = [encode(colour) for colour in COLOURS]
    expected = in_process(tiny, *images).numpy()

    def ask(index: int) -> int:
        answer = dict(probabilities(tiny_server.post(images[index], params={"top_k": 10})))
        found = np.array([answer[label] for label in range(10)])
        return int(np.abs(expected - found).max(axis=1).argmin())

    with ThreadPoolExecutor(64) as pool:
        for _ in range(20):
            assert list(pool.map(ask, range(64))) == list(range(64))


def test_one_broken_image_among_eight_fails_alone(tiny_server: Server) -> None:
    good = [(EXAMPLES / name).read_bytes() for name in ("cat.jpg", "coffee.jpg", "rocket.jpg", "temple.jpg")]
    alone = [probabilities(tiny_server.post(image)) for image in good]
    broken = good[0][: len(good[0]) // 2]
    with ThreadPoolExecutor(8) as pool:
        for turn in range(10):
            bodies = [good[index % 4] for index in range(7)]
            bodies.insert(turn % 8, broken)
            answers = list(pool.map(tiny_server.post, bodies))
            assert error_code(answers.pop(turn % 8)) == (422, "image_corrupt")
            for index, answer in enumerate(answers):
                assert [label for label, _ in probabilities(answer)] == [label for label, _ in alone[index % 4]]


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header declares a size that its few bytes of pixels do not have."""
    header = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    chunk = (13).to_bytes(4, "big") + header + zlib.crc32(header).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + chunk + encode((1, 1, 1))[33:]


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"", {}, 400, "bad_request"),
        (b"{", JSON, 400, "bad_request"),
        (b"[1]", JSON, 400, "bad_request"),
        (b'{"picture": "x"}', JSON, 400, "bad_request"),
        (b'{"image": "@@@"}', JSON, 400, "bad_request"),
        (b"--x", {"content-type": "multipart/form-data"}, 400, "bad_request"),
        (b"--x", {"content-type": "multipart/form-data; boundary=x"}, 400, "bad_request"),
        (b"no picture", {}, 415, "not_an_image"),
        (b'{"image": "bm8gcGljdHVyZQ=="}', JSON, 415, "not_an_image"),
        (b"%PDF-1.7 ...", {}, 415, "unsupported_format"),
        (png_of(64250, 64250), {}, 413, "image_too_large"),
        (b"\xff\xd8\xff" + bytes(1_000_001), {}, 413, "body_too_large"),
        (encode((1, 2, 3))[:-30], {}, 422, "image_corrupt"),
        (encode((1, 2, 3)), {"x-timeout-ms": "soon"}, 400, "bad_request"),
    ],
)
def test_a_bad_body_gets_its_error(tiny_server: Server, body: bytes, headers: dict[str, str], status: int, code: str) -> None:
    assert error_code(tiny_server.post(body, headers=headers)) == (status, code)


@pytest.mark.parametrize("top_k", ["0", "-1", "many", "1.5", "5.0", "3_0", "", "+5", " 5", "٣", "00"])
def test_a_bad_top_k_is_a_bad_request(tiny_server: Server, top_k: str) -> None:
    answer = tiny_server.post(encode((1, 2, 3)), params={"top_k": top_k})
    assert error_code(answer) == (400, "bad_request")
    assert "top_k" in answer.text


def test_what_curl_d_made_of_a_file_gets_the_right_hint(tiny_server: Server) -> None:
    photograph = (EXAMPLES / "cat.jpg").read_bytes().replace(b"\n", b"").replace(b"\r", b"")
    answer = tiny_server.post(photograph, headers={"content-type": "application/x-www-form-urlencoded"})
    assert error_code(answer) == (422, "image_corrupt")
    assert "--data-binary" in answer.text
    assert "--data-binary" not in tiny_server.post(photograph).text


def test_bare_base64_gets_a_hint_and_other_forms_do_not(tiny_server: Server) -> None:
    text = base64.b64encode(encode((1, 2, 3)))
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        answer = tiny_server.post(text, headers=headers)
        assert error_code(answer) == (415, "not_an_image")
        assert "Base64 goes into JSON" in answer.text
    assert "Base64 goes into JSON" not in tiny_server.post(b'{"image": "bm8gcGljdHVyZQ=="}', headers=JSON).text


def test_the_root_leads_to_the_documentation(tiny_server: Server) -> None:
    assert tiny_server.get("/", allow_redirects=False).headers["location"] == "/docs"


def test_unknown_routes_and_methods(tiny_server: Server) -> None:
    assert error_code(tiny_server.get("/nowhere")) == (404, "not_found")
    assert error_code(tiny_server.post(b"x", allow_redirects=False)) == (415, "not_an_image")
    assert error_code(requests.post(f"{tiny_server.url}/predict/", data=b"x", timeout=60, allow_redirects=False)) == (404, "not_found")
    answer = tiny_server.get("/predict")
    assert error_code(answer) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


def photograph_of_noise() -> bytes:
    photograph = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    Image.fromarray(noise).save(photograph, "JPEG", quality=60)
    return photograph.getvalue()


def test_a_deadline_that_is_too_short_is_504(tiny_server: Server) -> None:
    answer = tiny_server.post(photograph_of_noise(), headers={"x-timeout-ms": "1"})
    assert error_code(answer) == (504, "deadline_exceeded")


def test_a_request_id_is_kept_when_sound_and_made_when_not(tiny_server: Server) -> None:
    assert tiny_server.get("/livez", headers={"x-request-id": "a" * 128}).headers["x-request-id"] == "a" * 128
    for bad in ("a" * 129, "caf\xe9".encode("latin-1"), "tab\tinside"):
        made = tiny_server.get("/livez", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(made) == 32
        assert made.isalnum()


def test_any_bytes_give_a_4xx_with_the_error_body(tiny_server: Server) -> None:
    chance = random.Random(1)
    starts = [
        b"",
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"RIFF....WEBP",
        b"BM",
        b"II*\0",
        b"\0\0\0\x1cftypavif",
        b"{",
        b"--b\r\n",
    ]
    types = [
        "",
        "image/jpeg",
        "application/json",
        "multipart/form-data; boundary=b",
        "application/x-www-form-urlencoded",
        "\xe4;;=",
        "a/b+json",
    ]
    with requests.Session() as session:
        for _ in range(400):
            body = chance.choice(starts) + chance.randbytes(chance.randrange(300))
            headers = {"content-type": chance.choice(types).encode("latin-1")}
            answer = session.post(f"{tiny_server.url}/predict", data=body, headers=headers, timeout=60)
            assert 400 <= error_code(answer)[0] < 500, (headers, body)


def megabytes(count: int) -> Iterator[bytes]:
    return itertools.repeat(bytes(1_000_000), count)


@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_client_still_sending_too_much_reads_the_413_and_may_go_on(tiny_server: Server, announced: bool, connection: str) -> None:
    address = urlsplit(tiny_server.url)
    client = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    client.request("POST", "/predict", megabytes(90), {"connection": connection} | ({"content-length": "90000000"} if announced else {}))
    used = client.sock
    answer = client.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "body_too_large"
    if connection == "keep-alive":
        client.request("POST", "/predict", encode((1, 2, 3)))
        assert client.getresponse().status == 200
        assert client.sock is used
    client.close()


@pytest.mark.parametrize(("path", "expected"), [("/predict", (413, "body_too_large")), ("/nowhere", (404, "not_found"))])
def test_an_answer_before_the_end_of_the_body_reaches_requests(tiny_server: Server, path: str, expected: tuple[int, str]) -> None:
    with requests.Session() as session:
        for data in (bytes(30_000_000), megabytes(30)):
            assert error_code(session.post(f"{tiny_server.url}{path}", data=data, timeout=60)) == expected
        assert session.get(f"{tiny_server.url}/livez", timeout=60).status_code == 200


def test_what_is_too_much_is_not_kept_in_memory(tiny_server: Server) -> None:
    workers = {worker["pid"] for worker in tiny_server.get("/info").json()["workers"]}
    doors = set(tiny_server.processes) - workers - {tiny_server.process.pid}

    def megabytes_of(field: str) -> float:
        return sum(int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0]) for pid in doors) / 1000

    for pid in doors:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    before = megabytes_of("VmRSS")
    with requests.Session() as session:
        for count in [300] + [2] * 100:  # the limit is one of them
            assert error_code(session.post(f"{tiny_server.url}/predict", data=megabytes(count), timeout=60)) == (413, "body_too_large")
    assert doors
    assert megabytes_of("VmHWM") - before < 10


def test_a_late_body_in_the_tiniest_chunks_does_not_keep_others_waiting(tiny_server: Server) -> None:
    address = urlsplit(tiny_server.url)
    asked = threading.Event()

    def flood() -> None:
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            while not asked.is_set():
                client.sendall(b"1\r\nx\r\n" * 40_000)

    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(flood)
        took = []
        try:
            for _ in range(5):
                time.sleep(0.1)  # the flood fills all buffers again
                begun = time.monotonic()
                assert tiny_server.get("/livez").status_code == 200
                took.append(time.monotonic() - begun)
        finally:
            asked.set()
        flooding.result()
    assert min(took[1:]) < 0.5, took


def test_a_hundred_bodies_that_trickle_get_504_and_keep_nobody_waiting(tiny_server: Server) -> None:
    address = urlsplit(tiny_server.url)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=60)) for _ in range(120)]
        for client in slow:
            client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\nX-Timeout-Ms: 1500\r\n\r\n")
        begun, took = time.monotonic(), []
        while time.monotonic() < begun + 1.8:  # past their deadline
            for client in slow:
                client.sendall(b"x")
            asked = time.monotonic()
            assert tiny_server.post(encode((1, 2, 3))).status_code == 200
            took.append(time.monotonic() - asked)
        assert sorted(took)[len(took) // 2] < 0.5, took
        assert {client.recv(65536).split(b" ")[1] for client in slow} == {b"504"}


def test_a_content_length_of_any_number_of_digits_is_no_error_of_ours(tiny_server: Server) -> None:
    address = urlsplit(tiny_server.url)
    for digits in (b"0" * 5000 + b"5", b"9" * 30):
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %s\r\n\r\nhello" % digits)
            assert client.recv(65536).startswith((b"HTTP/1.1 400", b"HTTP/1.1 413", b"HTTP/1.1 415"))


def test_an_expecting_client_is_refused_before_it_sends(tiny_server: Server) -> None:
    address = urlsplit(tiny_server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99000000\r\nExpect: 100-continue\r\n\r\n")
        received = b""
        while block := client.recv(65536):  # until the server closes: no body will come
            received += block
    assert received.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in received


def test_5000_requests_given_up_at_random_moments_leave_all_slots_free(tiny_server: Server, tiny: Path) -> None:
    address = urlsplit(tiny_server.url)
    photograph = (EXAMPLES / "coffee.jpg").read_bytes()
    request = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(photograph) + photograph

    def give_up(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(5000 // 16):
            with socket.create_connection((address.hostname, address.port), timeout=60) as client:
                client.sendall(request if chance.random() < 0.8 else request[: chance.randrange(1, len(request))])
                client.settimeout(chance.uniform(0.0001, 0.02))
                with contextlib.suppress(TimeoutError):
                    client.recv(1)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(give_up, range(16)))
    # More than there are slots, all at once: they are only answered if every slot came back.
    test_64_colours_at_once_twenty_times_everyone_gets_their_own(tiny_server, tiny)
    slots = tiny_server.get("/info").json()["limits"]["slots"]
    with ThreadPoolExecutor(slots) as pool:
        answers = list(pool.map(tiny_server.post, [encode((5, 6, 7))] * slots * 2))
    assert {answer.status_code for answer in answers} == {200}


def test_health_routes(tiny_server: Server) -> None:
    assert tiny_server.get("/livez").json() == {"status": "alive"}
    assert tiny_server.get("/readyz").json() == tiny_server.get("/health").json() == {"status": "ready"}


def test_info_tells_model_workers_limits_versions(tiny_server: Server, tiny: Path) -> None:
    info = tiny_server.get("/info").json()
    header = checkpoint.read_header(tiny)
    assert info["model"]["version"] == header.version
    assert info["model"]["labels"] == 10
    assert info["model"]["preprocessing"] == header.preprocessing.to_dict()
    assert info["limits"]["max_body_mb"] == 1
    assert set(info["versions"]) == {"spyglass", "litserve", "openvino", "torch", "torchvision", "pillow"}
    (worker,) = info["workers"]
    assert worker["pid"] in tiny_server.processes
    assert (worker["device"], worker["state"], worker["precision"], worker["transfer"]) == ("cpu", "ready", "fp32", "shared memory")
    assert (worker["engine"], worker["splits"]) == ("openvino", 0)
    assert worker["why"].startswith("OpenVINO, ")
    assert worker["largest_batch"] in (1, 2, 4, 8, 16, 32)
    before = worker["images"]
    tiny_server.post(encode((1, 1, 1)))
    assert tiny_server.get("/info").json()["workers"][0]["images"] == before + 1


def test_docs_need_no_foreign_host(tiny_server: Server) -> None:
    page = tiny_server.get("/docs")
    assert page.status_code == 200
    assert "http://" not in page.text
    assert "https://" not in page.text
    script = page.text.partition('<script src="')[2].partition('"')[0]
    assert tiny_server.get(script).status_code == 200


def batch(server: Server, images: list[bytes], **options: Any) -> requests.Response:
    return requests.post(f"{server.url}/predict/batch", files=[("images", image) for image in images], timeout=60, **options)


def test_a_batch_answers_each_image_as_predict_does_in_their_order(tiny_server: Server, tiny: Path) -> None:
    images = [encode(colour) for colour in COLOURS]
    alone = [tiny_server.post(image, params={"top_k": 3}).json()["predictions"] for image in images]
    encoded = [base64.b64encode(image).decode() for image in images]
    for answer in (
        batch(tiny_server, images, params={"top_k": 3}, headers={"x-request-id": "many"}),
        requests.post(f"{tiny_server.url}/predict/batch?top_k=3", json={"images": encoded}, headers={"x-request-id": "many"}, timeout=60),
    ):
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["model"] == {"name": "tiny", "version": checkpoint.read_header(tiny).version}
        assert [result["predictions"] for result in found["results"]] == alone
        assert found["request_id"] == answer.headers["x-request-id"] == "many"
        assert set(found["timing_ms"]) == {"decode", "queue", "forward", "total"}
        assert 0 < found["timing_ms"]["decode"] < found["timing_ms"]["total"]


def test_in_a_batch_each_bad_image_is_one_bad_result(tiny_server: Server) -> None:
    good = encode((1, 2, 3))
    images = [good, b"no image", good[:-30], png_of(64250, 64250), b"%PDF-1.7", b"", good]
    answer = batch(tiny_server, images)
    assert answer.status_code == 200
    codes = [result["error"]["code"] if "error" in result else "" for result in answer.json()["results"]]
    assert codes == ["", "not_an_image", "image_corrupt", "image_too_large", "unsupported_format", "bad_request", ""]
    alone = probabilities(tiny_server.post(good))
    for place in (0, -1):
        predictions = answer.json()["results"][place]["predictions"]
        assert [(item["index"], item["probability"]) for item in predictions] == alone
    for result in answer.json()["results"][1:-1]:
        assert set(result["error"]) == {"code", "message", "request_id"}
        assert result["error"]["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"", {}, "bad_request"),
        (b"{}", JSON, "bad_request"),
        (b'{"images": []}', JSON, "bad_request"),
        (b'{"images": "x"}', JSON, "bad_request"),
        (encode((1, 2, 3)), {"content-type": "image/png"}, "bad_request"),
        (bytes(1_000_001), {}, "body_too_large"),
    ],
)
def test_a_bad_batch_gets_its_error(tiny_server: Server, body: bytes, headers: dict[str, str], code: str) -> None:
    answer = requests.post(f"{tiny_server.url}/predict/batch", data=body, headers=headers, timeout=60)
    assert error_code(answer) == (413 if code == "body_too_large" else 400, code)


def test_a_batch_whose_time_is_over_is_504_and_one_whose_time_ends_keeps_what_it_has(tiny_server: Server) -> None:
    assert error_code(batch(tiny_server, [photograph_of_noise()] * 2, headers={"x-timeout-ms": "1"})) == (504, "deadline_exceeded")


def test_several_batches_of_more_images_than_slots_and_single_images_between_them(tiny: Path, start_server: StartServer) -> None:
    server = start_server(tiny, "--slots", "8", "--precision", "fp32", "--timeout-s", "60")
    colours = [COLOURS[number % 64] for number in range(150)]
    images = [encode(colour) for colour in colours]
    expected = in_process(tiny, *[encode(colour) for colour in COLOURS]).argmax(1).tolist()
    done: list[str] = []

    def ask_many(number: int) -> list[int]:
        turned = images[number:] + images[:number]
        results = batch(server, turned, params={"top_k": 1}).json()["results"]
        done.append("many")
        found = [result["predictions"][0]["index"] for result in results]
        return found[len(found) - number :] + found[: len(found) - number]

    def ask_one(number: int) -> int:
        (best, *_) = probabilities(server.post(encode(COLOURS[number])))
        done.append("one")
        return best[0]

    with ThreadPoolExecutor(16) as pool:
        many = [pool.submit(ask_many, number) for number in range(4)]
        ones = [pool.submit(ask_one, number) for number in range(12)]
        assert [one.result() for one in ones] == expected[:12]
        for found in many:
            assert found.result() == [expected[number % 64] for number in range(150)]
    assert done.index("many") >= 6  # batches took turns with single images, and none of these waited for a whole batch
    with ThreadPoolExecutor(8) as pool:  # every slot came back
        assert [answer.status_code for answer in pool.map(server.post, images[:8])] == [200] * 8


def test_a_client_that_leaves_its_batch_gives_all_slots_back(tiny: Path, start_server: StartServer) -> None:
    server = start_server(tiny, "--slots", "8", "--precision", "fp32")
    prepared = requests.Request("POST", f"{server.url}/predict/batch", files=[("i", photograph_of_noise())] * 8).prepare()
    address = urlsplit(server.url)
    assert isinstance(prepared.body, bytes)
    head = f"POST /predict/batch HTTP/1.1\r\nHost: x\r\nContent-Type: {prepared.headers['content-type']}\r\n"
    for _ in range(5):
        with socket.create_connection((address.hostname, address.port), timeout=60) as client:
            client.sendall(f"{head}Content-Length: {len(prepared.body)}\r\n\r\n".encode() + prepared.body)
    assert server.wait_for_log(" 499 ", 10), "\n".join(server.log)
    assert len(batch(server, [encode(colour) for colour in COLOURS]).json()["results"]) == 64
    with ThreadPoolExecutor(8) as pool:
        assert [answer.status_code for answer in pool.map(server.post, [encode((1, 2, 3))] * 16)] == [200] * 16


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_body_is_opened_and_its_size_counts(tiny_server: Server, encoding: str) -> None:
    def post(body: bytes) -> requests.Response:
        packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
        return tiny_server.post(packed, headers={"content-encoding": encoding})

    image = encode((3, 2, 1))
    assert probabilities(post(image)) == probabilities(tiny_server.post(image))
    assert error_code(post(bytes(50_000_000))) == (413, "body_too_large")  # 50 kB as they are sent
    assert error_code(tiny_server.post(image, headers={"content-encoding": encoding})) == (400, "bad_request")
    cut = (gzip.compress(image) if encoding == "gzip" else zlib.compress(image))[:-10]
    assert error_code(tiny_server.post(cut, headers={"content-encoding": encoding})) == (400, "bad_request")
    answer = tiny_server.post(image, headers={"content-encoding": "br"})
    assert error_code(answer) == (400, "bad_request")
    assert "gzip" in answer.text


@pytest.fixture(scope="module")
def keyed(tiny: Path) -> Iterator[Server]:
    server = Server(tiny, "--api-keys", "alpha, beta, Schlüssel", "--cors-origins", "https://page.example", "--log-format", "json")
    yield server
    assert server.stop() == 0


def test_keys_guard_everything_but_health_and_docs(keyed: Server) -> None:
    image = encode((1, 2, 3))
    for headers in ({}, {"x-api-key": "gamma"}, {"authorization": "Bearer alph"}, {"authorization": "Basic alpha"}):
        answer = keyed.post(image, headers=headers)
        assert error_code(answer) == (401, "unauthorized")
        assert keyed.get("/info", headers=headers).status_code == 401
    good: list[dict[str, str | bytes]] = [{"x-api-key": "alpha"}, {"authorization": "Bearer beta"}, {"x-api-key": "Schlüssel".encode()}]
    for key in good:
        assert keyed.post(image, headers=key).status_code == 200
        assert keyed.get("/info", headers=key).status_code == 200
    for path in ("/livez", "/readyz", "/health", "/docs", "/openapi.json"):
        assert keyed.get(path).status_code == 200
    assert "alpha" not in "\n".join(keyed.log)


def test_a_preflight_has_an_id_and_a_log_line_and_a_foreign_one_is_refused(keyed: Server) -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST", "x-request-id": "preflight-1"}
    answer = requests.options(f"{keyed.url}/predict", headers=headers, timeout=60)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "preflight-1")
    assert keyed.wait_for_log("preflight-1", 30)
    headers["origin"] = "https://other.example"
    assert requests.options(f"{keyed.url}/predict", headers=headers, timeout=60).status_code == 400


def test_cross_origin_answers_and_errors_are_readable_by_the_allowed_page_only(keyed: Server) -> None:
    for headers in ({"x-api-key": "alpha"}, {}):
        allowed = keyed.post(encode((1, 2, 3)), headers={**headers, "origin": "https://page.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        exposed = allowed.headers["access-control-expose-headers"].lower()
        assert {"x-request-id", "retry-after", "inference-header-content-length"} == set(exposed.split(", "))
        other = keyed.post(encode((1, 2, 3)), headers={**headers, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_json_logs_have_one_line_for_each_request_with_its_id(keyed: Server) -> None:
    keyed.get("/livez", headers={"x-request-id": "a-probe"})  # none for these: they come every few seconds, each the same as the last
    keyed.get("/docs", headers={"x-request-id": "find-me"})
    line = json.loads(keyed.wait_for_log("find-me", 30) or "{}")
    assert line["level"] == "info"
    assert line["message"].startswith("GET /docs 200 ")
    assert "a-probe" not in "\n".join(keyed.log)
