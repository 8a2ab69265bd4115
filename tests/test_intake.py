"""What routes share, where it takes no server to see it."""

from __future__ import annotations

import gzip
import random
import zlib
from typing import Any

import numpy as np
import pytest

from service.intake import Keys, _inflater, best
from service.schemas import ApiError


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 20])
def test_of_equal_values_the_lower_index_comes_first_however_many_are_asked_for(count: int) -> None:
    equal = np.array([0.1, 0.2, 0.2, 0.05, 0.2, 0.1, 0.1, 0.05], np.float32)
    assert best(equal, count) == [1, 2, 4, 0, 5, 6, 3, 7][:count]
    assert best(np.array([-5, -2, -9], np.float32), count) == [1, 0, 2][:count]  # logits may all be below zero


@pytest.mark.parametrize("classes", [10, 1000])
def test_the_two_ways_of_finding_the_best_agree(classes: int) -> None:
    values = np.random.default_rng(0).normal(size=classes).astype(np.float32)
    assert best(values, 16) == best(values, 17)[:16]


@pytest.mark.parametrize(
    ("headers", "good"),
    [
        ({"x-api-key": "old"}, True),
        ({"x-api-key": "new"}, True),
        ({"authorization": "Bearer new"}, True),
        ({"authorization": "bearer  new "}, True),
        ({"x-api-key": "wrong", "authorization": "Bearer old"}, True),  # a gateway may have put its own into the other
        ({"x-api-key": "old", "authorization": "Basic abc"}, True),
        ({"x-api-key": "Schlüssel".encode().decode("latin-1")}, True),
        ({}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "ol"}, False),
        ({"x-api-key": "old,new"}, False),
        ({"x-api-key": "OLD"}, False),
        ({"authorization": "old"}, False),
        ({"authorization": "Basic old"}, False),
        ({"authorization": "Bearer"}, False),
    ],
)
def test_any_of_the_keys_opens_in_either_header(headers: dict[str, str], good: bool) -> None:
    keys = Keys(["old", "new", "Schlüssel"])
    if good:
        keys.require(headers)
    else:
        with pytest.raises(ApiError) as caught:
            keys.require(headers)
        assert caught.value.code == "unauthorized"
    Keys([]).require(headers)  # none are set: open to everyone


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_stream_is_inflated_chunk_by_chunk_and_never_beyond_the_limit(pack: Any) -> None:
    data = random.Random(1).randbytes(5000) + bytes(5_000_000)
    packed = pack(data)
    inflate = _inflater("gzip")
    assert inflate is not None
    found = b"".join(inflate(packed[at : at + 7], 10**9, at + 7 >= len(packed)) for at in range(0, len(packed), 7))
    assert found == data
    inflate = _inflater("x-gzip")
    assert inflate is not None
    assert len(inflate(packed, 1000, True)) == 1000


@pytest.mark.parametrize("encoding", [None, "", "identity", "Identity"])
def test_a_body_as_it_is_needs_no_inflating(encoding: str | None) -> None:
    assert _inflater(encoding) is None


def test_an_unknown_or_broken_encoding_is_a_bad_request() -> None:
    with pytest.raises(ApiError, match="'br' is not understood; send the body as it is, or in gzip or deflate"):
        _inflater("br")
    inflate = _inflater("deflate")
    assert inflate is not None
    with pytest.raises(ApiError, match="the body is not in deflate"):
        inflate(b"no such thing", 1000, True)
    inflate = _inflater("gzip")
    assert inflate is not None
    with pytest.raises(ApiError, match="cut off"):
        inflate(gzip.compress(b"abc")[:-4], 1000, True)


def test_bytes_behind_the_end_of_a_stream_are_refused_not_kept() -> None:
    for chunks in ([gzip.compress(b"abc") + b"junk"], [gzip.compress(b"abc"), b"junk"]):
        inflate = _inflater("gzip")
        assert inflate is not None
        with pytest.raises(ApiError, match="bytes follow the end"):
            b"".join(inflate(chunk, 1000, False) for chunk in chunks)
