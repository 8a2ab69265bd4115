"""Settings: the environment and the command line, read here and nowhere else. Command line > environment > default."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import time
from pathlib import Path
from typing import Annotated, Literal

import pydantic_settings
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "SPYGLASS_"
_DEFAULT_PORT = 8000


class SettingsError(ValueError):
    """A setting that stops the start: one line with its name, its value and what is allowed."""


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,\d+)*", value):
        raise ValueError("allowed are auto, cpu, cuda, cuda:0 and cuda:0,2")
    return value


def _auto_or_up_to(limit: int) -> AfterValidator:
    def check(value: str) -> str:
        if value != "auto" and not (re.fullmatch(r"[0-9]{1,9}", value) and 1 <= int(value) <= limit):
            raise ValueError(f"allowed are auto and whole numbers from 1 to {limit}")
        return value

    return AfterValidator(check)


def _port(value: object) -> object:
    # Kubernetes sets SPYGLASS_PORT=tcp://10.0.0.1:80 in pods beside a Service named spyglass; it is not meant for us.
    return _DEFAULT_PORT if isinstance(value, str) and value.startswith("tcp://") else value


def _expand(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # a user without a home, as containers have them
        return Path("/nonexistent", *path.parts[1:])


class Settings(BaseSettings):
    """What an operator can set: SPYGLASS_TOP_K in the environment or --top-k here. `python -m service predict` asks a running server."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, cli_kebab_case=True, cli_prog_name="python -m service", frozen=True, extra="forbid"
    )

    checkpoint: Path = Field(Path("checkpoints/efficientnet_lite0.safetensors"), description="the checkpoint file to serve")
    host: str = Field("0.0.0.0", description="address to listen on")
    port: Annotated[int, BeforeValidator(_port)] = Field(_DEFAULT_PORT, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    device: Annotated[str, AfterValidator(_device)] = Field("auto", description="auto, cpu, cuda, or some GPUs: cuda:0,2")
    workers_per_device: int = Field(1, ge=1, le=64, description="inference workers, each with its own copy of the model")
    engine: Literal["auto", "torch", "openvino"] = Field("auto", description="auto takes openvino on CPUs and torch on GPUs")
    precision: Literal["auto", "fp16", "bf16", "fp32"] = Field(
        "auto", description="the first to try; the golden samples decide. auto begins with the fastest"
    )
    compile: Literal["off", "on"] = Field("off", description="on: torch compiles the model, which takes minutes the first time")
    cache_dir: Annotated[Path, AfterValidator(_expand)] = Field(
        Path("~/.cache/spyglass"), validate_default=True, description="where converted and compiled models are kept"
    )
    max_batch_size: int = Field(32, ge=1, le=1024, description="images that one forward takes at most")
    batch_wait_ms: float = Field(0, ge=0, le=1000, description="how long a batch that is not full waits, from its first image on")
    slots: Annotated[str, _auto_or_up_to(100_000)] = Field("auto", description="images in flight at most")
    decode_threads: Annotated[str, _auto_or_up_to(256)] = Field("auto", description="threads that decode images, in each front door")
    api_servers: Annotated[str, _auto_or_up_to(256)] = Field("auto", description="front doors: processes that speak HTTP")
    timeout_s: float = Field(10, gt=0, le=3600, description="deadline of a request, counted from its arrival, queue included")
    worker_timeout_s: float = Field(20, gt=0, le=3600, description="a worker silent for longer is not ready")
    drain_s: float = Field(20, ge=0, le=3600, description="how long a stop waits for requests in flight")
    max_body_mb: float = Field(20, gt=0, le=4096, description="largest request body, in MB of 1,000,000 bytes")
    max_inflight_mb: float = Field(256, gt=0, le=1_000_000, description="request bodies in memory at once, in MB; at least max_body_mb")
    max_megapixels: float = Field(100, gt=0, le=10_000, description="largest image, read from its header before decoding")
    top_k: int = Field(5, ge=1, description="predictions in an answer when the request doesn't say")
    api_keys: SecretStr = Field(SecretStr(""), description="accepted keys, comma-separated; empty: open to everyone")
    cors_origins: str = Field("", description="origins whose pages may call, comma-separated, or *; empty: none")
    ssl_certfile: Path | None = Field(None, description="TLS certificate chain (PEM); with ssl_keyfile")
    ssl_keyfile: Path | None = Field(None, description="TLS private key (PEM)")
    log_format: Literal["text", "json"] = Field("text", description="text for people, json for machines")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least important message that is logged")

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile: give both or neither")
        for name in ("ssl_certfile", "ssl_keyfile"):
            file: Path | None = getattr(self, name)
            if file is not None and not os.access(file, os.R_OK):
                raise ValueError(f"{name}: {file} is not a readable file")
        if self.engine == "openvino" and self.device.startswith("cuda"):
            raise ValueError(f"engine: openvino computes on CPUs only, and device is {self.device}")
        if self.engine == "openvino" and self.compile == "on":
            raise ValueError("compile: on is for torch, and engine is openvino")
        if self.max_inflight_mb < self.max_body_mb:
            raise ValueError(f"max_inflight_mb: {self.max_inflight_mb} is less than max_body_mb {self.max_body_mb}")
        if self.api_keys.get_secret_value() and not self.keys:
            raise ValueError("api_keys: there is no key in it; leave it empty to need none")
        for number, key in enumerate(self.keys, 1):  # which is never shown
            if not key.isprintable():  # nor is what is left of bytes that are no UTF-8
                raise ValueError(f"api_keys: key number {number} holds a character that no header can carry")
        for origin in self.origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
                raise ValueError(f"cors_origins: {origin!r} is not allowed: allowed are origins such as https://example.com, and *")
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        return _split(self.api_keys.get_secret_value())

    @property
    def origins(self) -> tuple[str, ...]:
        return _split(self.cors_origins)


def _split(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def read(arguments: list[str]) -> Settings:
    """Settings from the command line and the environment. Raises SettingsError; `--help` prints and exits."""
    try:
        # Options of BaseSettings' constructor, which its type leaves out.
        return Settings(_cli_parse_args=arguments, _cli_exit_on_error=False)  # type: ignore[call-arg]
    except pydantic_settings.SettingsError as error:
        flags = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
        unknown = next((word.partition("=")[0] for word in arguments if word.startswith("--") and word.partition("=")[0] not in flags), "")
        close = difflib.get_close_matches(unknown, flags, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists them all"
        start, colon, rest = str(error).removeprefix("error parsing CLI: ").partition("unrecognized arguments: ")
        keyed = any("key" in argument for argument in arguments)  # what is no flag may be one, which is not shown
        shown = [word.partition("=")[0] for word in rest.split() if word.startswith("--") or not keyed]
        raise SettingsError(f"{start}{colon}{' '.join(shown)}; {hint}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise SettingsError(message) from None
        name = str(first["loc"][0])
        raise SettingsError(f"{name}: {first['input']!r} is not allowed: {message}") from None


def first_api_key() -> str:
    """The first of SPYGLASS_API_KEYS in the environment, empty without one: what a client sends."""
    return next(iter(_split(os.environ.get(f"{PREFIX}API_KEYS", ""))), "")


def unknown_variables() -> list[str]:
    """Variables of the environment that look like settings and are none, each with the closest setting."""
    names = {name.upper() for name in Settings.model_fields}
    found = []
    for variable in sorted(os.environ):
        # Kubernetes adds SPYGLASS_SERVICE_HOST, SPYGLASS_PORT_8000_TCP and so on beside a Service named spyglass.
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in names and not re.match("(SERVICE|PORT)_", name):
            close = difflib.get_close_matches(name, names, n=1)
            found.append(variable + (f" (did you mean {PREFIX}{close[0]}?)" if close else ""))
    return found


def printable(text: str) -> str:
    """A line that stays one, and says nothing to a terminal: line ends and other unprintable characters are escaped."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class _TextFormatter(logging.Formatter):
    _second, _text = 0, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, super().formatTime(record, datefmt)[:-4]
        return f"{self._text},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        # A client chooses paths and ids: their line ends must not begin a line that looks like ours.
        record.message = printable(record.message)
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": record.processName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(log_format: str, log_level: str) -> None:
    """Send all logging of this process to stderr, each message one line in one format; also LitServe's and uvicorn's."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(levelname)s %(processName)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=log_level.upper(), force=True)
    for name in ("litserve", "uvicorn", "uvicorn.error", "uvicorn.access"):  # their own handlers would print a second time
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    for name in ("uvicorn", "uvicorn.error"):  # each start, and each client whose bytes are not HTTP, would be a line
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("PIL").setLevel(logging.INFO)  # at debug a line for each part of each image
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of what clients send wrong; we answer that with a 400
