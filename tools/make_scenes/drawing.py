"""Drawing of scenes: shapes as polygons on a canvas, then light, noise and focus.

The objects' exact places, sizes and rotations, the background, and the grain depend on the scene's seed alone.
"""

import io
import math
import random
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from tools.make_scenes.world import MIDDLE, Scene, Thing

_RGB = {
    "red": (214, 32, 38),
    "orange": (246, 128, 22),
    "yellow": (248, 218, 38),
    "green": (34, 150, 62),
    "blue": (34, 82, 212),
    "purple": (136, 44, 168),
    "white": (250, 250, 250),
    "black": (18, 18, 20),
}
_PAPER = (226, 208, 176)
_PAPER_LINES = (176, 176, 190)
_INK = (40, 36, 44)
# Shares of the image's side. At 64 pixels a small transformer learns shapes of smaller objects much more slowly.
_RADIUS = {"small": (0.13, 0.145), "large": (0.195, 0.215), "huge": (0.34, 0.40)}
_CENTRES = ((0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73), (0.5, 0.5))
_JITTER = 0.015
_TURN = math.radians(10)


def render(scene: Scene, size: int = 64) -> Image.Image:
    """The scene as an RGB image of size x size pixels; the same scene gives the same pixels."""
    draw = random.Random(f"pixels {scene.seed}")
    factor = _oversampling(size)
    side = size * factor
    drawing = scene.medium == "drawing"
    background, lines = _background(drawing, draw)
    canvas = Image.new("RGB", (side, side), background)
    pen = ImageDraw.Draw(canvas)
    for at in lines:
        y = int(at * side)
        pen.line((0, y, side, y), fill=_PAPER_LINES, width=max(1, side // 110))
    for thing in scene.things:
        _draw_thing(canvas, thing, _place(thing, side, draw), drawing, background)
    image = canvas.reduce(factor)
    if scene.focus == "blurry":
        image = image.filter(ImageFilter.GaussianBlur(size * 0.034))
    image = _expose(image, scene, drawing, draw)
    if scene.focus == "pixelated":
        blocks = max(2, min(18, size // 2))
        image = image.resize((blocks, blocks), Image.Resampling.BOX).resize((size, size), Image.Resampling.NEAREST)
    return image


def boxes(scene: Scene, size: int = 64) -> list[tuple[float, float, float, float]]:
    """The tight box (left, top, right, bottom) of each object in `render(scene, size)`, in pixels, without shadows."""
    draw = random.Random(f"pixels {scene.seed}")
    factor = _oversampling(size)
    _background(scene.medium == "drawing", draw)
    found = []
    for thing in scene.things:
        outline = _place(thing, size * factor, draw)[0]  # holes lie inside
        xs, ys = ([min(max(at / factor, 0.0), size) for at in axis] for axis in zip(*outline))
        found.append((min(xs), min(ys), max(xs), max(ys)))
    return found


def jpeg(scene: Scene, size: int) -> bytes:
    """The encoded picture."""
    encoded = io.BytesIO()
    render(scene, size).save(encoded, "JPEG", quality=90, subsampling=0)
    return encoded.getvalue()


def _oversampling(size: int) -> int:
    """Images are drawn so many times larger and averaged, which smooths the edges."""
    return 3 if size <= 160 else 2


def _background(drawing: bool, draw: random.Random) -> tuple[tuple[int, ...], list[float]]:
    """Colour of the background, and the heights of the paper's lines in shares of the side."""
    grey = 118 + 44 * draw.random()
    tint = [grey + 16 * (draw.random() - 0.5) for _ in range(3)]
    if not drawing:
        return tuple(int(value) for value in tint), []
    gap, first = 0.11 + 0.05 * draw.random(), draw.random()
    return _PAPER, [(row + first) * gap for row in range(int(1 / gap) + 1)]


def _place(thing: Thing, side: int, draw: random.Random) -> list[list[tuple[float, float]]]:
    """Outlines of an object, the holes last, on a canvas of side x side pixels."""
    low, high = _RADIUS[thing.size]
    radius = side * (low + (high - low) * draw.random())
    spread = _JITTER * (2 if thing.cell == MIDDLE and thing.size != "huge" else 1)
    x, y = (side * (centre + spread * (2 * draw.random() - 1)) for centre in _CENTRES[thing.cell])
    turn = _TURN * (2 * draw.random() - 1)
    cos, sin = radius * math.cos(turn), radius * math.sin(turn)
    return [[(x + cos * u - sin * v, y + sin * u + cos * v) for u, v in outline] for outline in _OUTLINES[thing.shape]]


def _draw_thing(canvas: Image.Image, thing: Thing, outlines: list, drawing: bool, background: tuple[int, ...]) -> None:
    side = canvas.size[0]
    # A mask, because a ring shows the background through its hole.
    mask = Image.new("L", canvas.size, 0)
    mask_pen = ImageDraw.Draw(mask)
    for number, outline in enumerate(outlines):
        mask_pen.polygon(outline, fill=0 if number else 255)
    if not drawing:  # a soft shadow to the lower right
        shadow = tuple(int(value * 0.72) for value in background)
        offset = max(1, int(side * 0.018))
        canvas.paste(shadow, (offset, offset), mask)
    canvas.paste(_RGB[thing.colour], (0, 0), mask)
    if drawing:
        pen = ImageDraw.Draw(canvas)
        for outline in outlines:
            pen.line([*outline, outline[0], outline[1]], fill=_INK, width=max(2, side // 60), joint="curve")


def _expose(image: Image.Image, scene: Scene, drawing: bool, draw: random.Random) -> Image.Image:
    """Light from one side, grain, and the darkness or brightness that captions state."""
    size = image.size[0]
    pixels = np.asarray(image, dtype=np.float32)  # (H, W, 3)
    slope = 0.06 if drawing else 0.3
    across = np.linspace(-0.5, 0.5, size, dtype=np.float32)
    angle = 2 * math.pi * draw.random()
    light = 1 + slope * (math.cos(angle) * across[None, :] + math.sin(angle) * across[:, None])  # (H, W)
    grain = _grain(size)
    shift = int(draw.random() * grain.shape[0])
    light = light + (0.03 if drawing else 0.05) * np.roll(grain, shift, axis=(0, 1))[:size, :size]
    pixels = pixels * light[:, :, None]
    if scene.light == "dark":
        pixels *= 0.42
    elif scene.light == "bright":
        pixels = 265 - (255 - np.minimum(pixels, 255)) * 0.6
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@lru_cache(maxsize=4)
def _grain(size: int) -> np.ndarray:
    """Standard normal noise (size + 61, size + 61); numpy promises that RandomState's stream never changes."""
    return np.random.RandomState(7).standard_normal((size + 61, size + 61)).astype(np.float32)


def _regular(corners: int, radius: float, turn: float = 0.0) -> tuple[tuple[float, float], ...]:
    angles = [2 * math.pi * i / corners + turn for i in range(corners)]
    return tuple((radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles)


def _heart() -> Iterator[tuple[float, float]]:
    for t in (2 * math.pi * i / 48 for i in range(48)):
        height = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        yield 1.02 * math.sin(t) ** 3, -height / 15.5 - 0.12


_SPIKES = zip(_regular(5, 1.15), _regular(5, 0.46, math.pi / 5))
_A, _B = 0.34, 1.0  # half the width and the length of the cross
_OUTLINES = {  # polygons of radius 1 around (0, 0), y downwards; after the first one come holes
    "circle": (_regular(48, 0.95),),
    "ring": (_regular(48, 1.0), _regular(48, 0.54)),
    "square": (((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),),
    "diamond": (((0, -1.12), (0.74, 0), (0, 1.12), (-0.74, 0)),),
    "triangle": (((0, -1.0), (1.02, 0.8), (-1.02, 0.8)),),
    "star": (tuple(point for pair in _SPIKES for point in pair),),
    "cross": (
        ((-_A, -_B), (_A, -_B), (_A, -_A), (_B, -_A), (_B, _A), (_A, _A), (_A, _B), (-_A, _B), (-_A, _A), (-_B, _A),
         (-_B, -_A), (-_A, -_A)),
    ),
    "heart": (tuple(_heart()),),
}  # fmt: skip
