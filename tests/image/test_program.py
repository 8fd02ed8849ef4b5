"""The compiled kernel draws the parameters that the operations draw in Python, and finds files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import image, native
from penstock.errors import PipelineError
from penstock.image.augment import NUMBERS
from penstock.image.geometry import Frame
from penstock.image.program import ImageWork
from penstock.keyed import Key, Keyed
from penstock.source.files import FilesSource
from penstock.source.folder import FolderSource
from penstock.source.source import Source

pytestmark = pytest.mark.skipif(not native.kernel_available(), reason=native.why_no_kernel())

FRAMINGS: list[list[Any]] = [
    [image.random_resized_crop(32)],
    [image.random_resized_crop((20, 50), scale=(0.5, 0.6), ratio=(0.1, 9.0))],
    [image.resize(40), image.center_crop(32)],
    [image.resize((30, 50)), image.random_crop((7, 9))],
    [image.center_crop((64, 31))],
    [image.random_crop(32)],
]
AUGMENTS: list[Any] = [
    image.rand_augment(5, 9),
    image.rand_augment(2, 30),
    image.auto_augment("imagenet"),
    image.auto_augment("cifar10"),
    image.trivial_augment(),
    image.trivial_augment(bins=7),
]


@settings(max_examples=160, deadline=None)
@given(
    st.sampled_from(FRAMINGS),
    st.sampled_from(AUGMENTS),
    st.floats(0, 1),
    st.integers(1, 700),
    st.integers(1, 700),
    st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 9)),
    st.integers(0, 2**63 - 1),
)
def test_the_kernel_draws_what_the_operations_draw(
    framing: list[Any],
    augment: Any,
    chance: float,
    rows: int,
    columns: int,
    place: tuple[int, int, int],
    seed: int,
) -> None:
    keyed = [Keyed(seed, f"map/{number}") for number in range(len(framing) + 2)]
    flip, key = image.random_flip(chance), Key(*place)
    program = ImageWork(
        decodes=True,
        most_pixels=10**9,
        framing=tuple(one.for_kernel(k.key) for one, k in zip(framing, keyed, strict=False)),
        flip=(flip.p, keyed[-2].key),
        augment=augment.for_kernel(keyed[-1].key),
    ).program()
    drawn = program.draw(*place, rows, columns)
    frame: Frame | None = Frame.of(rows, columns)
    for operation, source in zip(framing, keyed, strict=False):
        try:
            shape = (*frame.size, 3) if frame is not None else (0, 0, 3)
            params = operation.draw(source.at(key), shape) if operation.random else None
        except PipelineError:  # too small for the crop: Python raises the error
            frame = None
        frame = None if frame is None else operation.frame(frame, params)
        if frame is None:
            assert drawn is None
            return
    assert frame is not None
    steps = augment.draw(keyed[-1].at(key), (*frame.size, 3))
    assert drawn == (
        tuple(frame.box),
        frame.full,
        tuple(frame.part),
        flip.draw(keyed[-2].at(key), (*frame.size, 3)),
        [(NUMBERS[name], magnitude) for name, magnitude in steps],
    )


def test_the_kernel_finds_the_files_of_a_source(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/b/2.jpg", "a/b/\udcff.jpg", "c/3.jpg", "c/d/e/4.jpg"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    paths = sorted(tmp_path.rglob("*.jpg"))
    sources: list[Source] = [
        FolderSource(tmp_path),
        FolderSource(tmp_path, classes=False),
        FolderSource(tmp_path / "c" / "d" / "e"),
        FilesSource(paths),
    ]
    for source in sources:
        files = source.file_samples()
        assert files is not None
        assert files.listing is not None
        found = files.listing.kernel_paths()
        for index in range(len(source)):
            assert found.path(index) == source.name(index).encode(errors="surrogateescape")
        assert found.path(len(source)) is None
