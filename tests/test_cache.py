"""Images are decoded once; what the cache gives is what decoding gave."""

from __future__ import annotations

import io
import os
import unicodedata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from models import cache, data
from models.cache import Cached, cache_pictures, cache_pixels, even_batches, load_batches, read_picture
from models.data import DataError, find_samples
from models.preprocessing import Preprocessing
from tests.conftest import encode, make_data

PREPROCESSING = Preprocessing(resize=36, crop=32, interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are decoded, as it happens."""
    names: list[str] = []
    decode_all = data.decode_all

    def counting(files: list[Path], read: object) -> object:
        names.extend(f"{file.parent.name}/{file.name}" for file in files)
        return decode_all(files, read)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "decode_all", counting)
    return names


def val(root: Path) -> Cached:
    return cache_pixels(root / "cache", find_samples(root / "val"), PREPROCESSING)


def all_of(cached: Cached) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = cached.load(np.arange(len(cached))).numpy()
    return found


def test_validation_images_are_the_pixels_that_the_server_makes(tmp_path: Path) -> None:
    found = val(make_data(tmp_path, "ab"))
    expected = [PREPROCESSING.read(file.read_bytes()) for file in found.samples.files]
    np.testing.assert_array_equal(all_of(found), expected)
    assert found.samples.targets.tolist() == [0] * 4 + [1] * 4


def test_a_second_run_decodes_nothing_and_a_changed_file_is_the_only_one_decoded_again(tmp_path: Path, decoded: list[str]) -> None:
    first = val(make_data(tmp_path, "ab"))
    assert len(decoded) == 8
    decoded.clear()
    np.testing.assert_array_equal(all_of(val(tmp_path)), all_of(first))
    assert decoded == []
    (tmp_path / "val/a/2.png").write_bytes(encode((1, 2, 3)))
    (tmp_path / "val/a/5.png").write_bytes(encode((4, 5, 6)))
    (tmp_path / "val/b/0.png").unlink()
    second = val(tmp_path)
    assert decoded == ["a/2.png", "a/5.png"]
    np.testing.assert_array_equal(all_of(second), [PREPROCESSING.read(file.read_bytes()) for file in second.samples.files])


def test_other_preprocessing_has_a_cache_of_its_own(tmp_path: Path, decoded: list[str]) -> None:
    val(make_data(tmp_path, "ab"))
    cache_pictures(tmp_path / "cache", find_samples(tmp_path / "val"), PREPROCESSING)
    assert len(decoded) == 16
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("length", [0, 10, 20_000])
def test_a_cache_that_is_not_whole_is_made_anew(tmp_path: Path, decoded: list[str], length: int) -> None:
    first = all_of(val(make_data(tmp_path, "ab")))
    (file,) = (tmp_path / "cache").iterdir()
    os.truncate(file, length)
    np.testing.assert_array_equal(all_of(val(tmp_path)), first)
    assert len(decoded) == 16


def test_an_interruption_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_data(tmp_path, "ab")

    def stop(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "decode_all", stop)
    with pytest.raises(KeyboardInterrupt):
        val(tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_bad_files_are_left_out_and_named_each_time(tmp_path: Path, decoded: list[str]) -> None:
    make_data(tmp_path, "ab")
    bad = tmp_path / "val/a/1.png"
    bad.write_bytes(b"not an image")
    for _ in range(2):
        found = val(tmp_path)
        assert [(each.file, each.reason[:9]) for each in found.bad] == [(bad, "These 12 ")]
        assert (len(found), found.samples.counts()) == (7, {"a": 3, "b": 4})
        np.testing.assert_array_equal(all_of(found)[1], PREPROCESSING.read((tmp_path / "val/a/2.png").read_bytes()))
    assert len(decoded) == 8  # the bad one, too, only once
    bad.write_bytes(encode((1, 2, 3)))
    assert len(val(tmp_path)) == 8


def test_what_could_not_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[str]) -> None:
    make_data(tmp_path, "ab")
    broken = tmp_path / "val/a/1.png"

    def fail(file: Path) -> bytes:
        if file == broken:
            raise OSError(5, "Input/output error")
        return file.read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(data, "read_file", fail)
        assert [str(bad) for bad in val(tmp_path).bad] == [f"{broken}: can't be read (Input/output error)"]
    assert val(tmp_path).bad == ()
    assert decoded[8:] == ["a/1.png"]


def test_two_runs_may_fill_the_same_cache_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the same process id, as in two containers."""
    make_data(tmp_path, "ab")
    decode_all = data.decode_all

    def with_another_run(files: list[Path], read: object) -> object:
        monkeypatch.setattr(cache, "decode_all", decode_all)
        other.append(all_of(val(tmp_path)))
        return decode_all(files, read)  # type: ignore[arg-type]

    other: list[npt.NDArray[np.uint8]] = []
    monkeypatch.setattr(cache, "decode_all", with_another_run)
    np.testing.assert_array_equal(all_of(val(tmp_path)), other[0])
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".pixels"]


