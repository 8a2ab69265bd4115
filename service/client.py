"""python -m service predict: photographs -> the answers of a running server, as a table or as JSON."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import ssl
import sys
import time
import unicodedata
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from service.settings import first_api_key, printable

DEFAULT_URL = "http://localhost:8000"
_SUFFIXES = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff", ".avif"}
_SUFFIXES |= {".heic", ".heif", ".hif"}  # which some servers read

_BUSY = (429, 503)
_BUSY_S, _LEAST_BUSY_S = 1.0, 0.1  # the wait without a Retry-After; the least with one, for 0 would be a busy loop
_LOST_S = (0.1, 0.2, 0.4, 0.8, 1.6)  # waits after lost connections: a restart takes some seconds
_CONNECT_S = 5.0
_NOT_CONNECTED = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
_REDIRECTS = 5
_LARGEST_PHOTO = 1 << 30  # bytes; read whole
_LARGEST_ANSWER = 1 << 26  # bytes


def main(arguments: list[str]) -> int:
    """0: all photographs classified; 1: some not; 2: wrong usage; 130: Ctrl-C. Threads may still run after anything but 0."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us; a file opened now would take its place
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # labels are of any script, a terminal perhaps of one
    options = _parser().parse_args(arguments)
    try:
        return _predict(options)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OSError as error:  # of stdout, such as a full disk
        print(f"error: {error}", file=sys.stderr)
        return 1


