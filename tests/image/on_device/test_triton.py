"""The Triton kernels give the bits of the CPU: in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.image import kernel
from penstock.image.augment import CHANGES, NUMBERS, AugmentStep
from penstock.image.on_device.changes import ChangesStage, numbers_of
from penstock.image.on_device.parameters import pack
from penstock.image.on_device.ragged import Ragged
from penstock.keyed import Keyed
from penstock.operation import Operation
from tests.image.conftest import make_photo
from tests.image.on_device.conftest import check_same_bits

image = ps.image

pytest.importorskip("triton", reason="Triton is not installed: it needs Python 3.11 on x86-64")


@pytest.fixture(scope="module")
def triton_ops() -> Any:
    """The kernels, for Triton's interpreter: see conftest.py."""
    return importlib.import_module("penstock.image.on_device.triton_ops")


MAGNITUDES = {
    "ShearX": 0.3,
    "ShearY": -0.3,
    "TranslateX": -4.5,
    "TranslateY": 3.5,
    "Rotate": 27.0,
    "Brightness": 0.4,
    "Color": -0.7,
    "Contrast": 0.6,
    "Sharpness": 0.9,
    "Posterize": 5.0,
    "Solarize": 99.0,
}


def test_one_launch_runs_a_different_change_on_every_picture(triton_ops: Any) -> None:
    names = list(CHANGES)
    pictures = [make_photo(8 + n, 23 - n, seed=n) for n in range(len(names))]
    steps = [
        [AugmentStep(name, MAGNITUDES.get(name, 0.0)) for name in pair]
        for pair in zip(names, names[5:] + names[:5], strict=True)
    ]
    sizes = [(picture.shape[0], picture.shape[1]) for picture in pictures]
    stage = ChangesStage(None, Keyed(0, ""), fill=(5, 6, 7))
    numbers = [
        [one for one in (numbers_of(step, size) for step in pair) if one.kind]
        for pair, size in zip(steps, sizes, strict=True)
    ]
    empty = np.zeros((0, 4), np.int32)
    packed = pack(np.arange(15), {}, empty, empty, [stage.pack(numbers, sizes)])
    arrays = packed.on(torch.from_numpy(packed.buffer))[0]
    changed = triton_ops.change(Ragged.of(pictures), arrays, packed.stages[0])
    for number, (picture, pair) in enumerate(zip(pictures, steps, strict=True)):
        wanted = picture.copy()
        numbered = [(NUMBERS[step.name], step.magnitude) for step in pair]
        kernel.augment(picture, numbered, (5, 6, 7), wanted)
        np.testing.assert_array_equal(changed.picture(number).numpy(), wanted, err_msg=str(pair))


@pytest.mark.parametrize(
    "operations",
    [
        [image.random_resized_crop(11), image.random_flip(1.0), image.normalize()],
        # More than eight taps, in one direction and in both.
        [image.resize((2, 12)), image.normalize(layout="hwc")],
        [image.random_crop(14, padding=9, fill=(1, 2, 3)), image.random_flip(1.0)],
        [image.resize((9, 8)), image.trivial_augment(), image.normalize()],
        [image.resize((9, 8)), image.erase(p=1.0), image.color_jitter(0.3, 0.5, 0.5)],
    ],
    ids=lambda given: "-".join(one.name for one in given),
)
def test_the_kernels_agree_with_the_cpu(operations: list[Operation]) -> None:
    assert not check_same_bits(operations, [(40, 30), (5, 21), (9, 50)], backend="triton").left


@settings(max_examples=4, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=2),
    to=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 2**32),
)
def test_any_size_and_box_agrees(
    sizes: list[tuple[int, int]], to: tuple[int, int], seed: int
) -> None:
    operations: list[Operation] = [image.random_resized_crop(to), image.random_flip()]
    operations += [image.rand_augment(2, 20), image.normalize()]
    check_same_bits(operations, sizes, seed=seed, backend="triton")


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.image.on_device import triton_ops

KINDS = {"out": "*fp32", "levels": "*fp32", "turn": "*fp32", "data": "*u8", "lookups": "*u8"}
KINDS |= dict.fromkeys(["table", "sizes", "places"], "*i64")
NUMBERS = ["steps", "step", "run_length", "most_rows", "most_columns", "down_taps", "across_taps"]
KINDS |= dict.fromkeys(NUMBERS, "i32")
GIVEN = {"to_rows": True, "normal": True, "channels_first": True, "block": 256}
for name in ("_frame_kernel", "_count_kernel", "_change_kernel"):
    kernel = getattr(triton_ops, name)
    given = {key: value for key, value in GIVEN.items() if key in kernel.arg_names}
    types = {key: KINDS.get(key, "*i32") for key in kernel.arg_names}
    types |= dict.fromkeys(given, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=given)
    target = GPUTarget("cuda", 80, 32)
    made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    print(name, made.asm["ptx"].count("fma."), made.asm["ptx"].count("mul.rn.f32") > 0)
"""


def test_the_kernels_compile_for_a_gpu_without_fused_multiply_add(tmp_path: Path) -> None:
    # The interpreter accepts code that the compiler does not.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "_frame_kernel 0 False",
        "_count_kernel 0 False",
        "_change_kernel 0 True",
    ], done.stderr
