"""PyTorch's DataLoader over torchvision's ImageFolder and transforms: what most scripts do.

The steps, and their order, are those of torchvision's reference script for classification.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness.measure import Make
from benchmarks.harness.workloads import MEAN, RAND_AUGMENT, STD, Photos, loader_options


def import_torchvision() -> Any:
    """Import torchvision, even if its compiled operators do not match this build of torch.

    A torchvision built for CUDA cannot load its operators with a torch built for the CPU, and its
    import fails where it registers them. Loading images needs none of them, so this declares
    operators of the same names.
    """
    import torch

    try:
        import torchvision
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        import sys

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        import torchvision
    return torchvision


_KEPT: list[Any] = []
"""Keeps the declarations alive: they last as long as the library object."""


def image_folder(work: Photos) -> Any:
    torchvision = import_torchvision()
    transforms = torchvision.transforms
    steps = [transforms.RandomResizedCrop(work.side), transforms.RandomHorizontalFlip()]
    if work.augment:
        steps += [transforms.RandAugment(*RAND_AUGMENT)]
    if work.form == "float32":
        steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    else:
        steps += [_pixels]
    return torchvision.datasets.ImageFolder(work.data, transforms.Compose(steps))


def _pixels(image: Any) -> Any:
    """An array (height, width, channels), as the other loaders give. PILToTensor would put channels
    first."""
    import numpy as np

    return np.array(image)


def photos(work: Photos) -> Make:
    from torch.utils.data import DataLoader

    folder = image_folder(work)
    return lambda: DataLoader(folder, **loader_options(work))


def restarting(work: Photos) -> Make:
    """With default options: workers are started for every epoch."""
    from torch.utils.data import DataLoader

    folder = image_folder(work)
    return lambda: DataLoader(folder, **{**loader_options(work), "persistent_workers": False})
