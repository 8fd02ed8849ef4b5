"""How the batches of a loader reach the device: ``device=`` and ``pin_memory=``."""

from __future__ import annotations

import torch

from penstock.device.choose import DevicePrep, check_device_prep, planner
from penstock.device.delivery import DeviceFinder, check_device, deliver_to
from penstock.loader import Deliver
from penstock.torch.pinning import Pinning, can_pin


def delivering(
    device: str | torch.device | None, *, pin_memory: bool, device_prep: DevicePrep = False
) -> Deliver | None:
    """What a loader does with its batches for these arguments; ``None``: nothing.

    Batches are on the CPU already, so ``device="cpu"`` is the same as no device.
    """
    found = None if device is None else check_device(device)
    check_device_prep(device_prep, found)
    if found is not None and found.type != "cpu":
        finder = DeviceFinder(found)
        plan = None if device_prep is False else planner(finder, device_prep)
        return Deliver(deliver_to(finder), finder.find, finder.register, plan)
    if not can_pin(pin_memory):
        return None
    finder = DeviceFinder(torch.device("cuda"))
    return Deliver(Pinning, finder.find, finder.register)
