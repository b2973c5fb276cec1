"""Pictures embedded in pages as data URLs: full figures and thumbnails."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import require

THUMBNAIL = (400, 270)  # pixels; displayed at half this size


@contextmanager
def without_latex() -> Iterator[None]:
    """Context manager, or decorator, in which matplotlib draws all texts itself: the user may prefer LaTeX, and not have it here."""
    with require("matplotlib").rc_context({"text.usetex": False}):
        yield


def thumbnail(png: bytes) -> str:
    """Return a thumbnail of a picture.

    Args:
        png: contents of a PNG file.

    Returns:
        Data URL of a picture of at most `THUMBNAIL` pixels.
    """
    Image = require("PIL.Image")
    with Image.open(io.BytesIO(png)) as picture:
        factor = max(1, min(size // limit for size, limit in zip(picture.size, THUMBNAIL, strict=True)))
        reduced = _on_white(picture.reduce(factor) if picture.mode in ("RGB", "RGBA", "L") else picture)
    reduced.thumbnail(THUMBNAIL)
    return _data_url(reduced, lossless=False)


@functools.lru_cache(maxsize=64)
def embedded(png: str) -> str:
    """Return a picture as a data URL, losslessly compressed as WebP where possible. The last ones are kept.

    Args:
        png: PNG file in base64.

    Example:
        >>> embedded("iVBORw0KGgo=")  # no picture: left as it is
        'data:image/png;base64,iVBORw0KGgo='
    """
    from PIL import Image, UnidentifiedImageError, features

    try:
        with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
            if features.check("webp") and max(picture.size) < 16384 and getattr(picture, "n_frames", 1) == 1:
                if picture.mode == "RGBA" and picture.getchannel("A").getextrema() == (255, 255):
                    return _data_url(picture.convert("RGB"), lossless=True)
                if picture.mode in ("RGB", "RGBA"):
                    return _data_url(picture, lossless=True)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        pass  # PIL raises SyntaxError for broken PNG files
    return f"data:image/png;base64,{''.join(png.split())}"


def _on_white(picture: Any) -> Any:
    Image = require("PIL.Image")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white


def _data_url(picture: Any, lossless: bool) -> str:
    from PIL import features

    buffer = io.BytesIO()
    image_format = "webp" if features.check("webp") else "png"
    options = {"lossless": lossless, "method": 2, "quality": 50 if lossless else 60, "exact": True}
    picture.save(buffer, image_format.upper(), **(options if image_format == "webp" else {"optimize": True}))
    return f"data:image/{image_format};base64,{base64.b64encode(buffer.getvalue()).decode()}"
