"""Encodings: a stored sample is decoded exactly, or within the stated tolerance."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.errors import MissingExtraError, PipelineError
from penstock.store import encoding as encodings
from penstock.store.encoding import Encoding
from penstock.store.plain import pack_sample

Pair = namedtuple("Pair", "image label")

EXACT = ["raw", "lossless"]
ALL = [*EXACT, "jpeg", "jpeg:80"]


def picture(height: int = 120, width: int = 160, channels: int = 3) -> Any:
    """Gradients, edges in light and colour, and a little noise: as hard as a photograph."""
    y, x = np.mgrid[:height, :width]
    planes = [
        100 + 50 * np.sin(x / (17 + 5 * c) + y / 29) + 100 * (x > y + 20 * c)
        for c in range(channels)
    ]
    noise = np.random.default_rng(0).normal(0, 1, (height, width, 1))
    return (np.stack(planes, axis=-1) + noise).clip(0, 255).astype(np.uint8)


def same(one: Any, other: Any) -> bool:
    """Whether two samples are equal in every bit, type and container."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(
            one.dtype == other.dtype
            and one.shape == other.shape
            and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


images = hnp.arrays(
    np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 3]))
)
arrays = hnp.arrays(
    st.one_of(
        hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(), st.just(bool)
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
)
leaves = st.one_of(
    images, arrays, st.integers(), st.text(max_size=5), st.binary(max_size=40), st.none()
)
samples = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
        st.tuples(children, children).map(Pair._make),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None)
@given(sample=samples)
def test_raw_and_lossless_restore_every_bit_of_any_sample(name: str, sample: Any) -> None:
    encoding = Encoding(name)
    assert same(encoding.decode(encoding.encode(sample)), sample)
    assert same(encoding.decode(bytes(encoding.encode(sample))), sample)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["picture", "noise", "black", "white", "turned", "cut"])
def test_lossless_restores_every_bit_of_images(kind: str, channels: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, channels), dtype=np.uint8)
    images: dict[str, Any] = {
        "picture": picture(channels=channels),
        "noise": noise,
        "black": np.zeros((50, 70, channels), np.uint8),
        "white": np.full((700, 500, channels), 255, np.uint8),
        "turned": picture(channels=channels).transpose(1, 0, 2),
        "cut": picture(channels=channels)[::-2, 3:77],
    }
    image = images[kind]
    encoding = Encoding("lossless")
    assert same(encoding.decode(encoding.encode(image)), image)


def test_jpeg_changes_images_by_a_few_levels_and_nothing_else() -> None:
    mask = np.arange(120 * 160).reshape(120, 160) % 7
    sample = {
        "image": picture(),
        "grey": picture(channels=1),
        "mask": mask.astype(np.uint8),
        "alpha": picture(channels=4),
        "float": picture().astype(np.float32),
        "label": 3,
    }
    found = Encoding("jpeg").decode(Encoding("jpeg").encode(sample))
    for name in ("image", "grey"):
        assert found[name].shape == sample[name].shape
        assert found[name].dtype == np.uint8
        off = np.abs(found[name].astype(int) - sample[name])
        assert 0 < off.mean() < 1.5
        assert off.max() < 30
    for name in ("mask", "alpha", "float", "label"):
        assert same(found[name], sample[name])


@given(images)
@settings(deadline=None, max_examples=50)
def test_jpeg_keeps_shape_and_type_of_any_image(image: Any) -> None:
    found = Encoding("jpeg").decode(Encoding("jpeg").encode(image))
    assert (found.shape, found.dtype) == (image.shape, image.dtype)


@pytest.mark.parametrize("name", ["jpeg", "jpeg:80"])
def test_equal_images_have_equal_encodings(name: str) -> None:
    encoding = Encoding(name)
    assert encoding.encode(picture()) == encoding.encode(picture().copy())


def test_stronger_encodings_and_lower_qualities_take_fewer_bytes() -> None:
    raw, lossless, good, poor = (
        len(Encoding(name).encode(picture(240, 320)))
        for name in ("raw", "lossless", "jpeg", "jpeg:50")
    )
    assert poor < good < lossless < raw