def _predict(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in ("top_k", "key", "timeout", "concurrency", "ca_file")}
    client = Client(options.url, **given)
    photos = [photo for argument in options.photos for photo in expand(argument)]
    table = Table(photos)
    failed = False
    pool = ThreadPoolExecutor(options.concurrency)
    try:
        for answer in pool.map(client.predict, photos):
            failed = failed or "error" in answer
            print(json.dumps(answer) if options.json else table.line(answer), flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return int(failed)


# Arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; `{self.prog} --help` says more\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m service predict",
        description="Has a running server classify photographs. Exit code: 0 all classified, 1 some not, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "photos", nargs="+", metavar="PHOTO", help="an image file, a folder (every image file below it, by suffix), or - for standard input"
    )
    parser.add_argument("--url", type=_url, default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    parser.add_argument("--top-k", type=_count, metavar="N", help="labels for each photo (default: the server's)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each photo: its path with the server's answer, or an error")
    parser.add_argument(
        "--api-key",
        type=_key,
        dest="key",
        default=first_api_key(),
        metavar="KEY",
        help="default: the first of SPYGLASS_API_KEYS in the environment, if any",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds for each photo, all waiting included (default: 60)",
    )
    parser.add_argument("--concurrency", type=_count, default=4, metavar="N", help="photos in flight at once (default: 4)")
    parser.add_argument("--ca-file", type=_ca_file, metavar="PEM", help="certificates to trust instead of the public ones")
    return parser


def _url(text: str) -> str:
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/predict")
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        good = parts.scheme in ("http", "https") and parts.port != 0 and not parts.query and not parts.fragment
        requests.Request("POST", url).prepare()
    except (ValueError, requests.RequestException):
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server, such as {DEFAULT_URL}")
    return url


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, over 0 and at most 86400")
    return seconds


def _key(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise argparse.ArgumentTypeError("a key has printable characters only, and none of its ends is a space")  # and isn't shown
    return text


def _ca_file(path: str) -> str:
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        raise argparse.ArgumentTypeError(f"{path}: no readable file of PEM certificates ({error.strerror})") from None
    return path


# Photos


class PhotoError(Exception):
    """Why a photo has no answer: a stable code, a message for people, the request's id where there was a request."""

    def __init__(self, code: str, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.request_id = code, message, request_id


def expand(argument: str) -> list[str]:
    """The image files below a folder, sorted, and the folders there that can't be read; `argument` itself where there are none.

    Hidden files and folders don't count, nor do links to folders.
    """
    if argument == "-" or not os.path.isdir(argument):
        return [argument]
    found: list[str] = []
    walk = os.walk(argument, onerror=lambda error: found.append(error.filename))
    for folder, folders, files in walk:
        folders[:] = [name for name in folders if not name.startswith(".")]
        images = [name for name in files if not name.startswith(".") and os.path.splitext(name)[1].lower() in _SUFFIXES]
        found += [os.path.join(folder, name) for name in images]
    return sorted(found, key=lambda path: path.split(os.sep)) or [argument]


def read(photo: str) -> bytes:
    """The bytes of a file, or for - of standard input. Raises PhotoError."""
    try:
        if photo == "-":
            data = sys.stdin.buffer.read() if sys.stdin else b""
        elif os.path.isdir(photo):
            os.listdir(photo)  # says why where it can't be read
            raise PhotoError("unreadable", "no image files in this folder")
        else:
            with open(photo, "rb") as file:
                if os.fstat(file.fileno()).st_size > _LARGEST_PHOTO:
                    raise PhotoError("unreadable", f"over {_LARGEST_PHOTO >> 30} GiB; no photo is")
                data = file.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise PhotoError("unreadable", getattr(error, "strerror", None) or str(error)) from None
    if not data:
        raise PhotoError("unreadable", "empty")
    return data


# The server


class _Body(io.BytesIO):
    """What is sent in pieces: the timeout of a connection holds for each of them, this one for all."""

    def __init__(self, data: bytes, deadline: float) -> None:
        super().__init__(data)
        self.deadline = deadline

    def read(self, size: int | None = -1) -> bytes:
        if time.monotonic() > self.deadline:
            raise TimeoutError
        return super().read(size)


class Client:
    """Classifies photos on a server. For many threads at once; their connections are kept alive."""

    def __init__(self, url: str, *, top_k: int | None, key: str, timeout: float, concurrency: int, ca_file: str | None) -> None:
        self.url = f"{url}/predict"
        # No "user:password@", which belongs into no message.
        self.name = urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        self.parameters = {} if top_k is None else {"top_k": str(top_k)}
        self.key = key.encode()
        self.timeout, self.ca_file = timeout, ca_file
        self.session = requests.Session()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=concurrency))
        self.answered = False  # whether the server ever did
        self.gone: str | None = None  # why no more photo is sent

    def predict(self, photo: str) -> dict[str, Any]:
        """{"photo", ...the server's answer}, or {"photo", "error": {code, message, request_id}}."""
        try:
            return {"photo": photo, **self._classify(photo)}
        except PhotoError as error:
            return {"photo": photo, "error": {"code": error.code, "message": error.message, "request_id": error.request_id}}

    def _classify(self, photo: str) -> dict[str, Any]:
        if self.gone:
            raise PhotoError("unreachable", self.gone)
        deadline = time.monotonic() + self.timeout
        data = read(photo)
        request_id = uuid.uuid4().hex
        waits = iter(_LOST_S)
        while True:
            try:
                response, body = self._post(data, request_id, deadline)
            except (OSError, ValueError, urllib3.exceptions.HTTPError) as error:  # ValueError: a redirect to no address
                self._wait_for_connection(error, waits, request_id, deadline)
                continue
            if response.status_code in _BUSY:
                wait = _retry_after(response)
                if time.monotonic() + wait < deadline:
                    time.sleep(wait)
                    continue
            return self._answer(response, body, request_id)

    def _post(self, data: bytes, request_id: str, deadline: float) -> tuple[requests.Response, bytes]:
        """The last answer's head and body. Redirects are followed by hand: requests would make a GET of the POST, and keep the key."""
        url = self.url
        for hop in range(_REDIRECTS + 1):
            left = max(deadline - time.monotonic(), 0.001)
            headers: dict[str, str | bytes] = {"content-type": "application/octet-stream", "x-request-id": request_id}
            if self.key and not self.session.should_strip_auth(self.url, url):  # type: ignore[no-untyped-call]
                headers["x-api-key"] = self.key
            with self.session.post(
                url,
                params=self.parameters if hop == 0 else None,
                data=_Body(data, deadline),
                headers=headers,
                timeout=(min(left, _CONNECT_S), left),
                verify=self.ca_file,  # for the session it would give way to the environment
                allow_redirects=False,
                stream=True,
            ) as response:
                self.answered, self.gone = True, None
                body = b""
                # read1: what has arrived. A server that sends a byte now and then never reaches a timeout.
                while len(body) <= _LARGEST_ANSWER and (chunk := response.raw.read1(1 << 16, decode_content=True)):
                    body += chunk
                    if time.monotonic() > deadline:
                        raise requests.ReadTimeout
            target = self.session.get_redirect_target(response)
            if target is None or response.status_code == 303:  # 303 asks for a GET
                break
            url = requests.compat.urljoin(url, target)
        return response, body

    def _wait_for_connection(self, error: Exception, waits: Iterator[float], request_id: str, deadline: float) -> None:
        """Sleep until the next try after a failed one. Raises PhotoError when there is none."""
        chain = list(_chain(error))
        connected = not any(isinstance(one, _NOT_CONNECTED) for one in chain)
        if connected and time.monotonic() >= deadline:
            raise PhotoError("timed_out", f"no answer from {self.name} within {self.timeout:g} s", request_id) from None
        cause = chain[-1]
        if isinstance(cause, ConnectionError):  # refused, reset, closed: a restart, perhaps
            wait = next(waits, math.inf)
            if time.monotonic() + wait < deadline:
                time.sleep(wait)
                return
        message = self._why_unreachable(cause, connected)
        if not (connected and self.answered):
            self.gone = message  # the photos that are left would wait as long for the same
        raise PhotoError("unreachable", message, request_id) from None

    def _why_unreachable(self, cause: BaseException, connected: bool) -> str:
        if isinstance(cause, ssl.SSLCertVerificationError):
            advice = "" if self.ca_file else "; --ca-file PEM names one that is"
            return f"{self.name} has a certificate that is not trusted ({cause.verify_message}){advice}"
        reason = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        if connected:
            what = "is it http://?" if isinstance(cause, ssl.SSLError) else "is it the server?"
            return f"{self.name} was reached and gave no answer: {what} ({reason})"
        return f"cannot reach {self.name}: is the server running? ({reason})"

    def _answer(self, response: requests.Response, body: bytes, request_id: str) -> dict[str, Any]:
        answer: Any = None
        with suppress(ValueError, RecursionError):
            answer = json.loads(body)
        if response.ok and _is_answer(answer):
            return dict(answer)
        if not response.ok and _is_error(answer):
            error = answer["error"]
            more = "; here that is --api-key, or SPYGLASS_API_KEYS in the environment" if error["code"] == "unauthorized" else ""
            raise PhotoError(error["code"], error["message"] + more, error.get("request_id"))
        kind = response.headers.get("content-type", "").partition(";")[0] or "no content type"
        what = f"{response.status_code} {response.reason or ''}".strip()
        raise PhotoError("bad_answer", f"{self.name} gave an answer that is not Spyglass's ({what}, {kind}): is --url right?", request_id)


def _retry_after(response: requests.Response) -> float:
    """Seconds: Retry-After gives them, or a date."""
    try:
        return max(urllib3.Retry().parse_retry_after(response.headers["retry-after"]), _LEAST_BUSY_S)
    except (KeyError, ValueError, OverflowError, urllib3.exceptions.InvalidHeader):
        return _BUSY_S


def _chain(error: object) -> Iterator[BaseException]:
    """An error, what it wraps, what that wraps: the last is what the system said."""
    while isinstance(error, BaseException):
        yield error
        inside = (getattr(error, "reason", None), *error.args, error.__cause__)
        error = next((one for one in inside if isinstance(one, BaseException)), None)


def _is_answer(answer: Any) -> bool:
    try:
        best = answer["predictions"]
        return bool(best) and all(isinstance(one["label"], str) and isinstance(one["probability"], int | float) for one in best)
    except (TypeError, KeyError):
        return False


def _is_error(answer: Any) -> bool:
    try:
        return all(isinstance(answer["error"][name], str) for name in ("code", "message"))
    except (TypeError, KeyError):
        return False


# The table


class Table:
    """Lines for people, each made before the next answer is known: a column grows with what has come."""

    def __init__(self, photos: list[str]) -> None:
        self.photo = min(max((_columns(printable(photo)) for photo in photos), default=0), 60)
        self.label = 20

    def line(self, answer: dict[str, Any]) -> str:
        photo = _padded(printable(answer["photo"]), self.photo)
        if "error" in answer:
            return f"{photo}  error: {printable(answer['error']['message'])}"
        found = [(printable(one["label"]), f"{one['probability']:.1%}") for one in answer["predictions"]]
        (label, percent), others = found[0], found[1:]
        self.label = max(self.label, min(_columns(label), 40))
        return f"{photo}  {_padded(label, self.label)}  {percent:>6}  {', '.join(' '.join(other) for other in others)}".rstrip()


def _columns(text: str) -> int:
    """Of a terminal: letters of East Asia take two, accents that combine none."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else not unicodedata.combining(letter) for letter in text)


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - _columns(text))
