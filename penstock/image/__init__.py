"""Operations on images, under the names users write.

They work on uint8 arrays (height, width, channels) in RGB and follow torchvision's definitions.
Their time goes into OpenCV and libjpeg-turbo, which release the GIL.

>>> from penstock import image
>>> image.random_resized_crop(224).name
'random_resized_crop'
"""

from __future__ import annotations

from penstock.image.augment import AutoAugment, RandAugment, TrivialAugment
from penstock.image.codec import Decode
from penstock.image.deep_augment import DeepAutoAugment
from penstock.image.erasing import Erase
from penstock.image.geometry import CenterCrop, RandomCrop, RandomFlip, RandomResizedCrop, Resize
from penstock.image.jitter import ColorJitter
from penstock.image.normalizing import Normalize

auto_augment = AutoAugment
center_crop = CenterCrop
color_jitter = ColorJitter
decode = Decode
deep_auto_augment = DeepAutoAugment
erase = Erase
normalize = Normalize
rand_augment = RandAugment
random_crop = RandomCrop
random_flip = RandomFlip
random_resized_crop = RandomResizedCrop
resize = Resize
trivial_augment = TrivialAugment

__all__ = [
    "auto_augment",
    "center_crop",
    "color_jitter",
    "decode",
    "deep_auto_augment",
    "erase",
    "normalize",
    "rand_augment",
    "random_crop",
    "random_flip",
    "random_resized_crop",
    "resize",
    "trivial_augment",
]