def test_an_image_that_does_not_become_smaller_is_stored_unchanged() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    for name in ("lossless", "jpeg:100"):
        assert Encoding(name).encode(noise) == pack_sample(noise).tobytes()


def test_images_too_large_for_an_encoding_are_stored_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encodings, "_JPEG_SIDE", 150)
    monkeypatch.setattr(encodings, "_LOSSLESS_PIXELS", 1000)
    image = picture()
    for name in ("lossless", "jpeg"):
        assert Encoding(name).encode(image) == pack_sample(image).tobytes()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pil_images_are_decoded_as_pil_images(name: str, mode: str) -> None:
    pixels = picture(channels=3 if mode == "RGB" else 1)
    image = PIL.Image.fromarray(pixels if mode == "RGB" else pixels[:, :, 0])
    image.info["dpi"] = (72, 72)
    encoding = Encoding(name)
    kept = encoding.encode((image, 5))
    found, label = encoding.decode(kept)
    assert type(found) is PIL.Image.Image
    assert (found.mode, found.size, found.info, label) == (mode, (160, 120), image.info, 5)
    off = np.abs(np.asarray(found).astype(int) - np.asarray(image))
    assert off.mean() < 3
    assert (off.max() == 0) is not encoding.lossy
    assert name == "raw" or len(kept) < 0.9 * len(Encoding("raw").encode((image, 5)))


@pytest.mark.parametrize("mode", ["RGBA", "P", "I;16"])
def test_pil_images_of_other_modes_are_stored_unchanged(mode: str) -> None:
    image = PIL.Image.new(mode, (30, 20), 7 if mode != "RGBA" else (1, 2, 3, 4))
    found = Encoding("jpeg").decode(Encoding("jpeg").encode(image))
    assert (found.mode, found.tobytes()) == (mode, image.tobytes())


def test_other_containers_keep_their_type_and_content() -> None:
    sample = OrderedDict(image=picture(), label=1)
    found = Encoding("jpeg").decode(Encoding("jpeg").encode(sample))
    assert type(found) is OrderedDict
    assert same(found["image"], sample["image"])


@pytest.mark.parametrize("name", ALL)
def test_a_decoded_sample_may_be_changed_without_changing_another(name: str) -> None:
    sample = (picture(), np.arange(5.0))
    encoding = Encoding(name)
    kept = bytes(encoding.encode(sample))
    first, second = encoding.decode(kept), encoding.decode(kept)
    before = [part.copy() for part in second]
    for part in first:
        part += 1
    assert all(map(same, second, before))
    assert all(map(same, encoding.decode(kept), before))


@pytest.mark.parametrize(
    "name", ["png", "RAW", "", "jpeg:", "jpeg:0", "jpeg:101", "jpeg:9.5", "raw:3", None, 95]
)
def test_an_unknown_encoding_is_an_error_that_lists_the_known_ones(name: Any) -> None:
    with pytest.raises(PipelineError, match=r'"raw".*"lossless".*"jpeg".*"jpeg:90"') as found:
        Encoding(name)
    assert repr(name) in str(found.value)


def test_only_jpeg_is_lossy() -> None:
    assert [name for name in ALL if Encoding(name).lossy] == ["jpeg", "jpeg:80"]
    assert pickle.loads(pickle.dumps(Encoding("jpeg:80"))) == Encoding("jpeg:80")


def test_lossless_without_pyarrow_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encodings._zstd.cache_clear()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"lossless.*penstock\[parquet\]"):
        Encoding("lossless").encode(picture())
    encodings._zstd.cache_clear()


def test_raw_needs_no_image_library() -> None:
    # Samples need not contain images: reading the store must not load OpenCV then.
    code = (
        "import sys; from penstock.store.encoding import Encoding; import numpy as np;"
        "e = Encoding('raw'); e.decode(e.encode(np.zeros((4, 4, 3), np.uint8)));"
        "print(sorted({'cv2', 'simplejpeg', 'pyarrow', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
