"""PyTorch's DataLoader with torchvision's v2 transforms on uint8 tensors, which its guide "Getting
started with transforms v2" recommends for speed.

torchvision decodes the images, or simplejpeg if torchvision's compiled operators do not load. Both
give a tensor, and simplejpeg is not slower.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import MEAN, RAND_AUGMENT, STD, Photos, loader_options
from benchmarks.peers.torchvision_pil import import_torchvision


def photos(work: Photos) -> Make:
    torchvision = import_torchvision()
    import torch
    from torch.utils.data import DataLoader
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(work.side, antialias=True), v2.RandomHorizontalFlip()]
    if work.augment:
        steps += [v2.RandAugment(*RAND_AUGMENT)]
    if work.form == "float32":
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    else:
        steps += [_channels_last]
    folder = torchvision.datasets.ImageFolder(
        work.data, v2.Compose(steps), loader=_torchvision if _decodes(torch) else _simplejpeg
    )
    return lambda: DataLoader(folder, **loader_options(work))


def _decodes(torch: Any) -> bool:
    return hasattr(torch.ops.image, "decode_jpeg")


def _torchvision(path: str) -> Any:
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    return decode_jpeg(read_file(path), ImageReadMode.RGB)


def _simplejpeg(path: str) -> Any:
    import simplejpeg
    import torch

    image = simplejpeg.decode_jpeg(Path(path).read_bytes(), "RGB", fastdct=True, fastupsample=True)
    return torch.from_numpy(image).permute(2, 0, 1)


def _channels_last(image: Any) -> Any:
    return image.permute(1, 2, 0).contiguous()
