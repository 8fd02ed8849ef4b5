"""Fuzz the image decoders: scripts/fuzz-images [--inputs 5000] [--seed 0] [--jobs 2].

Makes small good files of every format that decode() reads, damages copies of them, and gives every
copy to PIL and to each way in which Penstock decodes: with and without the compiled kernel, alone
and fused with a crop or a resize. Fails if Penstock accepts a file that PIL refuses, if its ways
disagree, if a process dies or hangs, or if a decoder writes to stderr. Good files must decode.

An input depends on --seed and its number only. Inputs with a finding are saved in the folder that
--findings names; --first N --inputs 1 repeats input N.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CHUNK = 500
"""Inputs of one process: a process that has died costs no more than this many results."""

HANGS_AFTER = 120.0
"""Seconds for one input. Inputs take milliseconds; this guards against a decoder that hangs."""

PIXELS = 1 << 20
"""The limit for damaged headers, so that a large stated size does not slow the fuzzer down."""

Pixels = NDArray[np.uint8]


# ------------------------------------------------------------------------------- good files


def picture(height: int, width: int, seed: int) -> Pixels:
    rng = np.random.default_rng(seed)
    down, right = np.mgrid[0:height, 0:width]
    waves = [np.sin(down / (5 + c) + c) * 60 + np.cos(right / (7 - c)) * 50 + 128 for c in range(3)]
    noise = rng.normal(0, 8, (height, width, 3))
    out: Pixels = np.clip(np.dstack(waves) + noise, 0, 255).astype(np.uint8)
    return out


def saved(image: PIL.Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def png(levels: NDArray[Any], *, interlaced: bool = False) -> bytes:
    """A PNG of 8 or 16 bits, with passes of rows if it is interlaced; PIL writes none of these."""
    height, width, channels = levels.shape
    samples = levels.astype(">u2") if levels.dtype == np.uint16 else levels
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4)]
        passes += [(2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    rows = b"".join(
        b"\0" + row.tobytes()
        for top, left, down, right in passes
        for row in samples[top::down, left::right]
        if row.size
    )
    bits = 16 if levels.dtype == np.uint16 else 8
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, int(interlaced))
    data = zlib.compress(rows)
    parts = [chunk(b"IHDR", header)]
    parts += [chunk(b"IDAT", data[i : i + 700]) for i in range(0, len(data), 700)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def tiled_tiff(levels: Pixels, side: int = 32) -> bytes:
    """An uncompressed grey TIFF in tiles, big-endian: PIL writes neither."""
    height, width = levels.shape
    down, right = -(-height // side), -(-width // side)
    padded = np.zeros((down * side, right * side), np.uint8)
    padded[:height, :width] = levels
    count = down * right
    first = 8 + 2 + 12 * 11 + 4
    offsets = first + 8 * count
    entries = [(256, 3, 1, width << 16), (257, 3, 1, height << 16), (258, 3, 1, 8 << 16)]
    entries += [(259, 3, 1, 1 << 16), (262, 3, 1, 1 << 16), (277, 3, 1, 1 << 16)]
    entries += [(284, 3, 1, 1 << 16), (322, 3, 1, side << 16), (323, 3, 1, side << 16)]
    entries += [(324, 4, count, first), (325, 4, count, first + 4 * count)]
    out = b"MM\0*" + struct.pack(">IH", 8, len(entries))
    out += b"".join(struct.pack(">HHII", *entry) for entry in entries) + bytes(4)
    out += struct.pack(f">{count}I", *(offsets + side * side * i for i in range(count)))
    out += struct.pack(f">{count}I", *[side * side] * count)
    tiles = padded.reshape(down, side, right, side).swapaxes(1, 2)
    return out + bytes(tiles.tobytes())


def rle_bmp(levels: Pixels) -> bytes:
    """An 8-bit BMP, run-length encoded: PIL reads these and does not write them."""
    height, width = levels.shape
    data = b""
    for row in levels[::-1]:
        for level in row[: width // 2]:
            data += bytes([1, level])
        rest = row[width // 2 :].tobytes()
        data += bytes([0, len(rest)]) + rest + bytes(len(rest) % 2) + b"\0\0"
    data = data[:-2] + b"\0\1"
    palette = b"".join(bytes([i, 255 - i, i // 2, 0]) for i in range(256))
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    begin = 14 + len(info) + len(palette)
    file = b"BM" + struct.pack("<IHHI", begin + len(data), 0, 0, begin)
    return file + info + palette + data


def good_files() -> dict[str, bytes]:
    """Small files of every kind that decode() reads."""
    exif = PIL.Image.Exif()
    exif[0x112] = 6
    large, small, odd = picture(48, 64, 1), picture(16, 24, 2), picture(33, 21, 3)
    rgb, tiny = PIL.Image.fromarray(large), PIL.Image.fromarray(small)
    grey = rgb.convert("L")
    bilevel = grey.convert("1")
    palette = rgb.quantize(40)
    alpha = rgb.copy()
    alpha.putalpha(grey)
    frames = [PIL.Image.fromarray(picture(20, 28, seed)) for seed in (4, 5, 6)]
    quantized = [frame.quantize(32) for frame in frames]
    deep = large.astype(np.uint16) * 257 + 3
    return {
        "jpeg 420": saved(rgb, "JPEG", quality=80),
        "jpeg 444": saved(PIL.Image.fromarray(odd), "JPEG", quality=90, subsampling=0),
        "jpeg 422 optimized": saved(rgb, "JPEG", quality=60, subsampling=1, optimize=True),
        "jpeg grey": saved(grey, "JPEG", quality=80),
        "jpeg cmyk": saved(rgb.convert("CMYK"), "JPEG", quality=80),
        "jpeg rgb": saved(rgb, "JPEG", quality=80, keep_rgb=True),
        "jpeg restart": saved(rgb, "JPEG", quality=80, restart_marker_blocks=3),
        "jpeg exif": saved(rgb, "JPEG", exif=exif, comment=b"words", icc_profile=bytes(90)),
        "jpeg progressive": saved(rgb, "JPEG", quality=80, progressive=True),
        "jpeg progressive grey": saved(grey, "JPEG", quality=80, progressive=True),
        "jpeg progressive cmyk": saved(rgb.convert("CMYK"), "JPEG", progressive=True),
        "jpeg progressive restart": saved(rgb, "JPEG", progressive=True, restart_marker_rows=1),
        "png rgb": saved(rgb, "PNG"),
        "png small": saved(tiny, "PNG", exif=exif),
        "png grey": saved(grey, "PNG"),
        "png palette": saved(palette, "PNG"),
        "png palette 4 bits": saved(rgb.quantize(12), "PNG", bits=4),
        "png palette transparent": saved(palette, "PNG", transparency=3),
        "png rgba": saved(alpha, "PNG"),
        "png grey alpha": saved(alpha.convert("LA"), "PNG"),
        "png 1 bit": saved(bilevel, "PNG"),
        "png 16 bits": png(deep),
        "png 16 bits grey": png(deep[:, :, :1]),
        "png interlaced": png(large, interlaced=True),
        "png interlaced rgba": png(np.dstack([odd, odd[:, :, :1]]), interlaced=True),
        "png animated": saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "webp": saved(rgb, "WEBP", quality=70),
        "webp small": saved(tiny, "WEBP", quality=40),
        "webp lossless": saved(rgb, "WEBP", lossless=True),
        "webp alpha": saved(alpha, "WEBP", quality=70),
        "webp alpha lossless": saved(alpha, "WEBP", lossless=True),
        "webp exif": saved(rgb, "WEBP", exif=exif, icc_profile=bytes(90)),
        "webp animated": saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": saved(palette, "GIF"),
        "gif grey": saved(grey, "GIF"),
        "gif small": saved(tiny.quantize(5), "GIF", interlace=0, comment=b"words"),
        "gif transparent": saved(palette, "GIF", transparency=3),
        "gif animated": saved(quantized[0], "GIF", save_all=True, append_images=quantized[1:]),
        "bmp": saved(rgb, "BMP"),
        "bmp grey": saved(grey, "BMP"),
        "bmp palette": saved(palette, "BMP"),
        "bmp 1 bit": saved(bilevel, "BMP"),
        "bmp rgba": saved(alpha, "BMP"),
        "bmp run lengths": rle_bmp(np.asarray(grey)),
        "tiff": saved(rgb, "TIFF"),
        "tiff grey": saved(grey, "TIFF"),
        "tiff palette": saved(palette, "TIFF"),
        "tiff rgba": saved(alpha, "TIFF"),
        "tiff 16 bits": saved(PIL.Image.fromarray(deep[:, :, 0]), "TIFF"),
        "tiff lzw": saved(rgb, "TIFF", compression="tiff_lzw"),
        "tiff deflate": saved(rgb, "TIFF", compression="tiff_adobe_deflate"),
        "tiff deflate grey": saved(grey, "TIFF", compression="tiff_adobe_deflate"),
        "tiff predicted": saved(rgb, "TIFF", compression="tiff_lzw", tiffinfo={317: 2}),
        "tiff strips": saved(rgb, "TIFF", compression="tiff_lzw", tiffinfo={278: 8}),
        "tiff packbits": saved(rgb, "TIFF", compression="packbits"),
        "tiff jpeg": saved(rgb, "TIFF", compression="jpeg"),
        "tiff group 4": saved(bilevel, "TIFF", compression="group4"),
        "tiff group 4 strips": saved(bilevel, "TIFF", compression="group4", tiffinfo={278: 8}),
        "tiff group 3": saved(bilevel, "TIFF", compression="group3"),
        "tiff group 3 2d": saved(bilevel, "TIFF", compression="group3", tiffinfo={292: 1}),
        "tiff group 3 no ends": saved(bilevel, "TIFF", compression="tiff_ccitt"),
        "tiff 1 bit": saved(bilevel, "TIFF"),
        "tiff tiles": tiled_tiff(np.asarray(grey)),
    }


# ------------------------------------------------------------------------------- damage

TELLING = (0, 1, 2, 3, 4, 7, 8, 16, 17, 0x22, 0x41, 63, 64, 127, 128, 254, 255)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]
    if data[:2] == b"\xff\xd8" and rng.random() < 0.3:
        data += b"\xff\xd9"


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[place(data, rng)] ^= 1 << rng.randrange(8)


def set_bytes(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 4))):
        data[place(data, rng)] = rng.choice((rng.choice(TELLING), rng.randrange(256)))


def insert_marker(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    marker = bytes([0xFF, rng.choice((rng.randrange(256), rng.randrange(0xC0, 0xFF)))])
    data[at : at + rng.choice((0, 2))] = marker


def repeat_block(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at:at] = data[at : at + rng.choice((1, 3, 30, 200))]


def remove_block(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 2, 7, 60, 300))]


def append_file(data: bytearray, rng: random.Random) -> None:
    """An upload that broke off and was started again, or another file behind this one."""
    other = rng.choice(tuple(FILES.values())) if rng.random() < 0.5 else bytes(data)
    if rng.random() < 0.7:
        del data[rng.randrange(len(data)) :]
    data += other


def wrong_number(data: bytearray, rng: random.Random) -> None:
    """Another length, offset or size, in the header most of the time."""
    at = min(rng.randrange(len(data)), rng.randrange(64))
    size = rng.choice((2, 4))
    number = rng.choice((0, 1, 2, 13, 255, 256, 1000, 0x7FFF, 0xFFFF, rng.randrange(1 << 16)))
    data[at : at + size] = number.to_bytes(size, rng.choice(("big", "little")))


def zero_range(data: bytearray, rng: random.Random) -> None:
    at, count = place(data, rng), rng.choice((1, 4, 40, 400))
    count = min(count, len(data) - at)
    data[at : at + count] = bytes(count)


def noise(data: bytearray, rng: random.Random) -> None:
    at = place(data, rng)
    count = min(rng.choice((4, 16, 64)), len(data) - at)
    data[at : at + count] = rng.randbytes(count)


def stray_bytes(data: bytearray, rng: random.Random) -> None:
    at = rng.choice((rng.randrange(len(data)), max(0, len(data) - 2), len(data)))
    data[at:at] = rng.choice((bytes(5), rng.randbytes(9)))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    truncate,
    flip_bits,
    set_bytes,
    insert_marker,
    repeat_block,
    remove_block,
    append_file,
    wrong_number,
    zero_range,
    noise,
    stray_bytes,
)


def place(data: bytearray, rng: random.Random) -> int:
    """A position, in the first 200 bytes half of the time."""
    return rng.randrange(min(len(data), 200) if rng.random() < 0.5 else len(data))


def with_checksums(data: bytearray) -> bytearray:
    """A PNG with the right checksum in every chunk: damage then reaches the decoder behind it."""
    at = 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        end = at + 8 + length
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return data


FILES = good_files()


def make_input(seed: int, number: int) -> tuple[str, str, bytes]:
    """The name of a good file, the name of its damage, and the damaged copy."""
    rng = random.Random(f"{seed}/{number}")
    name = rng.choice(tuple(FILES))
    data = bytearray(FILES[name])
    damage = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        mutation = rng.choice(MUTATIONS)
        if len(data):
            mutation(data, rng)
        damage.append(mutation.__name__)
    if name.startswith("png") and rng.random() < 0.5:
        data = with_checksums(data)
    return name, "+".join(damage), bytes(data)


# ------------------------------------------------------------------------------- one input


@dataclass
class Ways:
    """Every way in which Penstock decodes an image file."""

    def __init__(self) -> None:
        from penstock import native

        self.native = native
        self.has_kernel = native.kernel_available()

    def settings(self) -> Iterator[str]:
        for setting in ("kernel", "no kernel") if self.has_kernel else ("no kernel",):
            self.native._switched_off = partial(bool, setting == "no kernel")
            yield setting

    def alone(self, data: bytes, mode: str = "rgb") -> Pixels | None:
        """The pixels, or ``None`` if the file is refused."""
        from penstock.errors import SourceError
        from penstock.image import decode

        try:
            pixels: Pixels = decode(mode, max_pixels=PIXELS).apply(data, None)
        except SourceError as error:
            check_message(error)
            return None
        return pixels

    def fused(self, data: bytes, framing: Any) -> Pixels | None:
        from penstock.errors import SourceError
        from penstock.image import decode
        from penstock.image.fused import Fused
        from penstock.keyed import Keys
        from penstock.stats import Tally
        from penstock.stops.stop import StageFailure, StepContext

        stop = Fused(decode(max_pixels=PIXELS), (framing,), None, None, (0, 1))
        try:
            found: list[Pixels] = stop.step(StepContext(0, Tally(1, 0)))(
                Keys(0, [0]), lambda _: [data]
            )
        except StageFailure as failure:
            if not isinstance(failure.__cause__, SourceError):
                raise
            check_message(failure.__cause__)
            return None
        return found[0]


def check_message(error: Exception) -> None:
    if "decode" not in str(error):
        raise AssertionError(f"an error that does not say what failed: {error}")


def accepted_by_pil(data: bytes) -> bool:
    """Whether PIL opens and loads a file of a format that decode() reads."""
    formats = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            PIL.Image.open(io.BytesIO(data), formats=formats).load()
    except Exception:
        return False
    return True


def stated_size(data: bytes) -> tuple[int, int]:
    from penstock.image import formats

    try:
        view = memoryview(data)
        size: tuple[int, int] = formats.identify(view).size(view)
    except (formats.Damaged, IndexError):
        return 24, 24
    return size if size[0] * size[1] < PIXELS else (24, 24)


def judge(ways: Ways, data: bytes, *, good: bool = False) -> dict[str, Any]:
    """What PIL and every way of Penstock do with a file."""
    from penstock.image import center_crop, resize

    refused_by_pil = not accepted_by_pil(data)
    accepting: list[str] = []
    disagreements: list[str] = []
    plain: dict[str, Pixels | None] = {}
    noisy_before = os.fstat(2).st_size
    for setting in ways.settings():
        whole = plain[setting] = ways.alone(data)
        gray = ways.alone(data, "gray")
        height, width = stated_size(data) if whole is None else whole.shape[:2]
        upper = (max(1, height // 2), max(1, width // 3))
        results = {
            "gray": (gray, None),
            "whole": (ways.fused(data, center_crop((height, width))), whole),
            "crop": (ways.fused(data, center_crop(upper)), None),
            "resize": (ways.fused(data, resize((max(1, height // 5), max(1, width // 5)))), None),
        }
        if whole is not None:
            top, left = round((height - upper[0]) / 2.0), round((width - upper[1]) / 2.0)
            part = whole[top : top + upper[0], left : left + upper[1]]
            results["crop"] = (results["crop"][0], part)
            accepting.append(f"plain, {setting}")
        for way, (found, expected) in results.items():
            if found is not None:
                accepting.append(f"{way}, {setting}")
            if found is None and whole is not None:
                disagreements.append(f"{way}, {setting} refuses, decode alone does not")
            # A crop may not see damage below it, if it is of a kind that PIL accepts too.
            elif found is not None and whole is None and way != "crop":
                disagreements.append(f"{way}, {setting} accepts, decode alone does not")
            elif (
                found is not None
                and expected is not None
                # The kernel clips absurd values of damaged tables and pixels in another way.
                and (good or setting == "no kernel")
                and not np.array_equal(found, expected)
            ):
                disagreements.append(f"{way}, {setting} has other pixels")
    first, *others = plain.values()
    for other in others:
        if (first is None) != (other is None):
            disagreements.append("decode alone depends on the kernel")
        elif first is not None and other is not None and not np.array_equal(first, other):
            disagreements.append("pixels of decode alone depend on the kernel")
    ours = any(pixels is not None for pixels in plain.values())
    noise_bytes = os.fstat(2).st_size - noisy_before
    return {
        "pil": not refused_by_pil,
        "ours": ours,
        "only ours": accepting if refused_by_pil else [],
        "disagree": disagreements,
        "noise": noise_bytes,
    }


def work(seed: int, first: int, count: int) -> None:
    """The program of one process: a line of JSON for each input."""
    ways = Ways()
    for number in range(first, first + count):
        print(json.dumps({"begin": number}), flush=True)
        name, damage, data = make_input(seed, number)
        try:
            result = judge(ways, data)
        except Exception as error:
            result = {"crash": f"{type(error).__name__}: {error}"}
        print(json.dumps({"number": number, "file": name, "damage": damage, **result}), flush=True)


# ------------------------------------------------------------------------------- all inputs


@dataclass(frozen=True)
class Finding:
    number: int
    kind: str
    what: str


def run_chunk(seed: int, first: int, count: int) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Judge inputs in a process of their own; after a crash, continue in a new one."""
    results: list[dict[str, Any]] = []
    findings: list[Finding] = []
    end = first + count
    while first < end:
        begun = first
        with tempfile.TemporaryFile() as noise_file:
            command = [sys.executable, __file__, "--worker", "--seed", str(seed)]
            command += ["--first", str(first), "--inputs", str(end - first)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise_file)
            for line in lines_until_hang(process):
                message = json.loads(line)
                if "begin" in message:
                    begun = message["begin"]
                else:
                    results.append(message)
                    begun += 1
            code = process.wait()
            if begun >= end and code == 0:
                break
            noise_file.seek(0)
            last = noise_file.read()[-300:].decode(errors="replace")
        findings.append(Finding(begun, "crash", f"the process ended with {code}: {last}"))
        first = begun + 1
    return results, findings


