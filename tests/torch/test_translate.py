"""Transforms of torchvision become operations of Penstock, recognised by their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.image.normalizing import Normalize
from penstock.torch.translate import translate


def transform(kind: str, **attributes: Any) -> Any:
    """What a transform of torchvision is, as far as it is looked at; torchvision is not needed."""
    module = {"__module__": "torchvision.transforms.transforms"}
    made: Any = type(kind, (), module)()
    made.__dict__.update(attributes)
    return made


LEVELS = [0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("given", "levels"),
    [
        (LEVELS, LEVELS),
        (tuple(LEVELS), LEVELS),
        (np.array(LEVELS), LEVELS),
        (np.array(LEVELS, np.float32)[:, None, None], LEVELS),
        (torch.tensor(LEVELS), LEVELS),
        (0.5, [0.5] * 3),
        (torch.tensor(0.5), [0.5] * 3),
    ],
)
def test_normalize_takes_levels_as_torchvision_does(given: Any, levels: list[float]) -> None:
    steps = [transform("ToTensor"), transform("Normalize", mean=given, std=given)]
    found = translate(steps)
    assert found is not None
    last = found[-1]
    assert isinstance(last, Normalize)
    assert (np.array(last.mean).tolist(), np.array(last.std).tolist()) == (levels, levels)


def test_normalize_of_one_channel_is_left_to_torchvision() -> None:
    assert translate([transform("ToTensor"), transform("Normalize", mean=[0.5], std=[0.5])]) is None
