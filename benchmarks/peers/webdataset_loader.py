"""WebDataset: tar files read in order, shuffled on the way, in the workers of PyTorch's DataLoader.

The chain is that of WebDataset's ImageNet examples: shards are drawn at random without an end,
samples are shuffled in a buffer, batches are made in the workers. Its own decoders (``"rgb8"``,
``"pil"``) use PIL; here decoding is by hand, in a ``map``. Batches are collated by PyTorch's own
function, which puts them into shared memory at once; WebDataset's gives arrays, and these are
copied twice.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import Photos, image_files
from benchmarks.peers.by_hand import ByHand

SHARD = 32
"""Photographs in a tar file. Few, because every worker needs shards, and data here may be small."""

BUFFER = 256
"""Samples among which the next one is drawn: eight shards. While a buffer fills, two are read for
each one taken, so that a large one would be slow for longer."""

MTIME = 1
"""Of files in a tar. A time with a fraction, the writer's default, takes a second header for each
file, and a tenth of a millisecond for each sample to read it."""


def convert(work: Photos) -> None:
    import webdataset

    files = list(zip(*image_files(work.data), strict=True))
    random.Random(0).shuffle(files)
    place = _place()
    place.mkdir(exist_ok=True)
    pattern = str(place / "%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=SHARD, mtime=MTIME, verbose=0) as shards:
        for number, (path, label) in enumerate(files):
            data = Path(path).read_bytes()
            shards.write({"__key__": f"{number:08d}", "jpg": data, "cls": str(label).encode()})


def _place() -> Path:
    return Path(tempfile.gettempdir()) / "shards"


class _Image:
    """A sample as it stands in the tar file, as an image and its label."""

    def __init__(self, work: Photos) -> None:
        self._image = ByHand(work)

    def __call__(self, sample: dict[str, bytes]) -> tuple[Any, int]:
        return self._image(sample["jpg"], random), int(sample["cls"])


def photos(work: Photos) -> Make:
    import cv2  # noqa: F401
    import simplejpeg  # noqa: F401
    import webdataset
    from torch.utils.data import default_collate

    image = _Image(work)

    def make() -> Any:
        shards = sorted(map(str, _place().glob("*.tar")))
        data = (
            webdataset.WebDataset(shards, resampled=True, shardshuffle=False)
            .shuffle(BUFFER)
            .map(image)
            .batched(work.batch, partial=False, collation_fn=default_collate)
        )
        return webdataset.WebLoader(
            data, batch_size=None, shuffle=False, num_workers=work.workers, persistent_workers=True
        )

    return make
