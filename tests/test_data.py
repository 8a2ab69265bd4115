"""Label folders become samples, or a line that names what is wrong with them."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models import images
from models.data import BadFile, DataError, check_bad, decode_all, find_samples, find_splits
from tests.conftest import encode, make_data


def test_labels_are_the_sorted_names_of_the_folders_and_each_file_gets_its_own(tmp_path: Path) -> None:
    train, val = find_splits(make_data(tmp_path, ["red ant", "蜜蜂", "Äpfel"], train=3, val=2))
    assert train.labels == val.labels == ("red ant", "Äpfel", "蜜蜂")
    assert train.counts() == {"red ant": 3, "Äpfel": 3, "蜜蜂": 3}
    assert [(file.parent.name, file.name) for file in val.files[:3]] == [("red ant", "0.png"), ("red ant", "1.png"), ("Äpfel", "0.png")]
    assert val.targets.tolist() == [0, 0, 1, 1, 2, 2]


def test_hidden_and_left_over_files_and_folders_do_not_count_and_deeper_ones_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_data(tmp_path, ["a", "b"], train=2)
    for name in (
        "train/.git/a.png",
        "train/a/.DS_Store",
        "train/a/Thumbs.db",
        "train/a/.trash/x.png",
        "train/a/2019/june/x.png",
        "train/readme",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode((1, 2, 3)))
    found = find_samples(tmp_path / "train")
    assert [str(file.relative_to(found.folder)) for file in found.files] == [
        "a/0.png",
        "a/1.png",
        "a/2019/june/x.png",
        "b/0.png",
        "b/1.png",
    ]
    assert capsys.readouterr().err == f"{tmp_path}/train/readme: left out, since it lies in no label folder\n"


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    make_data(tmp_path, ["a", "b"], train=1)
    (tmp_path / "train/a/again").symlink_to(tmp_path / "train/a")
    (tmp_path / "train/a/others").symlink_to(tmp_path / "val/a")
    assert find_samples(tmp_path / "train").counts() == {"a": 5, "b": 1}


def test_a_name_with_accents_taken_apart_is_the_same_label(tmp_path: Path) -> None:
    make_data(tmp_path, ["Käfer", "b", "می\u200cخواهم"])  # with a joiner that isn't printable but part of the word
    (tmp_path / "val/Käfer").rename(tmp_path / "val" / unicodedata.normalize("NFD", "Käfer"))
    train, val = find_splits(tmp_path)
    assert train.labels == val.labels == ("Käfer", "b", "می\u200cخواهم")


def _empty(folder: Path) -> Path:
    for file in folder.iterdir():
        file.unlink()
    return folder


_HARM: dict[str, Callable[[Path], object]] = {
    "{0}: no such folder; photographs belong into {0}/train/<label>/ and {0}/val/<label>/": lambda root: root.rename(root.parent / "gone"),
    "{0}/val: no such folder; photographs belong into": lambda root: (root / "val").rename(root / "validation"),
    "{0}/train/b: no files in it; put photographs of 'b' there": lambda root: _empty(root / "train/b"),
    "{0}/val: no folder for 'b', which {0}/train has": lambda root: (root / "val/b").rename(root / ".b"),
    "{0}/val: no folder for 'c', which {0}/train": lambda root: (root / "val/c").rename(root / "val/d"),
    "{0}/train: no folder for 'a', which {0}/val has": lambda root: (root / "train/a").rename(root / ".a"),
    "{0}/train: only one class, 'a'; a classifier needs at least two": lambda root: [
        (root / "train" / label).rename(root / label) for label in "bc"
    ],
    "{0}/train: no label folders in it": lambda root: [(root / "train" / label).rename(root / label) for label in "abc"],
    r"{0}/train: the folder 'a\n' can't be a label: its name must not": lambda root: (root / "train/a").rename(root / "train/a\n"),
}


@pytest.mark.parametrize("message", _HARM)
def test_what_is_wrong_with_the_folders_is_said_in_one_line(tmp_path: Path, message: str) -> None:
    root = make_data(tmp_path / "data", "abc", train=1, val=1)
    _HARM[message](root)
    with pytest.raises(DataError) as caught:
        find_splits(root)
    assert str(caught.value).startswith(message.format(root))
    assert "\n" not in str(caught.value)


def test_a_folder_named_one_level_too_deep_is_told_so(tmp_path: Path) -> None:
    make_data(tmp_path, "ab", train=1, val=1)
    with pytest.raises(DataError, match=f"^{tmp_path}/train/train: no such folder; name {tmp_path}, which has it$"):
        find_splits(tmp_path / "train")


def test_bad_files_are_named_with_their_reasons_in_place_of_their_pixels(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("good.png", "text.jpg", "cut.png", "pipe.png", "gone.png")]
    files[0].write_bytes(encode((10, 20, 30)))
    files[1].write_bytes(b"no image at all")
    files[2].write_bytes(encode((10, 20, 30), size=(400, 400))[:-100])
    os.mkfifo(files[3])  # reading it would wait for ever
    files[4].symlink_to(tmp_path / "nowhere")
    good, *bad = decode_all(files, lambda data: np.array(images.decode(data)))
    assert isinstance(good, np.ndarray)
    assert good[0, 0].tolist() == [10, 20, 30]
    assert all(isinstance(each, BadFile) for each in bad)
    assert [(each.file, each.reason[:20]) for each in bad if isinstance(each, BadFile)] == [
        (files[1], "These 15 bytes are n"),
        (files[2], "The PNG is cut short"),
        (files[3], "can't be read (not a"),
        (files[4], "can't be read (No su"),
    ]


def test_a_file_too_large_to_be_an_image_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "video.mp4", "wb") as file:
        file.truncate(100 << 30)
    (bad,) = decode_all([tmp_path / "video.mp4"], len)
    assert str(bad) == f"{tmp_path}/video.mp4: These 107 GB are no image that is decoded here"


def test_a_link_to_itself_is_a_bad_file(tmp_path: Path) -> None:
    make_data(tmp_path, "ab", train=1, val=1)
    (tmp_path / "train/a/loop.png").symlink_to("loop.png")
    found = find_samples(tmp_path / "train")
    assert found.counts() == {"a": 2, "b": 1}
    bad = [each for each in decode_all(found.files, len) if isinstance(each, BadFile)]
    assert [str(each) for each in bad] == [f"{tmp_path}/train/a/loop.png: can't be read (Too many levels of symbolic links)"]


def test_files_outside_of_label_folders_take_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_data(tmp_path, "ab", train=1, val=1)
    for number in range(300):
        (tmp_path / "train" / f"{number}.jpg").touch()
    find_samples(tmp_path / "train")
    assert re.fullmatch(rf"{tmp_path}/train/\d+.jpg: left out, since it lies in no label folder, and 299 others\n", capsys.readouterr().err)


def test_a_name_can_not_break_a_line_or_move_the_cursor() -> None:
    assert str(BadFile(Path("a\nb\x1b[2J\udce9.png"), "broken")) == r"a\nb\x1b[2J\udce9.png: broken"


def test_many_files_come_back_in_order(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(600)]
    for number, file in enumerate(files):
        file.write_text(str(number))
    assert list(decode_all(files, int)) == list(range(600))


@pytest.mark.parametrize(
    ("bad", "total", "max_bad", "stops"), [(1, 100, 0.01, False), (2, 100, 0.01, True), (1, 99, 0.01, True), (0, 1, 0.0, False)]
)
def test_a_run_stops_above_the_share_of_bad_files(bad: int, total: int, max_bad: float, stops: bool) -> None:
    found = [BadFile(Path(f"{number}.jpg"), "broken") for number in range(bad)]
    if stops:
        with pytest.raises(
            DataError, match=rf"^{bad} of {total} files can't be used, more than --max-bad {max_bad} allows.*\n  0.jpg: broken"
        ):
            check_bad(found, total, max_bad)
    else:
        check_bad(found, total, max_bad)
