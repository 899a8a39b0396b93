"""A piece of a form: some images of one part, and what all forms write of an image."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probemb.data.scenes.predicates import Caption
    from probemb.data.scenes.world import Scene

JPEG_QUALITY = 90


@dataclass(frozen=True)
class Chunk:
    """Images first ... first + count - 1 of a part with `total` images, and the set's seed and image side in pixels."""

    folder: Path
    part: str
    first: int
    count: int
    total: int
    seed: int
    size: int

    @property
    def indices(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def scene_seed(self) -> str:
        """Parts never share a scene's random state; `val` of a form shows the images of the set's `val`."""
        return f"{self.seed} {self.part}"


def jpeg(scene: Scene, size: int) -> bytes:
    """The encoded picture of a scene, the same in all forms."""
    from probemb.data.scenes import render

    encoded = io.BytesIO()
    render(scene, size).save(encoded, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return encoded.getvalue()


def truth(scene: Scene, captions: Sequence[Caption], size: int, **more: object) -> str:
    """One line of scenes.jsonl."""
    from probemb.data.scenes import boxes, sample_to_json

    found = [[round(at, 3) for at in box] for box in boxes(scene, size)]
    return json.dumps({**sample_to_json(scene, captions), "boxes": found, **more}, separators=(",", ":"))
