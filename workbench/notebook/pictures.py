"""Pictures that pages hold in themselves: figures as they are, and small versions of them."""

from __future__ import annotations

import base64
import io
from typing import Any

from ..errors import require

THUMBNAIL = (400, 270)  # pixels; shown at half of that


def thumbnail(png: bytes) -> str:
    """A small version of a picture.

    Args:
        png: the picture's file.

    Returns:
        Address of a picture of at most `THUMBNAIL` pixels, which holds the picture itself.
    """
    Image = require("PIL.Image")
    with Image.open(io.BytesIO(png)) as picture:
        factor = max(1, min(have // want for have, want in zip(picture.size, THUMBNAIL, strict=True)))
        small = _on_white(picture.reduce(factor) if picture.mode in ("RGB", "RGBA", "L") else picture)
    small.thumbnail(THUMBNAIL)
    return _address(small, lossless=False)


def embedded(png: str) -> str:
    """The address of a picture that holds the picture itself, smaller than PNG files are, and just the same.

    Args:
        png: a PNG file in base64.

    Example:
        >>> embedded("iVBORw0KGgo=")  # no picture: left as it is
        'data:image/png;base64,iVBORw0KGgo='
    """
    from PIL import Image, UnidentifiedImageError, features

    try:
        with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
            if features.check("webp") and max(picture.size) < 16384 and getattr(picture, "n_frames", 1) == 1:
                if picture.mode == "RGBA" and picture.getchannel("A").getextrema() == (255, 255):
                    return _address(picture.convert("RGB"), lossless=True)
                if picture.mode in ("RGB", "RGBA"):
                    return _address(picture, lossless=True)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        pass  # SyntaxError: what PIL calls a broken PNG file
    return f"data:image/png;base64,{''.join(png.split())}"


def _on_white(picture: Any) -> Any:
    Image = require("PIL.Image")
    picture = picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture.getchannel("A"))
    return white


def _address(picture: Any, lossless: bool) -> str:
    from PIL import features

    buffer = io.BytesIO()
    kind = "webp" if features.check("webp") else "png"
    options = {"lossless": lossless, "method": 2, "quality": 50 if lossless else 60, "exact": True}
    picture.save(buffer, kind.upper(), **(options if kind == "webp" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
