"""Decoding by the device alone: which library is chosen, and what happens to files it cannot read.

The libraries are stand-ins with the interface of torchcodec 0.17 and nvImageCodec 0.9. The last
test runs the real ones on a GPU.
"""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

from penstock import native
from penstock.errors import MissingExtraError, SourceError
from penstock.image import kernel
from tests.support.jpegs import encode, picture

torch: Any = pytest.importorskip("torch")
whole_jpeg: Any = pytest.importorskip("penstock.image.on_device.whole_jpeg")

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason="needs the kernel")

BOX = (3, 5, 20, 30)


def pixels(data: bytes) -> Any:
    """A picture as a library decodes it; RuntimeError if it is damaged."""
    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            return torch.from_numpy(np.array(image.convert("RGB")))
    except OSError as error:
        raise RuntimeError("nvJPEG cannot decode it") from error


def damaged(data: bytes) -> bytes:
    """Only a decoder that reads the data finds the damage: the header is whole."""
    return data[: len(data) // 2]


class StandIns:
    """torchcodec and nvImageCodec, as far as they are installed, and how they were called."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.calls: list[Any] = []
        patch.setitem(sys.modules, "torchcodec", None)
        patch.setitem(sys.modules, "nvidia", None)
        stream = SimpleNamespace(cuda_stream=77)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        patch.setattr(torch, "from_dlpack", lambda image: image)

    def install_torchcodec(self, version: str) -> None:
        def decode_jpeg(source: list[bytes], *, mode: str, device: Any) -> list[Any]:
            self.calls.append((len(source), mode, str(device)))
            return [pixels(one).permute(2, 0, 1) for one in source]

        package, decoders = ModuleType("torchcodec"), ModuleType("torchcodec.decoders")
        vars(package)["__version__"] = version
        vars(decoders)["decode_jpeg"] = decode_jpeg
        self._patch.setitem(sys.modules, "torchcodec", package)
        self._patch.setitem(sys.modules, "torchcodec.decoders", decoders)

    def install_nvimgcodec(self) -> None:
        calls = self.calls

        class CodeStream:
            def __init__(self, data: bytes) -> None:
                self.data, self.region = data, (0, 0, 0, 0)

            def get_sub_code_stream(self, *, region: tuple[int, int, int, int]) -> CodeStream:
                self.region = region
                return self

        class Decoder:
            def __init__(self, **options: Any) -> None:
                calls.append(options)

            def decode(self, streams: list[CodeStream], **options: Any) -> list[Any]:
                calls.append(options)
                return [self._one(stream) for stream in streams]

            def _one(self, stream: CodeStream) -> Any:
                top, left, bottom, right = stream.region
                try:
                    return pixels(stream.data)[top:bottom, left:right].contiguous()
                except RuntimeError:
                    return None

        package, library = ModuleType("nvidia"), ModuleType("nvidia.nvimgcodec")
        vars(library).update(
            CodeStream=CodeStream,
            Decoder=Decoder,
            DecodeParams=lambda **options: options,
            Region=lambda *corners: corners,
        )
        vars(package)["nvimgcodec"] = library
        self._patch.setitem(sys.modules, "nvidia", package)
        self._patch.setitem(sys.modules, "nvidia.nvimgcodec", library)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(monkeypatch)


def test_torchcodec_is_preferred(installed: StandIns) -> None:
    installed.install_nvimgcodec()
    installed.install_torchcodec("0.17.0+cu130")
    assert isinstance(whole_jpeg.library(torch.device("cuda")), whole_jpeg.TorchCodec)


def test_nvimgcodec_is_taken_if_torchcodec_is_too_old(installed: StandIns) -> None:
    installed.install_torchcodec("0.9.1")
    installed.install_nvimgcodec()
    library = whole_jpeg.library(torch.device("cuda", 1))
    assert isinstance(library, whole_jpeg.NvImageCodec)
    assert installed.calls == [{"device_id": 1, "options": ":fancy_upsampling=1"}]


def test_without_a_library_the_error_names_the_commands(installed: StandIns) -> None:
    installed.install_torchcodec("0.16")
    with pytest.raises(MissingExtraError) as raised:
        whole_jpeg.library(torch.device("cuda"))
    message = str(raised.value)
    assert "pip install torchcodec" in message
    assert "pip install nvidia-nvimgcodec-cu12[all]" in message
    assert "torchcodec 0.16 is older than 0.17" in message


@pytest.mark.parametrize("name", ["torchcodec", "nvimgcodec"])
def test_boxes_are_decoded_and_the_rest_is_left_to_the_cpu(installed: StandIns, name: str) -> None:
    if name == "torchcodec":
        installed.install_torchcodec("0.17")
    else:
        installed.install_nvimgcodec()
    by = whole_jpeg.library(torch.device("cuda"))
    good = [encode(picture(40, 50, seed), kind) for seed, kind in ((0, "420"), (1, "gray"))]
    files = [good[0], damaged(good[0]), b"no JPEG", encode(picture(40, 50), "cmyk"), good[1]]
    files.append(encode(picture(10, 50)))
    result, numbers, errors = whole_jpeg.decode(files, [BOX] * len(files), by)
    assert numbers == [0, 4]
    assert [type(error) for error in errors] == [
        type(None),
        *[kernel.Unsupported] * 3,
        type(None),
        kernel.Unsupported,
    ]
    top, left, height, width = BOX
    for place, number in enumerate(numbers):
        whole = pixels(files[number])
        expected = whole[top : top + height, left : left + width]
        assert torch.equal(result.picture(place), expected)
    assert result.host[:, 1:].tolist() == [[height, width, top, left]] * 2


def test_torchcodec_gets_one_list_unless_a_file_fails(installed: StandIns) -> None:
    installed.install_torchcodec("0.17")
    by = whole_jpeg.library(torch.device("cuda"))
    good = encode(picture(40, 50))
    whole_jpeg.decode([good] * 3, [BOX] * 3, by)
    assert installed.calls == [(3, "RGB", "cuda")]
    whole_jpeg.decode([good, damaged(good)], [BOX] * 2, by)
    assert [count for count, *_ in installed.calls] == [3, 2, 1, 1]


def test_nvimgcodec_decodes_on_the_current_stream_and_keeps_the_orientation(
    installed: StandIns,
) -> None:
    installed.install_nvimgcodec()
    by = whole_jpeg.library(torch.device("cuda"))
    whole_jpeg.decode([encode(picture(40, 50))], [BOX], by)
    assert installed.calls[-1] == {
        "params": {"apply_exif_orientation": False},
        "cuda_stream": 77,
    }


def test_a_picture_of_another_size_is_not_accepted() -> None:
    class Turned:
        def decode(self, files: list[bytes], boxes: list[Any]) -> list[Any]:
            return [torch.zeros((30, 20, 3), dtype=torch.uint8)] * len(files)

    result, numbers, errors = whole_jpeg.decode([encode(picture(40, 50))], [BOX], Turned())
    assert (result, numbers) == (None, [])
    assert "not to 20 x 30 pixels" in str(errors[0])


def test_a_file_without_a_whole_header_has_the_error_of_the_cpu() -> None:
    cut = encode(picture(40, 50))[:30]
    _, _, errors = whole_jpeg.decode([cut], [BOX], None)
    assert isinstance(errors[0], SourceError)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_pixels_of_the_gpu_are_within_the_tolerance() -> None:
    by = whole_jpeg.library(torch.device("cuda"))
    files = [encode(picture(200, 300, seed)) for seed in range(4)]
    box = (10, 20, 150, 220)
    result, numbers, _ = whole_jpeg.decode(files, [box] * 4, by)
    assert numbers == [0, 1, 2, 3]
    for number, file in enumerate(files):
        out = np.empty((150, 220, 3), np.uint8)
        kernel.region(file, box, out)
        difference = np.abs(result.picture(number).cpu().numpy().astype(int) - out.astype(int))
        assert difference.mean() <= whole_jpeg.TOLERANCE
