"""WebDataset: tar files read in order, shuffled on the way, in the workers of PyTorch's DataLoader.

The chain is that of WebDataset's ImageNet examples: shards are drawn at random without end, samples
are shuffled in a buffer, and the workers make batches. Its decoders (``"rgb8"``, ``"pil"``) use
PIL; here a ``map`` decodes with the hand-written steps. PyTorch's function collates the batches,
directly into shared memory; WebDataset's gives arrays, which would be copied twice.
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
"""Photographs per tar file. Few, because every worker needs shards, and the data may be small."""

BUFFER = 256
"""Size of the shuffle buffer: eight shards. While the buffer fills, two samples are read for each
one taken, so a larger buffer would be slow for longer."""

MTIME = 1
"""Modification time of files in a tar. The writer's default has a fraction of a second, which
needs a second header per file and a tenth of a millisecond per sample to read it."""


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
    """Turns a sample of the tar file into an image and its label."""

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
