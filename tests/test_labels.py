"""Labels come in the order of the logits, whatever file they are kept in, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.labels import LabelsError, imagenet_labels, read_labels


def _refused(path: Path) -> str:
    with pytest.raises(LabelsError) as caught:
        read_labels(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n"])
def test_a_text_file_has_one_label_a_line(tmp_path: Path, start: bytes, end: str, last: str) -> None:
    (tmp_path / "labels.txt").write_bytes(start + ("猫\nhot dog\n  Löwe " + last).replace("\n", end).encode())
    assert read_labels(str(tmp_path / "labels.txt")) == ("猫", "hot dog", "Löwe")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (["猫", "hot dog"], ("猫", "hot dog")),
        ({"1": "hot dog", "0": "猫"}, ("猫", "hot dog")),
        ({"hot dog": 1, "猫": 0}, ("猫", "hot dog")),
        ({"0": 1, "1": 0}, ("1", "0")),  # labels that are digits
        ({str(index): f"label {index}" for index in reversed(range(12))}, tuple(f"label {index}" for index in range(12))),
        ({"0": ["n01440764", "tench"], "1": ["n01443537", "goldfish"]}, ("tench", "goldfish")),
        ({"0": ["n02012849", "crane"], "1": ["n1", "cat"], "2": ["n03126707", "crane"]}, ("crane (n02012849)", "cat", "crane (n03126707)")),
    ],
)
def test_json_files_of_each_form(tmp_path: Path, document: object, expected: tuple[str, ...]) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "labels.json").write_text(json.dumps(document, ensure_ascii=False), encoding=encoding)
        assert read_labels(str(tmp_path / "labels.json")) == expected


def test_a_folder_gives_its_folders_sorted_as_imagefolder_does(tmp_path: Path) -> None:
    for name in ("zebra", "Cat", "ant 10", "ant 2", "猫", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.txt").touch()
    assert read_labels(str(tmp_path)) == ("Cat", "ant 10", "ant 2", "zebra", "猫")


def test_the_word_imagenet() -> None:
    labels = read_labels("imagenet")
    assert labels == imagenet_labels()
    assert (len(labels), labels[281]) == (1000, "tabby")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cat\ndog\ncat\n", "line 3: 'cat' is there already, in line 1"),
        (b"cat\n\ndog\n", "line 2: empty"),
        (b"", "line 1: empty"),
        (b"cat\n", "a classifier needs at least two labels, there is 1"),
        (b"cat\nL\xf6we\n", "line 2: not UTF-8"),
        ("cat\ndog\n".encode("utf-16"), "line 1: not UTF-8"),
        (b"cat\ndog\0\n", r"line 2: 'dog\x00' is no label"),
    ],
)
def test_a_wrong_text_file_is_refused_with_the_line(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "labels.txt").write_bytes(data)
    assert _refused(tmp_path / "labels.txt").startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["cat",\n"dog"\n"cow"]', "line 3: not valid JSON"),
        ("[" * 100_000, "not a list of labels"),
        ('"cat"', "must hold"),
        ("{}", "must hold"),
        ("[]", "a classifier needs at least two"),
        ('["cat", 3]', "entry 1: 3 is no label"),
        ('["cat", " "]', "entry 1: ' ' is no label"),
        ('["cat", "\\ud800"]', "entry 1: '\\ud800' is no label"),
        ('["cat", "cat"]', "entry 1: 'cat' is there already, in entry 0"),
        ('{"0": "cat", "2": "dog"}', "no label for index 1; there are 2, so they must be 0 to 1"),
        ('{"1": "cat", "2": "dog"}', "no label for index 0"),
        ('{"cat": 0, "dog": 0}', "0 is there twice"),
        ('{"cat": 0, "dog": -1}', "-1 is no index"),
        ('{"cat": 0, "dog": true}', "'cat' is no index"),
        ('{"cat": "dog"}', "'cat' is no index"),
        ('{"0": ["n1", "cat"], "1": ["n1", "cat"]}', "index 1: 'cat (n1)' is there already"),
        ('{"0": ["n1", "cat"], "1": "dog"}', "index 0: ['n1', 'cat'] is no label"),
    ],
)
def test_a_wrong_json_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "labels.json").write_text(text)
    assert _refused(tmp_path / "labels.json").startswith(message)


def test_a_folder_that_holds_no_labels_is_refused(tmp_path: Path) -> None:
    assert _refused(tmp_path).startswith("no folder in it; name the folder that holds a folder for each label")
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    assert _refused(tmp_path).startswith("only train, val in it; name the folder that holds a folder for each label, such as data/train")
    assert _refused(tmp_path / "test").startswith("no such file or folder")
