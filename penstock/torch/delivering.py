"""How the batches of a loader reach the device: ``device=`` and ``pin_memory=``."""

from __future__ import annotations

import torch

from penstock.device.choose import Decoding, DevicePrep, check_device_prep, planner
from penstock.device.delivery import DeviceFinder, check_device, deliver_to
from penstock.device.division import divide, undivided
from penstock.loader import Deliver
from penstock.torch.pinning import Pinning, can_pin


def delivering(
    device: str | torch.device | None,
    *,
    pin_memory: bool,
    normalize: bool = True,
    device_prep: DevicePrep = False,
    decode: Decoding = "exact",
) -> Deliver | None:
    """What a loader does with its batches for these arguments; ``None``: nothing.

    ``normalize``: leave the last operation for the device if it is ``normalize``. ``decode``: see
    ``penstock.torch.loader``.
    Batches are on the CPU already, so ``device="cpu"`` is the same as no device.
    """
    found = None if device is None else check_device(device)
    check_device_prep(device_prep, found, decode)
    if found is not None and found.type != "cpu":
        finder = DeviceFinder(found)
        prepares = device_prep is not False or decode == "device"
        decide = divide if normalize else undivided
        return Deliver(
            deliver_to(finder),
            finder.find,
            finder.register,
            decide,
            name=str(found),
            copies=True,
            plan=planner(finder, device_prep, decode) if prepares else None,
            decode=decode,
        )
    if not can_pin(pin_memory):
        return None
    finder = DeviceFinder(torch.device("cuda"))
    return Deliver(lambda rest, desk: Pinning(), finder.find, finder.register)
