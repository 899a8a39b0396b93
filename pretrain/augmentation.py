"""Options of the image augmentation, under open_clip's names."""

from __future__ import annotations

from dataclasses import dataclass

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat, PositiveInt

from probemb.errors import UserError


@dataclass(frozen=True)
class Augmentation:
    """Random crops, changes of colour, and erased rectangles, of training images.

    Args:
        scale: share of the image's area that a crop keeps, from and to.
        ratio: width by height of a crop, from and to.
        hflip: share of the images that are mirrored; captions that say left or right are wrong for them.
        color_jitter: largest change of brightness, contrast, saturation and hue; empty for none.
        color_jitter_prob: share of the images that it is applied to.
        gray_scale_prob: share of the images that lose their colours.
        re_prob: share of the images of which random rectangles become noise.
        re_count: largest number of these rectangles.
    """

    scale: tuple[PositiveFloat, PositiveFloat] = (0.9, 1.0)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    hflip: ClosedUnitInterval = 0.0
    color_jitter: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = None
    color_jitter_prob: ClosedUnitInterval = 0.0
    gray_scale_prob: ClosedUnitInterval = 0.0
    re_prob: ClosedUnitInterval = 0.0
    re_count: PositiveInt = 1

    def check(self) -> None:
        """Raise UserError for ranges in the wrong order, and for a jitter without images or images without jitter."""
        for name, limit in (("scale", 1.0), ("ratio", None)):
            low, high = getattr(self, name)
            if low > high or (limit and high > limit):
                raise UserError(
                    f"data.augmentation.{name} is {low:g} to {high:g}.",
                    f"Give the smaller number first{', and at most 1 as the second' if limit else ''}.",
                )
        if (self.color_jitter is None) != (self.color_jitter_prob == 0):
            raise UserError(
                "Of data.augmentation.color_jitter and color_jitter_prob one is set and the other is not.",
                "Set both, such as [0.32, 0.32, 0.32, 0.08] and 0.8, or leave both out.",
            )
        if self.color_jitter and self.color_jitter[3] > 0.5:
            raise UserError(
                f"The hue in data.augmentation.color_jitter changes by up to {self.color_jitter[3]:g}.",
                "Set the fourth number to at most 0.5, which is every hue.",
            )
