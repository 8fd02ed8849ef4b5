"""PNGs in the compiled kernel: the pixels of PIL, crops fused, damage left to Python."""

from __future__ import annotations

import io
import struct
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock import native
from penstock.engine.engine import Engine
from penstock.engine.pools.native_threads import NativePool
from penstock.errors import SourceError
from penstock.image import kernel
from penstock.image.codec import Decode
from tests.support.contract import epochs

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}


def chunk(name: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(content, zlib.crc32(name))
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", crc)


def png(
    height: int, width: int, colour: int, rows: bytes, parts: int = 1, packed: bytes | None = None
) -> bytes:
    """A PNG of these filtered rows, whose stream is divided over several chunks."""
    stream = zlib.compress(rows) if packed is None else packed
    ends = [len(stream) * i // parts for i in range(parts + 1)]
    palette = [chunk(b"PLTE", bytes(range(256)) * 3)] if colour == 3 else []
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *palette,
            *(chunk(b"IDAT", stream[a:b]) for a, b in pairwise(ends)),
            chunk(b"IEND", b""),
        ]
    )


def rgb(data: bytes) -> Any:
    """The pixels by PIL; transparency is dropped as ``decode`` states."""
    image = PIL.Image.open(io.BytesIO(data))
    return np.asarray(
        image.convert("L").convert("RGB") if image.mode == "LA" else image.convert("RGB")
    )


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_filter_colour_and_compression_has_the_pixels_of_pil(data: Any) -> None:
    height, width = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 40))
    colour = data.draw(st.sampled_from(sorted(CHANNELS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    most = data.draw(st.sampled_from((2, 256)))
    rows = rng.integers(0, most, (height, 1 + width * CHANNELS[colour]), dtype=np.uint8)
    rows[:, 0] = rng.integers(0, 5, height)
    if data.draw(st.booleans()):
        rows[height // 2 :, 1:] = 7  # long matches
    packer = zlib.compressobj(
        data.draw(st.integers(0, 9)), wbits=15, strategy=data.draw(st.integers(0, 4))
    )
    packed = packer.compress(rows.tobytes()) + packer.flush()
    file = png(height, width, colour, b"", data.draw(st.integers(1, 4)), packed)
    found = kernel.decode_png(file)
    assert found is not None
    assert (found == rgb(file)).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "LA", "RGBA"])
def test_files_of_pil_and_crops_of_them(mode: str) -> None:
    rng = np.random.default_rng(1)
    small = rng.integers(0, 256, (20, 16, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(small).resize((120, 150)).convert(mode)
    file = io.BytesIO()
    image.save(file, "PNG")
    whole = kernel.decode_png(file.getvalue())
    assert whole is not None
    assert (whole == rgb(file.getvalue())).all()
    for box in ((0, 0, 150, 120), (17, 31, 40, 50), (149, 119, 1, 1)):
        top, left, height, width = box
        cut = np.empty((height, width, 3), np.uint8)
        kernel.region(file.getvalue(), box, cut)
        assert (cut == whole[top : top + height, left : left + width]).all()
        for flip in (False, True):
            fused, apart = np.empty((2, 24, 30, 3), np.uint8)
            kernel.region(file.getvalue(), box, fused, flip)
            kernel.resize(whole, box, apart, flip)
            assert (fused == apart).all()


def test_a_damaged_or_unusual_png_is_left_to_python() -> None:
    rows = np.random.default_rng(0).integers(0, 255, (9, 1 + 3 * 8), dtype=np.uint8)
    rows[:, 0] = 4
    good = png(9, 8, 2, rows.tobytes())
    assert kernel.decode_png(good) is not None
    for place in range(len(good)):
        for bit in (1, 128):
            broken = bytearray(good)
            broken[place] ^= bit
            assert kernel.decode_png(bytes(broken)) is None
    for length in range(len(good)):
        assert kernel.decode_png(good[:length]) is None
    rows[8, 0] = 5
    stream = zlib.compress(rows.tobytes())
    for file, why in (
        (png(9, 8, 2, rows.tobytes()), "unknown filter"),
        (png(9, 8, 2, b"", packed=stream[:-4] + b"0000"), "damaged"),
        (png(9, 9, 2, rows.tobytes()), "too few or far too many pixels"),
        (png(9, 8, 2, rows.tobytes())[:-9], "cut short"),
    ):
        assert kernel.decode_png(file) is None
        with pytest.raises(SourceError, match=why):
            Decode().apply(file, None)
    # More bytes than pixels, and 16 bits: Python reads them.
    rows[8, 0] = 0
    longer = png(9, 8, 2, rows.tobytes() + b"more")
    assert kernel.decode_png(longer) is None
    assert (Decode().apply(longer, None) == rgb(longer)).all()
    grey = PIL.Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 999)
    deep = io.BytesIO()
    grey.save(deep, "PNG")
    assert kernel.decode_png(deep.getvalue()) is None


def test_a_row_below_the_crop_is_checked() -> None:
    rows = np.zeros((9, 1 + 3 * 8), dtype=np.uint8)
    rows[8, 0] = 9
    out = np.empty((2, 2, 3), np.uint8)
    with pytest.raises(kernel.Unsupported):
        kernel.region(png(9, 8, 2, rows.tobytes()), (0, 0, 2, 2), out)


def pictures() -> list[bytes]:
    rng = np.random.default_rng(2)
    out = []
    for number in range(23):
        pixels = rng.integers(0, 256, (30 + number, 40, 3), dtype=np.uint8)
        file = io.BytesIO()
        PIL.Image.fromarray(pixels).save(file, "PNG" if number % 5 else "JPEG")
        out.append(file.getvalue())
    return out


def sources(folder: Path) -> dict[str, ps.Pipeline]:
    """The same pictures in a table, in Parquet as bytes and as Hugging Face stores them."""
    files = pictures()
    labels = list(range(len(files)))
    structs = [{"bytes": data, "path": None} for data in files]
    plain = pa.table({"image": files, "label": labels})
    pq.write_table(plain, folder / "bytes.parquet", row_group_size=6)
    pq.write_table(pa.table({"image": structs, "label": labels}), folder / "structs.parquet")
    return {
        "bytes": ps.from_parquet(folder / "bytes.parquet"),
        "structs": ps.from_parquet(folder / "structs.parquet"),
        "table": ps.from_arrow(plain),
    }


@pytest.mark.parametrize("name", ["bytes", "structs", "table"])
def test_images_in_columns_take_the_kernel_with_the_bits_of_python(
    name: str, tmp_path: Path
) -> None:
    pipeline = (
        sources(tmp_path)[name]
        .map(ps.image.decode())
        .map(ps.image.random_resized_crop(16))
        .map(ps.image.random_flip())
        .map(ps.image.normalize())
        .batch(5)
    )
    with pipeline.loader(workers=2, kind="threads", seed=3) as loader:
        next(iter(loader))
        assert isinstance(loader._feed, Engine)
        assert isinstance(loader._feed.pool, NativePool)
    assert epochs(pipeline, 2, workers=2, kind="threads", seed=3) == epochs(
        pipeline, 2, workers=0, seed=3
    )


def test_no_picture_of_these_columns_is_left_to_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        p.map(ps.image.decode()).map(ps.image.center_crop(20)).batch(5)
        for p in sources(tmp_path).values()
    ]
    from penstock.engine.pools import native_road

    left: list[int] = []
    monkeypatch.setattr(
        native_road.NativeRoad,
        "run_in_python",
        lambda self, held, place, runner: left.append(place),
    )
    for pipeline in made:
        # The first batch shows the layout, by Python.
        with pipeline.loader(workers=2, kind="threads") as loader:
            assert sum(len(batch["label"]) for batch in loader) == 23
    assert not left