def lines_until_hang(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The lines that a process prints. Kills it if it prints none for too long."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(HANGS_AFTER):
                process.kill()
                return
            read = os.read(descriptor, 1 << 16)
            if not read:
                return
            *lines, pending = (pending + read).split(b"\n")
            yield from lines


def findings_of(result: dict[str, Any]) -> list[Finding]:
    number = result["number"]
    if "crash" in result:
        return [Finding(number, "crash", result["crash"])]
    found = [Finding(number, "PIL refuses only", way) for way in result["only ours"][:1]]
    found += [Finding(number, "paths disagree", what) for what in result["disagree"][:1]]
    if result["noise"]:
        found.append(Finding(number, "noise on stderr", f"{result['noise']} bytes"))
    return found


def check_good_files() -> list[str]:
    """Good files that are refused, or whose ways disagree."""
    ways = Ways()
    problems = []
    for name, data in FILES.items():
        result = judge(ways, data, good=True)
        if not result["pil"] or not result["ours"] or result["disagree"]:
            problems.append(f"good file {name}: {result}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-images-findings"))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seed, options.first, options.inputs)
        return 0
    start = time.monotonic()
    problems = check_good_files()
    counts: Counter[str] = Counter()
    by_format: Counter[tuple[str, str]] = Counter()
    findings: list[Finding] = []
    chunks = [
        (options.seed, first, min(CHUNK, options.first + options.inputs - first))
        for first in range(options.first, options.first + options.inputs, CHUNK)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for results, crashes in pool.map(lambda part: run_chunk(*part), chunks):
            findings += crashes
            for result in results:
                findings += findings_of(result)
                if "crash" in result:
                    continue
                verdict = {
                    (True, True): "both accept",
                    (False, False): "both refuse",
                    (True, False): "we refuse only",
                    (False, True): "PIL refuses only",
                }[result["pil"], result["ours"]]
                by_format[result["file"].split()[0], verdict] += 1
                counts[verdict] += verdict != "PIL refuses only"
    counts.update(dict.fromkeys(("crash", "noise on stderr"), 0))
    counts.update(finding.kind for finding in findings)
    report(options, counts, by_format, findings, problems, time.monotonic() - start)
    return int(bool(findings or problems))


def report(
    options: argparse.Namespace,
    counts: Counter[str],
    by_format: Counter[tuple[str, str]],
    findings: list[Finding],
    problems: list[str],
    seconds: float,
) -> None:
    rows = ["both accept", "both refuse", "we refuse only"]
    rows += ["PIL refuses only", "paths disagree", "crash", "noise on stderr"]
    formats = sorted({kind for kind, _ in by_format})
    print(f"{'':18}{'all':>8}" + "".join(f"{kind:>8}" for kind in formats))
    print(f"{'inputs':18}{options.inputs:8}")
    for row in rows:
        parts = "".join(f"{by_format[kind, row]:8}" for kind in formats)
        print(f"{row:18}{counts[row]:8}{parts if row in rows[:4] else ''}")
    print(f"{'good files':18}{len(FILES):8}, {len(problems)} with problems; {seconds:.0f} seconds")
    for problem in problems:
        print(problem)
    if findings:
        options.findings.mkdir(parents=True, exist_ok=True)
    for finding in findings:
        name, damage, data = make_input(options.seed, finding.number)
        place = options.findings / f"{options.seed}-{finding.number}"
        place.write_bytes(data)
        print(f"{finding.kind}: {place} ({name}, {damage}): {finding.what}")


if __name__ == "__main__":
    sys.exit(main())
