"""Decoding with OpenCV, which reads all formats and ignores damage: check a file first."""

from __future__ import annotations

import numpy as np

from penstock.image.formats.damaged import Damaged
from penstock.native import Image, load_cv2


def decode(data: memoryview | bytes, colours: str) -> Image:
    """The pixels of a file that is whole; ``colours``: ``"RGB"`` or ``"GRAY"``."""
    cv2 = load_cv2()
    flags = cv2.IMREAD_COLOR if colours == "RGB" else cv2.IMREAD_GRAYSCALE
    try:
        image: Image | None = cv2.imdecode(
            np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION
        )
    except cv2.error as error:
        raise Damaged("OpenCV cannot decode its pixels") from error
    if image is None:
        raise Damaged("OpenCV cannot decode its pixels")
    if colours == "RGB":
        cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)
    return image
