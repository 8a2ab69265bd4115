"""Crops show what they should, each image gets its own, and the seed decides."""

from __future__ import annotations

import torch

from models.augmentation import Augmentation

PLAIN = Augmentation(least_area=1.0, widest=1.0, light=0.0)


def run(
    augmentation: Augmentation, pictures: torch.Tensor, aspects: list[float] | None = None, crop: int = 16, seed: int = 0
) -> torch.Tensor:
    shapes = torch.tensor(aspects or [1.0] * len(pictures))
    return augmentation(pictures, shapes, crop, torch.Generator().manual_seed(seed))


def noise(count: int, side: int = 20) -> torch.Tensor:
    return torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def test_with_nothing_varied_a_square_picture_comes_out_as_it_is_or_mirrored() -> None:
    pictures = noise(16, side=16)
    found = run(PLAIN, pictures)
    kept = [bool(torch.equal(a, b)) for a, b in zip(found, pictures, strict=True)]
    mirrored = [bool(torch.equal(a, b.flip(1))) for a, b in zip(found, pictures, strict=True)]
    assert all(a != b for a, b in zip(kept, mirrored, strict=True))
    assert 0 < sum(mirrored) < 16


def test_a_crop_of_a_wide_picture_is_square_in_the_picture_as_it_was() -> None:
    """A picture of 4:3, black but for a white stripe as wide as a quarter of it: a third of the widest square crop."""
    pictures = torch.zeros(32, 120, 120, 3, dtype=torch.uint8)
    pictures[:, :, 45:75] = 255
    found = run(PLAIN, pictures, [4 / 3] * 32, crop=96)
    share = (found[:, 48, :, 0] > 127).float().mean(1)
    # All of the height, and as much of the width: the area of the whole would be wider than high, and is cut to the height.
    torch.testing.assert_close(share, torch.full((32,), 30 / 120 * (4 / 3) ** 0.5), rtol=0, atol=0.03)


def test_crops_show_at_least_the_least_area_and_differ_from_each_other() -> None:
    ramp = torch.arange(100, dtype=torch.uint8)[None, :, None].expand(100, 100, 3)  # how far right a pixel lies
    found = run(Augmentation(least_area=0.25, widest=1.0, light=0.0), ramp[None].expand(64, -1, -1, -1), crop=50)
    width = (found[:, 0, :, 0].int().amax(1) - found[:, 0, :, 0].int().amin(1)).float()
    assert width.min() >= 48
    assert width.max() <= 99
    assert len(width.unique()) > 20


def test_light_changes_brightness_within_its_share() -> None:
    grey = torch.full((64, 16, 16, 3), 100, dtype=torch.uint8)
    found = run(Augmentation(light=0.2), grey)[:, 0, 0, 0].float()
    assert 80 <= found.min() < 85
    assert 115 < found.max() <= 120


def test_the_same_seed_gives_the_same_pixels_and_another_gives_others() -> None:
    pictures = noise(8)
    assert torch.equal(run(Augmentation(), pictures, seed=1), run(Augmentation(), pictures, seed=1))
    assert not torch.equal(run(Augmentation(), pictures, seed=1), run(Augmentation(), pictures, seed=2))
    found = run(Augmentation(), pictures)
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.uint8, (8, 16, 16, 3), True)
