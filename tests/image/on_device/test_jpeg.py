"""Decoding of packed coefficients: C kernel, torch and Triton give the same bits."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock import native
from penstock.image import kernel
from penstock.image.coefficients import read_coefficients
from tests.support.jpegs import Box, Pixels, encode, picture

torch: Any = pytest.importorskip("torch")
jpeg: Any = pytest.importorskip("penstock.image.on_device.jpeg")

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason="needs the kernel")

Decode = Callable[..., Any]
Case = tuple[bytes, Box]


@pytest.fixture(scope="module")
def triton_decode() -> Decode:
    """``jpeg_triton.decode`` in Triton's interpreter, which conftest.py chooses."""
    pytest.importorskip("triton")
    from penstock.image.on_device import jpeg_triton

    # Few programs: the interpreter takes a second for sixty.
    return lambda packed, read: jpeg_triton.decode(packed, read, blocks=64, count=2048)


def noise(height: int, width: int, seed: int) -> Pixels:
    """The hardest case for a transform: every pixel black or white."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2, (height, width, 3), dtype=np.uint8) * 255


def edges(height: int, width: int) -> Pixels:
    """Few coefficients, and large ones: those of a block take two bytes each."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, 4::8] = pixels[:, 5::8] = 255
    return pixels


def with_restarts(pixels: Pixels, quality: int, interval: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(
        file, "JPEG", quality=quality, subsampling=2, restart_marker_blocks=interval
    )
    return file.getvalue()


def with_coarsest_steps(data: bytes) -> bytes:
    """The same file with all quantization steps at 255: most products are absurd."""
    out = bytearray(data)
    at = data.find(b"\xff\xdb")
    while at >= 0:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        for table in range(at + 4, at + 2 + length, 65):
            out[table + 1 : table + 65] = b"\xff" * 64
        at = data.find(b"\xff\xdb", at + 2 + length)
    return bytes(out)


@st.composite
def cases(draw: st.DrawFn, most: int = 44) -> Case:
    height, width = draw(st.integers(1, most)), draw(st.integers(5, most))
    make = draw(st.sampled_from([picture, noise]))
    pixels = make(height, width, draw(st.integers(0, 3)))
    quality = draw(st.sampled_from([1, 30, 75, 95, 100]))
    kind = draw(st.sampled_from(["444", "422", "420", "440", "gray", "restarts", "absurd"]))
    if kind == "restarts":
        data = with_restarts(pixels, quality, draw(st.integers(1, 7)))
    elif kind == "absurd":
        data = with_coarsest_steps(encode(pixels, "420", 100))
    else:
        data = encode(pixels, kind, quality)
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    box = (top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))
    return data, box


def by_kernel(data: bytes, box: Box) -> NDArray[np.uint8]:
    out = np.empty((*box[2:], 3), np.uint8)
    kernel.region(data, box, out)
    return out


def check(decode: Decode, batch: Sequence[Case]) -> None:
    read = read_coefficients([data for data, _ in batch], [box for _, box in batch])
    assert read.errors == [None] * len(batch)
    result = decode(torch.from_numpy(read.packed), read)
    assert len(result) == len(batch)
    for number, (data, box) in enumerate(batch):
        got = result.picture(number).numpy()
        assert np.array_equal(got, by_kernel(data, box)), number
    origins = torch.stack([result.tops, result.lefts], dim=1).tolist()
    assert origins == [list(box[:2]) for _, box in batch]


@settings(max_examples=40, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=4))
def test_torch_has_the_bits_of_the_kernel(batch: list[Case]) -> None:
    check(jpeg.decode, batch)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(cases(most=24), min_size=1, max_size=2))
def test_triton_has_the_bits_of_the_kernel(triton_decode: Decode, batch: list[Case]) -> None:
    check(triton_decode, batch)


def every_kind() -> list[Case]:
    """One picture of each sampling, with absurd and large values, in odd boxes."""
    pixels = picture(21, 37)
    files = [encode(pixels, kind, 92) for kind in ("444", "422", "420", "440", "gray")]
    files += [with_restarts(pixels, 80, 2), encode(noise(21, 37, 0), "444", 100)]
    files += [with_coarsest_steps(files[-1]), encode(edges(21, 37), "444", 100)]
    return [(data, (number % 4, 3, 17, 30 - number)) for number, data in enumerate(files)]


def test_torch_decodes_every_kind_in_one_batch() -> None:
    check(jpeg.decode, every_kind())


def test_triton_decodes_every_kind_in_one_batch(triton_decode: Decode) -> None:
    check(triton_decode, every_kind())


def test_pixels_are_those_of_pil() -> None:
    data = encode(picture(40, 56), "420", 85)
    read = read_coefficients([data], [(0, 0, 40, 56)])
    with PIL.Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(
        jpeg.decode(torch.from_numpy(read.packed), read).picture(0).numpy(), expected
    )


def test_the_result_does_not_refer_to_the_packed_buffer() -> None:
    read = read_coefficients([encode(picture(20, 20))], [(2, 3, 9, 8)])
    packed = torch.from_numpy(read.packed)
    result = jpeg.decode(packed, read)
    before = result.picture(0).clone(), result.table.clone(), result.host.copy()
    packed.zero_()
    assert torch.equal(result.picture(0), before[0])
    assert torch.equal(result.table, before[1])
    assert (result.host == before[2]).all()


def test_triton_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from penstock.image.on_device import jpeg_triton

    calls: list[Any] = []
    monkeypatch.setattr(jpeg_triton, "decode", lambda *given: calls.append(given))
    read = read_coefficients([encode(picture(9, 9))], [(0, 0, 9, 9)])
    packed = torch.from_numpy(read.packed)
    assert jpeg.decode(packed, read, backend="triton") is None
    assert jpeg.decode(packed, read).picture(0).shape == (9, 9, 3)
    assert len(calls) == 1


def test_no_pictures_are_fine(triton_decode: Decode) -> None:
    read = read_coefficients([b"no JPEG"], [(0, 0, 1, 1)])
    for decode in (jpeg.decode, triton_decode):
        assert len(decode(torch.from_numpy(read.packed), read)) == 0


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.image.on_device import jpeg_triton

types = {"table": "*i64", "steps": "*i16", "records": "*i32", "starts": "*i64", "data": "*u8",
         "order": "*i32", "planes": "*u8", "pixels": "*u8", "count": "constexpr"}
for kernel, count in ((jpeg_triton._blocks_to_samples, jpeg_triton.BLOCKS),
                      (jpeg_triton._samples_to_pixels, jpeg_triton.PIXELS)):
    signature = {name: types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"count": count})
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    print(len(compiled.asm["cubin"]) > 0)
"""


def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=500,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
