"""Plain pictures for tests."""

import io

from PIL import Image


def picture(colour, size=16, format="PNG"):
    data = io.BytesIO()
    Image.new("RGB", (size, size) if isinstance(size, int) else size, colour).save(data, format)
    return data.getvalue()
