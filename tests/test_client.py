"""The client: what it sends, how it waits and follows, what it prints and how it ends; beside the real server and beside bad ones."""

from __future__ import annotations

import email.utils
import io
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest

from service import client
from service.__main__ import main
from tests.conftest import COLOURS, EXAMPLES, Server, StartServer, encode

PHOTO = encode(COLOURS[7])
ANSWER = {"model": {}, "predictions": [{"label": "cat", "index": 1, "probability": 0.75}], "request_id": "a", "timing_ms": {}}


@pytest.fixture(autouse=True)
def _no_settings_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SPYGLASS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def photo(tmp_path: Path) -> str:
    (tmp_path / "photo.png").write_bytes(PHOTO)
    return str(tmp_path / "photo.png")


Responder = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(SimpleNamespace(path=self.path, headers=self.headers, body=self.body, peer=self.client_address))
        self.server.script[min(number, len(self.server.script) - 1)](self)

    def log_message(self, *_: object) -> None: ...


class FakeServer(ThreadingHTTPServer):
    """Answers the first request as the first of its script says, and so on; from then on as the last says."""

    def __init__(self, script: Sequence[Responder]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.requests: list[SimpleNamespace] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.released = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    def handle_error(self, *_: object) -> None: ...  # clients that go away are the subject here

    def stop(self) -> None:
        self.released.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeServer]]:
    servers: list[FakeServer] = []

    def start(*script: Responder) -> FakeServer:
        servers.append(FakeServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def answer(status: int = 200, body: Any = ANSWER, **headers: str) -> Responder:
    def respond(handler: Handler) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return respond


def refusal(status: int, code: str, **headers: str) -> Responder:
    return answer(status, {"error": {"code": code, "message": f"it is {code}", "request_id": "r"}}, **headers)


def reset(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def hang(handler: Handler) -> None:
    handler.server.released.wait(30)
    reset(handler)


def drip(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    while not handler.server.released.wait(0.02):
        handler.wfile.write(b" ")


def predict(*arguments: str) -> int:
    return client.main(list(arguments))


def lines(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have slept."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


# Beside the real server


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=60, check=False, **options)


def test_photos_are_answered_in_the_order_of_the_arguments_and_bad_ones_fail_alone(tiny_server: Server, tmp_path: Path) -> None:
    photos = [tmp_path / f"{number}.png" for number in range(12)]
    for path, colour in zip(photos, COLOURS[::5], strict=False):
        path.write_bytes(encode(colour))
    photos[3].write_bytes(b"no image")
    photos[5].unlink()
    names = [str(path) for path in reversed(photos)]
    found = run("predict", *names, "--json", "--top-k", "2", "--url", tiny_server.url)
    answers = [json.loads(line) for line in found.stdout.splitlines()]
    assert (found.returncode, found.stderr, [one["photo"] for one in answers]) == (1, "", names)
    codes = {Path(one["photo"]).name: one["error"]["code"] for one in answers if "error" in one}
    assert codes == {"3.png": "not_an_image", "5.png": "unreadable"}
    for one in answers:
        if "error" not in one:
            expected = tiny_server.post(Path(one["photo"]).read_bytes(), params={"top_k": "2"}).json()
            assert [entry["index"] for entry in one["predictions"]] == [entry["index"] for entry in expected["predictions"]]
            assert one["model"] == expected["model"]
    refused = next(one["error"] for one in answers if one["photo"] == str(photos[3]))
    assert any(refused["request_id"] in line for line in tiny_server.log)  # the id that the client chose


def test_a_table_of_standard_input_for_people(tiny_server: Server) -> None:
    command = [sys.executable, "-m", "service", "predict", "-", "--url", f"{tiny_server.url}/", "--top-k", "3"]
    found = subprocess.run(command, input=PHOTO, capture_output=True, cwd=EXAMPLES.parent, timeout=60, check=False)
    expected = tiny_server.post(PHOTO, params={"top_k": "3"}).json()["predictions"]
    percents = [f"{one['probability']:.1%}" for one in expected]
    others = f"{expected[1]['label']} {percents[1]}, {expected[2]['label']} {percents[2]}"
    assert found.stdout.decode() == f"-  {expected[0]['label']:20}  {percents[0]:>6}  {others}\n"
    assert (found.returncode, found.stderr) == (0, b"")


def test_the_key_is_the_servers_own_setting_and_is_not_shown(
    start_server: StartServer, tiny: Path, photo: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(tiny, "--api-keys", "schlüssel,other")
    assert predict(photo, "--url", server.url, "--api-key", "wrong-key") == 1
    shown = capsys.readouterr()
    assert "send a valid key" in shown.out
    assert "wrong-key" not in shown.out + shown.err
    monkeypatch.setenv("SPYGLASS_API_KEYS", " schlüssel , unknown")
    assert predict(photo, "--url", server.url) == 0


def test_the_client_imports_neither_torch_nor_a_server() -> None:
    code = (
        "import sys; from service.__main__ import main; code = main(['predict', 'missing', '--url', 'localhost:1'])\n"
        "print(code, sorted({'torch', 'uvicorn', 'fastapi', 'litserve', 'numpy', 'models', 'service.server'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=EXAMPLES.parent, timeout=60, check=False)
    assert found.stdout.splitlines()[-1] == "1 []"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_serving_is_what_it_does_unless_told_otherwise(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--max-batch-size" in text
    assert "service predict" in text


def test_serve_is_a_word_before_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: port: 'x' is not allowed")


# Arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: PHOTO"),
        (["a", "--url", "ftp://host"], "'ftp://host' is no address of a server"),
        (["a", "--url", "http://"], "'http://' is no address"),
        (["a", "--url", "host:99999"], "'host:99999' is no address"),
        (["a", "--url", "http://host/?a=b"], "is no address"),
        (["a", "--url", "http://a..b"], "'http://a..b' is no address"),
        (["a", "--top-k", "0"], "argument --top-k: '0' must be a whole number from 1"),
        (["a", "--concurrency", "-1"], "argument --concurrency: '-1' must be"),
        (["a", "--timeout", "nan"], "argument --timeout: 'nan' must be"),
        (["a", "--ca-file", "missing.pem"], "missing.pem: no readable file of PEM certificates"),
        (["a", "--ca-file", __file__], "no readable file of PEM certificates"),
        (["a", "--time", "3"], "unrecognized arguments: --time 3"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        predict(*arguments)
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n"), error[:7]) == (2, 1, "error: ")
    assert said in error


@pytest.mark.parametrize("from_environment", [True, False])
def test_a_key_that_no_header_can_hold_is_refused_unseen(
    from_environment: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if from_environment:
        monkeypatch.setenv("SPYGLASS_API_KEYS", "sec\nret")
    with pytest.raises(SystemExit) as ended:
        predict("a", *([] if from_environment else ["--api-key", "sec\nret"]))
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert "a key has printable characters only" in error
    assert "ret" not in error


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("host", "http://host"),
        ("host:1/", "http://host:1"),
        ("https://h/a/b/", "https://h/a/b"),
        ("[::1]:80", "http://[::1]:80"),
        ("http://h:1/predict", "http://h:1"),
    ],
)
def test_an_address_needs_no_scheme_and_may_have_a_path(given: str, url: str) -> None:
    assert client._url(given) == url


# Photos


def test_a_folder_is_the_image_files_below_it_sorted(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.png", "notes.txt", ".hidden.png", ".git/c.png", "a/z.webp", "a-b/y.heic", "noext"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = [os.path.relpath(path, tmp_path) for path in client.expand(str(tmp_path))]
    assert found == ["a/z.webp", "a-b/y.heic", "a.png", "b.JPG"]
    assert client.expand(str(tmp_path / "notes.txt")) == [str(tmp_path / "notes.txt")]  # named, so it is tried


def test_a_folder_that_can_not_be_read_is_an_error_of_its_own(
    tmp_path: Path, fake: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "a.png").write_bytes(PHOTO)
    shut = str(tmp_path / "shut")

    def closed(real: Callable[[str], Any]) -> Callable[[str], Any]:
        def refuse(path: str) -> Any:
            if path == shut:
                raise PermissionError(13, "Permission denied", path)
            return real(path)

        return refuse

    monkeypatch.setattr(os, "scandir", closed(os.scandir))  # root may read whatever the mode
    monkeypatch.setattr(os, "listdir", closed(os.listdir))
    assert predict(str(tmp_path), "--json", "--url", fake(answer()).url) == 1
    good, bad = lines(capsys)
    assert good["predictions"] == ANSWER["predictions"]
    assert (bad["photo"], bad["error"]) == (shut, {"code": "unreadable", "message": "Permission denied", "request_id": None})


def test_what_can_not_be_read_is_not_sent(
    tmp_path: Path, fake: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.png").touch()
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((1 << 30) + 1)
    monkeypatch.setattr(sys, "stdin", None)  # closed by who started us
    server = fake(answer())
    names = [str(tmp_path / name) for name in ("folder", "empty.png", "large.png", "missing")] + ["a\0b", "-"]
    assert predict(*names, "--json", "--url", server.url) == 1
    errors = [line["error"] for line in lines(capsys)]
    assert {error["code"] for error in errors} == {"unreadable"}
    said = ["no image files in this folder", "empty", "over 1 GiB; no photo is", "No such file or directory", "embedded null byte", "empty"]
    assert [error["message"] for error in errors] == said
    assert server.requests == []


# Requests


def test_the_file_itself_is_posted_below_the_path_and_connections_are_kept(photo: str, fake: Callable[..., FakeServer]) -> None:
    server = fake(answer())
    assert predict(*[photo] * 5, "--url", f"{server.url}/vision/", "--top-k", "3", "--concurrency", "1", "--api-key", "k") == 0
    assert {request.path for request in server.requests} == {"/vision/predict?top_k=3"}
    assert {request.body for request in server.requests} == {PHOTO}
    assert {request.headers["x-api-key"] for request in server.requests} == {"k"}
    assert (len(server.requests), len({request.peer for request in server.requests})) == (5, 1)


def test_as_many_photos_are_in_flight_as_asked_for(photo: str, fake: Callable[..., FakeServer]) -> None:
    together = threading.Barrier(3)

    def wait_for_others(handler: Handler) -> None:
        together.wait(30)
        answer()(handler)

    assert predict(*[photo] * 6, "--url", fake(wait_for_others).url, "--concurrency", "3") == 0


@pytest.mark.parametrize(("stop", "code", "said"), [(signal.SIGINT, 130, "stopped\n"), (signal.SIGTERM, 143, "")])
def test_a_line_is_printed_as_soon_as_it_is_its_turn(
    stop: signal.Signals, code: int, said: str, photo: str, fake: Callable[..., FakeServer]
) -> None:
    server = fake(answer(), hang)
    command = [sys.executable, "-m", "service", "predict", photo, photo, "--json", "--concurrency", "1", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=EXAMPLES.parent) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["photo"] == photo
        process.send_signal(stop)  # while the second is waited for
        assert (process.wait(10), process.stderr.read()) == (code, said)


def test_a_reader_that_has_seen_enough_is_no_error(photo: str, fake: Callable[..., FakeServer]) -> None:
    server = fake(answer())
    command = [sys.executable, "-m", "service", "predict", *[photo] * 9, "--url", server.url]
    reader, writer = os.pipe()
    os.close(reader)
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=EXAMPLES.parent, timeout=60, check=False)
    os.close(writer)
    assert (found.returncode, found.stderr) == (0, b"")


# Waiting


@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"retry_after": "7"}, 7, 7),
        ({"retry_after": "0"}, 0.1, 0.1),
        ({"retry_after": "soon"}, 1, 1),
        ({}, 1, 1),
        ({"retry_after": email.utils.formatdate(0)}, 0.1, 0.1),
        ({"retry_after": "DATE"}, 35, 40),
    ],
)
def test_a_busy_server_is_asked_again_when_it_says(
    status: int, headers: dict[str, str], least: float, most: float, photo: str, fake: Callable[..., FakeServer], waits: list[float]
) -> None:
    headers = {name: email.utils.formatdate(time.time() + 40) if value == "DATE" else value for name, value in headers.items()}
    server = fake(refusal(status, "overloaded", **headers), answer())
    assert predict(photo, "--url", server.url) == 0
    assert [least <= wait <= most for wait in waits] == [True]
    assert [request.body for request in server.requests] == [PHOTO, PHOTO]
    assert len({request.headers["x-request-id"] for request in server.requests}) == 1


def test_a_wait_that_would_end_too_late_is_not_begun(
    photo: str, fake: Callable[..., FakeServer], waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(refusal(503, "draining", retry_after="20"))
    assert predict(photo, "--json", "--url", server.url, "--timeout", "10") == 1
    assert lines(capsys) == [{"photo": photo, "error": {"code": "draining", "message": "it is draining", "request_id": "r"}}]
    assert waits == []


@pytest.mark.parametrize("slow", [hang, drip])
def test_no_answer_in_time_is_an_error_of_that_photo(
    slow: Responder, photo: str, fake: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(slow, answer())
    started = time.monotonic()
    assert predict(photo, photo, "--json", "--url", server.url, "--timeout", "0.5", "--concurrency", "1") == 1
    assert time.monotonic() - started < 5
    late, good = lines(capsys)
    request_id = server.requests[0].headers["x-request-id"]
    assert late["error"] == {"code": "timed_out", "message": f"no answer from {server.url} within 0.5 s", "request_id": request_id}
    assert good["predictions"] == ANSWER["predictions"]


# Connections


def test_a_lost_connection_is_tried_again(photo: str, fake: Callable[..., FakeServer], waits: list[float]) -> None:
    server = fake(reset, reset, answer())
    assert predict(photo, "--url", server.url) == 0
    assert (len(server.requests), waits) == (3, [0.1, 0.2])


def test_after_a_server_could_not_be_reached_the_rest_fail_at_once(
    photo: str, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unheard:  # bound, so that nobody else takes the port, and not listening
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        assert predict(*[photo] * 100, "--json", "--url", f"{url.replace('//', '//user:password@')}", "--concurrency", "1") == 1
    errors = [line["error"] for line in lines(capsys)]
    assert {error["code"] for error in errors} == {"unreachable"}
    assert {error["message"] for error in errors} == {f"cannot reach {url}: is the server running? (Connection refused)"}
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6]


def test_a_photo_that_ends_the_connection_is_not_the_end_for_the_others(
    photo: str, fake: Callable[..., FakeServer], waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(answer(), *[reset] * 6, answer())
    assert predict(photo, photo, photo, "--json", "--url", server.url, "--concurrency", "1") == 1
    first, second, third = lines(capsys)
    assert "was reached and gave no answer: is it the server?" in second["error"]["message"]
    assert "error" not in {**first, **third}


def test_what_speaks_no_http_is_said_to_be_no_server(photo: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection = listener.accept()[0]
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=greet)
        thread.start()
        assert predict(photo, photo, "--concurrency", "1", "--url", f"127.0.0.1:{listener.getsockname()[1]}") == 1
        thread.join()
    assert capsys.readouterr().out.count("is it the server? (SSH-2.0-OpenSSH") == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_certificate_of_ones_own_is_trusted_when_named(
    tmp_path: Path, photo: str, fake: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-keyout",
        key,
        "-out",
        cert,
    ]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    server = fake(answer())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    assert predict(photo, "--url", url) == 1
    assert f"{url} has a certificate that is not trusted (self-signed certificate); --ca-file PEM" in capsys.readouterr().out
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())  # what is said here comes before the environment
    assert predict(photo, "--url", url, "--ca-file", cert) == 0


# Redirects and answers


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_followed_with_photo_and_key(status: int, photo: str, fake: Callable[..., FakeServer]) -> None:
    server = fake(answer(status, b"", location="/there?top_k=2"), answer())
    assert predict(photo, "--url", server.url, "--top-k", "2", "--api-key", "k") == 0
    assert [request.path for request in server.requests] == ["/predict?top_k=2", "/there?top_k=2"]
    assert server.requests[1].body == PHOTO
    assert server.requests[1].headers["x-api-key"] == "k"


def test_another_host_gets_no_key(photo: str, fake: Callable[..., FakeServer]) -> None:
    other = fake(answer())
    server = fake(answer(307, b"", location=f"{other.url}/predict"))
    assert predict(photo, "--url", server.url, "--api-key", "k") == 0
    assert server.requests[0].headers["x-api-key"] == "k"
    assert other.requests[0].headers["x-api-key"] is None


@pytest.mark.parametrize(
    ("respond", "what"),
    [
        (answer(502, b"<html>", content_type="text/html; charset=utf-8"), "502 Bad Gateway, text/html"),
        (answer(200, b"<html>", content_type="text/html"), "200 OK, text/html"),
        (answer(404, {"detail": "Not Found"}, content_type="application/json"), "404 Not Found, application/json"),
        (answer(200, {"predictions": [{"label": 3}]}, content_type="application/json"), "200 OK, application/json"),
        (answer(200, [], content_type="application/json"), "200 OK, application/json"),
        (answer(302, b"", location="/predict"), "302 Found, no content type"),  # for ever
    ],
)
def test_an_answer_that_is_not_the_servers_is_an_error(
    respond: Responder, what: str, photo: str, fake: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(respond)
    assert predict(photo, "--json", "--url", server.url) == 1
    error = lines(capsys)[0]["error"]
    assert (error["code"], error["message"]) == (
        "bad_answer",
        f"{server.url} gave an answer that is not Spyglass's ({what}): is --url right?",
    )


def test_a_redirect_to_something_to_get_is_not_followed(
    photo: str, fake: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(answer(303, b"", location="/login"), answer())
    assert predict(photo, "--url", server.url) == 1
    assert "(303 See Other, no content type)" in capsys.readouterr().out
    assert len(server.requests) == 1


@pytest.mark.parametrize("location", ["file:///etc/passwd", "http://[", "http://a..b/"])
def test_a_redirect_to_no_address_is_an_error(
    location: str, photo: str, fake: Callable[..., FakeServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(photo, "--json", "--url", fake(answer(307, b"", location=location)).url) == 1
    assert lines(capsys)[0]["error"]["code"] == "unreachable"


# The table


def test_columns_are_aligned_and_nothing_reaches_the_terminal_unescaped() -> None:
    def found(photo: str, *labels: tuple[str, float]) -> dict[str, Any]:
        return {"photo": photo, "predictions": [{"label": label, "probability": value} for label, value in labels]}

    table = client.Table(["a.jpg", "写真.jpg", "b\x1b[2J\n.jpg"])
    assert [
        table.line(found("a.jpg", ("espresso", 0.9517), ("cup", 0.0144), ("pot", 0.0001))),
        table.line(found("写真.jpg", ("a label of 27 characters xx", 1.0))),
        table.line({"photo": "b\x1b[2J\n.jpg", "error": {"message": "bad\nline"}}),
        table.line(found("a.jpg", ("été\r", 0.5))),
    ] == [
        "a.jpg" + " " * 11 + "espresso               95.2%  cup 1.4%, pot 0.0%",
        "写真.jpg" + " " * 8 + "a label of 27 characters xx  100.0%",
        "b\\x1b[2J\\n.jpg  error: bad\\nline",
        "a.jpg" + " " * 11 + "été\\r" + " " * 25 + "50.0%",
    ]


def test_letters_that_stdout_can_not_write_are_escaped(
    tmp_path: Path, fake: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "写.png").write_bytes(PHOTO)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert predict(str(tmp_path / "写.png"), "--url", fake(answer()).url) == 0
    assert b"\\u5199.png  cat  " in written.getvalue()
