"""Photographs to training batches: read, decode, crop at random, flip, stack."""

from __future__ import annotations

from argparse import Namespace
from typing import Literal

from benchmarks.benchmark import Benchmark
from benchmarks.measure import Contestant, Length, race
from benchmarks.peers import (
    penstock_dropin,
    penstock_pipeline,
    torch_simplejpeg,
    torchvision_pil,
)
from benchmarks.race_table import Target, found, joined
from benchmarks.report import Found
from benchmarks.workloads import Photos

CHECKED = 512

PILLOW = Contestant(
    "torch DataLoader, PIL + torchvision", torchvision_pil.photos, ("torch", "torchvision", "PIL")
)
BY_HAND = Contestant(
    "torch DataLoader, simplejpeg + OpenCV",
    torch_simplejpeg.photos,
    ("torch", "simplejpeg", "cv2"),
)
PIPELINE = Contestant(
    "Penstock pipeline, threads", penstock_pipeline.photos, ("simplejpeg", "cv2"), ours=True
)
DROP_IN = Contestant(
    "Penstock drop-in, ImageFolder",
    penstock_dropin.photos,
    ("torch", "torchvision", "simplejpeg", "cv2"),
    ours=True,
)

FORMS: dict[Literal["uint8", "float32"], tuple[Contestant[Photos], ...]] = {
    # The drop-in takes over transforms that end in a float tensor, so it has no uint8 form.
    "uint8": (PILLOW, BY_HAND, PIPELINE),
    "float32": (PILLOW, BY_HAND, PIPELINE, DROP_IN),
}


def run(options: Namespace) -> Found:
    parts = []
    for form, contestants in FORMS.items():
        work = Photos(options.data, form, options.batch, options.workers)
        layout = {"uint8": "uint8 HWC", "float32": "float32 CHW normalised"}[form]
        lanes = race(
            f"load, {form}",
            contestants,
            work,
            rounds=options.rounds,
            length=Length(options.seconds, options.samples),
            checked=CHECKED,
        )
        title = f"load, {layout}, batches of {work.batch}, {work.workers} workers"
        parts.append(found(title, lanes, Target(1.3)))
    return joined(parts)


BENCHMARK = Benchmark(
    "load", "JPEG folders to augmented batches, beside PIL and a hand-written fast path", run,
    needs_data=True,
)
