"""From packed coefficients of JPEGs to pixels, in torch, on any device: the bits of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.image.coefficients import CoefficientLayout

if TYPE_CHECKING:
    import torch


def decode(packed: torch.Tensor, layout: CoefficientLayout) -> Any:
    """Decode ``Coefficients.packed``, copied to a device, to a ``Ragged`` of RGB pictures there.

    Picture ``i`` is the box of file ``Coefficients.numbers[i]``. Runs on the current stream and does
    not wait for the device: all sizes are in ``layout``.
    """
    raise NotImplementedError
