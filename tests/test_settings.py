"""Settings from three sources; a wrong one is one line; logging is one line a message."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings, SettingsError, configure_logging, read, unknown_variables


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("SPYGLASS_"):
            monkeypatch.delenv(name)


def test_the_command_line_comes_before_the_environment_and_that_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read([]).max_batch_size == 32
    monkeypatch.setenv("SPYGLASS_MAX_BATCH_SIZE", "16")
    monkeypatch.setenv("SPYGLASS_TOP_K", "3")
    assert read([]).max_batch_size == 16
    settings = read(["--max-batch-size", "8"])
    assert (settings.max_batch_size, settings.top_k, settings.port) == (8, 3, 8000)


def test_a_user_without_a_home_has_a_cache_folder_that_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert read([]).cache_dir == Path("/nonexistent/.cache/spyglass")


def test_an_empty_variable_means_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPYGLASS_PORT", "")  # as a compose file with an unset ${PORT} gives it
    monkeypatch.setenv("SPYGLASS_SSL_CERTFILE", "")
    assert (read([]).port, read([]).ssl_certfile) == (8000, None)


DEFAULTS: dict[str, Any] = {
    "checkpoint": Path("checkpoints/efficientnet_lite0.safetensors"),
    "host": "0.0.0.0",
    "port": 8000,
    "device": "auto",
    "workers_per_device": 1,
    "engine": "auto",
    "precision": "auto",
    "compile": "off",
    "cache_dir": Path.home() / ".cache" / "spyglass",
    "max_batch_size": 32,
    "batch_wait_ms": 0,
    "slots": "auto",
    "decode_threads": "auto",
    "api_servers": "auto",
    "timeout_s": 10,
    "worker_timeout_s": 20,
    "drain_s": 20,
    "max_body_mb": 20,
    "max_inflight_mb": 256,
    "max_megapixels": 100,
    "top_k": 5,
    "keys": (),
    "origins": (),
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "log_format": "text",
    "log_level": "info",
}


def test_the_defaults_are_those_of_the_design() -> None:
    settings = read([])
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS
    assert len(Settings.model_fields) == len(DEFAULTS)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("port", "http", "integer"),
        ("port", "70000", "less than or equal to 65535"),
        ("port", "-1", "greater than or equal to 0"),
        ("device", "gpu", "auto, cpu, cuda, cuda:0 and cuda:0,2"),
        ("device", "cuda:", "auto, cpu, cuda, cuda:0 and cuda:0,2"),
        ("device", "cuda:0,", "auto, cpu, cuda, cuda:0 and cuda:0,2"),
        ("workers_per_device", "0", "greater than or equal to 1"),
        ("precision", "int8", "'auto', 'fp16', 'bf16' or 'fp32'"),
        ("max_batch_size", "0", "greater than or equal to 1"),
        ("max_batch_size", "2.5", "integer"),
        ("batch_wait_ms", "-1", "greater than or equal to 0"),
        ("slots", "0", "auto and whole numbers from 1"),
        ("slots", "-5", "auto and whole numbers from 1"),
        ("decode_threads", "many", "auto and whole numbers from 1"),
        ("api_servers", "1.5", "auto and whole numbers from 1"),
        ("timeout_s", "0", "greater than 0"),
        ("timeout_s", "nan", "less than or equal to 3600"),
        ("worker_timeout_s", "inf", "less than or equal to 3600"),
        ("drain_s", "long", "number"),
        ("max_body_mb", "0", "greater than 0"),
        ("max_inflight_mb", "inf", "less than or equal to 1000000"),
        ("max_megapixels", "nan", "less than or equal to 10000"),
        ("top_k", "0", "greater than or equal to 1"),
        ("log_format", "xml", "'text' or 'json'"),
        ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, name: str, value: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as on_command_line:
        read([f"--{name.replace('_', '-')}={value}"])
    monkeypatch.setenv(f"SPYGLASS_{name.upper()}", value)
    with pytest.raises(SettingsError) as in_environment:
        read([])
    message = str(on_command_line.value)
    assert message.startswith(f"{name}: {value!r} is not allowed: ")
    assert allowed in message
    assert "\n" not in message
    assert str(in_environment.value) == message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ssl-certfile", __file__], "ssl_certfile and ssl_keyfile: give both or neither"),
        (["--ssl-keyfile", __file__], "ssl_certfile and ssl_keyfile: give both or neither"),
        (["--ssl-certfile", __file__, "--ssl-keyfile", "/no/key.pem"], "ssl_keyfile: /no/key.pem is not a readable file"),
        (["--max-body-mb", "300"], "max_inflight_mb: 256.0 is less than max_body_mb 300.0"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused_in_one_line(arguments: list[str], expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(arguments)
    assert str(caught.value) == expected


def test_the_values_that_a_wrong_one_is_near_to_are_allowed() -> None:
    settings = read(["--device=cuda:0,2", "--slots=7", "--max-inflight-mb=20", "--port=0", "--drain-s=0"])
    assert (settings.device, settings.slots, settings.max_inflight_mb, settings.port, settings.drain_s) == ("cuda:0,2", "7", 20, 0, 0)
    assert read(["--ssl-certfile", __file__, "--ssl-keyfile", __file__]).ssl_keyfile == Path(__file__)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-batchsize", "8"], "unrecognized arguments: --max-batchsize 8; did you mean --max-batch-size?"),
        (["--xyzzy=8"], "unrecognized arguments: --xyzzy; --help lists them all"),
        (["serve"], "unrecognized arguments: serve; --help lists them all"),
        (["--api-key", "SECRET"], "unrecognized arguments: --api-key; did you mean --api-keys?"),
        (["--api-keyz=SECRET"], "unrecognized arguments: --api-keyz; did you mean --api-keys?"),
        (["--api-keys", "K1", "SECRET"], "unrecognized arguments: ; --help lists them all"),
        (["--port"], "argument --port: expected one argument; --help lists them all"),
    ],
)
def test_a_wrong_argument_is_one_line_with_the_closest_right_one(arguments: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(arguments)
    assert str(caught.value) == message


def test_help_names_every_setting_and_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description
        assert field.description.split(",")[0].split("'")[0] in text


def test_keys_are_split_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPYGLASS_API_KEYS", "first-key, second-key,,")
    settings = read(["--cors-origins", "https://a.example, https://b.example"])
    assert settings.keys == ("first-key", "second-key")
    assert settings.origins == ("https://a.example", "https://b.example")
    for shown in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert "first-key" not in shown
        assert "second-key" not in shown
    with pytest.raises(SettingsError) as caught:
        read(["--port", "http"])
    assert "key" not in str(caught.value)


def test_variables_that_look_like_settings_are_named_with_the_closest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPYGLASS_MAX_BATCHSIZE", "8")
    monkeypatch.setenv("SPYGLASS_XYZZY", "8")
    monkeypatch.setenv("SPYGLASS_TOP_K", "8")  # a real one
    monkeypatch.setenv("OTHER_MAX_BATCHSIZE", "8")
    assert unknown_variables() == ["SPYGLASS_MAX_BATCHSIZE (did you mean SPYGLASS_MAX_BATCH_SIZE?)", "SPYGLASS_XYZZY"]


def test_what_kubernetes_sets_beside_a_service_named_spyglass_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPYGLASS_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("SPYGLASS_SERVICE_PORT_HTTP", "80")
    monkeypatch.setenv("SPYGLASS_PORT_80_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("SPYGLASS_PORT", "tcp://10.0.0.1:80")
    assert unknown_variables() == []
    assert read([]).port == 8000
    assert read(["--port", "9000"]).port == 9000


@pytest.fixture
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # pytest's own, which `force` would close
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("logging_restored")
def test_json_log_lines_are_one_object_each(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "info")
    try:
        raise ValueError('a "quoted"\nproblem')
    except ValueError:
        logging.getLogger("service.test").exception("it %s:\n%s", "broke", "twice")
    logging.getLogger("litserve").warning("from below")
    logging.debug("not this")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["level"], first["message"], first["process"]) == ("error", "it broke:\ntwice", "MainProcess")
    assert "ValueError" in first["exception"]
    assert first["time"].endswith("Z")
    assert second["message"] == "from below"


@pytest.mark.usefixtures("logging_restored")
def test_text_log_lines_are_one_line_each_and_say_when_and_how_bad(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", "warning")
    logging.getLogger("uvicorn.error").error("from below")
    logging.warning("ours")
    logging.info("not this")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(" ERROR MainProcess: from below")
    assert second.endswith(" WARNING MainProcess: ours")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--api-keys", "good, se\ncret"], "api_keys: key number 2 holds a character that no header can carry"),
        (["--api-keys", "se\udcffcret"], "api_keys: key number 1 holds"),
        (["--cors-origins", "https://a.example, b.example"], "cors_origins: 'b.example' is not allowed"),
        (["--cors-origins", "https://a.example/page"], "cors_origins: 'https://a.example/page' is not allowed"),
    ],
)
def test_a_wrong_key_or_origin_is_refused_and_no_key_shown(arguments: list[str], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(arguments)
    assert says in str(caught.value)
    assert "cret" not in str(caught.value)
    assert read(["--cors-origins", "*"]).origins == ("*",)


@pytest.mark.usefixtures("logging_restored")
def test_a_library_does_not_log_what_clients_get_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    from service.bodies import one_image
    from service.schemas import ApiError

    configure_logging("text", "info")
    with pytest.raises(ApiError):
        one_image(b"not multipart", "multipart/form-data; boundary=b")
    assert capsys.readouterr().err == ""


def test_control_characters_in_a_message_cannot_begin_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", "info")
    logging.getLogger("service.access").info("GET %s", "/x\n2026-01-01 ERROR forged\x1b[31m")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("GET /x\\n2026-01-01 ERROR forged\\x1b[31m")
