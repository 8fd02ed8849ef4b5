"""Contestants that load photographs, and the race between them, for the benchmarks over images."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from benchmarks.harness.courses import Throughput
from benchmarks.harness.measure import Contestant, race, select
from benchmarks.harness.race_table import COLUMNS, Versus, race_result
from benchmarks.harness.report import Result
from benchmarks.harness.workloads import Photos
from benchmarks.peers import (
    dali,
    ffcv_loader,
    grain_threads,
    litdata_loader,
    penstock_dropin,
    penstock_pipeline,
    spdl_threads,
    tfdata,
    torch_simplejpeg,
    torchvision_pil,
    torchvision_tensors,
    webdataset_loader,
)

CHECKED = 512
"""Photographs inspected per contestant: enough for the means of random crops to agree."""

LAYOUTS = {"uint8": "HWC", "float32": "CHW normalised"}

PIL = Contestant(
    "torch DataLoader, PIL + torchvision",
    torchvision_pil.photos,
    ("torch", "torchvision", "PIL"),
    env="torch",
)
TENSORS = Contestant(
    "torch DataLoader, torchvision v2 on tensors",
    torchvision_tensors.photos,
    ("torch", "torchvision", "simplejpeg"),
    env="torch",
)
BY_HAND = Contestant(
    "torch DataLoader, simplejpeg + OpenCV",
    torch_simplejpeg.photos,
    ("torch", "simplejpeg", "cv2"),
    env="torch",
)
DALI = Contestant("DALI, CPU", dali.photos, ("nvidia.dali",), env="dali")
DALI_PLAIN = Contestant(
    "DALI, CPU, no antialias", dali.photos_no_antialias, ("nvidia.dali",), env="dali"
)
GRAIN = Contestant(
    "Grain, threads", grain_threads.photos, ("grain", "simplejpeg", "cv2"), env="grain"
)
SPDL = Contestant(
    "SPDL, threads", spdl_threads.photos, ("spdl.pipeline", "simplejpeg", "cv2"), env="spdl"
)
TF_DATA = Contestant("tf.data", tfdata.photos, ("tensorflow",), env="tfdata")
FFCV = Contestant(
    "FFCV", ffcv_loader.photos, ("ffcv", "torch"), env="ffcv", convert=ffcv_loader.convert
)
WEBDATASET = Contestant(
    "WebDataset",
    webdataset_loader.photos,
    ("webdataset", "torch", "simplejpeg", "cv2"),
    env="webdataset",
    convert=webdataset_loader.convert,
)
LITDATA = Contestant(
    "LitData",
    litdata_loader.photos,
    ("litdata", "torch", "simplejpeg", "cv2"),
    env="litdata",
    convert=litdata_loader.convert,
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


def race_photos(
    name: str,
    contestants: Sequence[Contestant[Photos]],
    work: Photos,
    options: Namespace,
    versus: Sequence[Versus],
    beside: Sequence[str] = (),
) -> Result:
    """Race the contestants over photographs, with only the peers in ``options.peers``.

    ``beside``: titles of the contestants to compare with, instead of all peers.
    """
    lanes = race(
        name,
        select(contestants, options.peers),
        work,
        Throughput(options.seconds, CHECKED, options.samples, options.warm_up),
        rounds=options.rounds,
        timeout=240 + options.warm_up + 10 * options.seconds,
    )
    steps = f"crop to {work.side}, flip" + (", RandAugment" if work.augment else "")
    what = name if name.endswith(work.form) else f"{name}, {work.form}"
    title = f"{what} {LAYOUTS[work.form]}: {steps}, batches of {work.batch}"
    if not beside:
        title += f", {work.workers} workers"
    return race_result(name, title, lanes, COLUMNS, versus, beside)