def test_what_a_killed_run_left_is_removed_after_a_day(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    old, young = tmp_path / "cache" / ".old.part", tmp_path / "cache" / ".young.part"
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    val(make_data(tmp_path, "ab"))
    assert (old.exists(), young.exists()) == (False, True)


def test_a_full_disk_is_said_with_the_room_that_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match=rf"^{tmp_path}/cache: no room for 0 MB of decoded images \(No space left on device\)"):
        val(make_data(tmp_path, "ab"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_label_without_a_usable_file_is_named_also_where_its_folder_spells_it_otherwise(tmp_path: Path) -> None:
    make_data(tmp_path, ["a", "Käfer"], val=1)
    (tmp_path / "val/Käfer").rename(folder := tmp_path / "val" / unicodedata.normalize("NFD", "Käfer"))
    (folder / "0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"no file of 'Käfer' can be used; one of them: .*/0.png: These 12 bytes"):
        val(tmp_path)


def test_a_label_without_a_usable_file_is_named(tmp_path: Path) -> None:
    make_data(tmp_path, "ab", val=1)
    (tmp_path / "val/b/0.png").write_bytes(b"not an image")
    with pytest.raises(
        DataError, match=rf"^{tmp_path}/val: no file of 'b' can be used; one of them: {tmp_path}/val/b/0.png: These 12 bytes"
    ):
        val(tmp_path)


@pytest.mark.parametrize(
    ("size", "shown", "aspect"), [((80, 60), (80, 60), 4 / 3), ((200, 60), (80, 60), 4 / 3), ((60, 70), (60, 70), 6 / 7)]
)
def test_a_picture_is_the_middle_squeezed_into_a_square(size: tuple[int, int], shown: tuple[int, int], aspect: float) -> None:
    """Left of the middle red, right of it blue, and green beyond what a picture shows."""
    image = Image.new("RGB", size, (0, 255, 0))
    left = (size[0] - shown[0]) // 2
    image.paste((255, 0, 0), (left, 0, size[0] // 2, size[1]))
    image.paste((0, 0, 255), (size[0] // 2, 0, left + shown[0], size[1]))
    found = read_picture(_png(image), side=40, preprocessing=PREPROCESSING)
    assert found.aspect == pytest.approx(aspect)
    assert found.pixels.shape == (40, 40, 3)
    assert (found.pixels[:, 1:18] == (255, 0, 0)).all()
    assert (found.pixels[:, 22:39] == (0, 0, 255)).all()


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("count", "batch_size", "sizes"),
    [(9, 4, [3, 3, 3]), (9, 8, [5, 4]), (17, 16, [9, 8]), (8, 8, [8]), (3, 2, [2, 1]), (2, 32, [2]), (2, 1, [1, 1])],
)
def test_batches_are_as_equal_as_can_be_and_hold_every_sample_once(count: int, batch_size: int, sizes: list[int]) -> None:
    batches = even_batches(np.arange(count), batch_size)
    assert [len(batch) for batch in batches] == sizes
    assert np.concatenate(batches).tolist() == list(range(count))


def test_loaded_batches_are_the_chosen_samples_in_order(tmp_path: Path) -> None:
    cached = val(make_data(tmp_path, "abc"))
    order = np.random.default_rng(1).permutation(12)
    batches = list(load_batches(cached, even_batches(order, 2), torch.device("cpu")))
    assert len(batches) == 6
    np.testing.assert_array_equal(torch.cat([batch.pixels for batch in batches]).numpy(), all_of(cached)[order])
    assert torch.cat([batch.targets for batch in batches]).tolist() == cached.samples.targets[order].tolist()
    assert torch.cat([batch.aspects for batch in batches]).shape == (12,)
