"""Photographs to training batches: read, decode, crop at random, flip, stack."""

from __future__ import annotations

from argparse import Namespace
from typing import Literal

from benchmarks.benchmark import Benchmark
from benchmarks.courses import Throughput
from benchmarks.measure import Contestant, race
from benchmarks.peers import (
    penstock_dropin,
    penstock_pipeline,
    torch_simplejpeg,
    torchvision_pil,
)
from benchmarks.race_table import CPU, FIRST, MEMORY, RATE, Versus, found, joined
from benchmarks.report import Found
from benchmarks.workloads import Photos

CHECKED = 512
"""Photographs that are looked at; about as many as make means of random crops agree."""

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

VERSUS = (
    Versus("rate / best peer", "rate", True, 1.3),
    Versus("CPU / best peer", "cpu", False),
)


def run(options: Namespace) -> Found:
    parts = []
    for form, contestants in FORMS.items():
        name = f"load, {form}"
        work = Photos(options.data, form, options.batch, options.workers)
        lanes = race(
            name,
            contestants,
            work,
            Throughput(options.seconds, CHECKED, options.samples, options.warm_up),
            rounds=options.rounds,
            timeout=240 + options.warm_up + 10 * options.seconds,
        )
        layout = {"uint8": "HWC", "float32": "CHW normalised"}[form]
        title = f"{name} {layout}: crop to {work.side}, flip, batches of {work.batch}, "
        title += f"{work.workers} workers"
        parts.append(found(name, title, lanes, (RATE, CPU, MEMORY, FIRST), VERSUS))
    return joined(parts)


BENCHMARK = Benchmark(
    "load",
    "JPEG folders to augmented batches, beside PIL and a hand-written fast path",
    run,
    needs_data=True,
)
