"""``penstock doctor --device``: it passes on sound devices, and finds what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from penstock.cli import main
from penstock.device.contract import Event
from penstock.device.fake import FakeDevice
from penstock.device.plain import Done
from penstock.torch import self_test
from penstock.torch.self_test import CHECKS, CheckResult, run_checks


def test_the_fake_device_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "fake"]) == 0
    printed = capsys.readouterr().out
    outcomes = {}
    for line in printed.splitlines()[2 : 2 + len(CHECKS)]:
        outcome, rest = line.split(maxsplit=1)
        outcomes[next(name for name in CHECKS if rest.startswith(name))] = outcome
    assert outcomes == {name: "skipped" if name == "pinning" else "ok" for name in CHECKS}
    assert printed.endswith("No check failed.\n")


def test_the_cpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == "cpu"
    assert [check["name"] for check in report["checks"]] == list(CHECKS)
    skipped = {check["name"] for check in report["checks"] if check["outcome"] != "ok"}
    assert skipped == {"pinning", "sharing between processes", "synchronisation"}


def test_a_machine_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["doctor", "--device"]) == 3
    assert "torch sees no CUDA device" in capsys.readouterr().err


class EarlyEvents(FakeDevice):
    """Says that copies are done when they are not."""

    def __init__(self) -> None:
        super().__init__()
        self.pause()

    def record(self, stream: Any = "copy") -> Event:
        return Done()

    def wait(self, stream: Any, event: Event) -> None:
        pass

    def arrive(self, tensors: Sequence[torch.Tensor], event: Event) -> None:
        pass


class WrongBits(FakeDevice):
    """Loses the last bit of each byte that is copied."""

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        copied = super().copy(source)
        self.record().wait()
        if copied.dtype == torch.uint8:
            copied.bitwise_and_(0xFE)
        return copied


class WrongArithmetic(FakeDevice):
    """Computes with other bits than the CPU."""

    def run(self, function: Callable[[], None], stream: Any, **more: Any) -> None:
        def work() -> None:
            function()
            for tensor in more["writes"]:
                if tensor.dtype == torch.float32:
                    tensor.mul_(1 + 2**-23)

        super().run(work, stream, **more)


class Hoarder(FakeDevice):
    """Never frees anything."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        self.kept.append(super().copy(source))
        return self.kept[-1]

    def allocate(self, *arguments: Any, **more: Any) -> torch.Tensor:
        self.kept.append(super().allocate(*arguments, **more))
        return self.kept[-1]


class Unregistrable(FakeDevice):
    def register(self, address: int, nbytes: int) -> Callable[[], None]:
        raise OSError("no locked memory")


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeDevice, str], CheckResult]:
    def run(device: FakeDevice, name: str) -> CheckResult:
        monkeypatch.setattr(self_test, "open_device", lambda name: device)
        (result,) = run_checks("fake", {name: CHECKS[name]})
        return result

    return run


@pytest.mark.parametrize(
    ("device", "failing", "message"),
    [
        (EarlyEvents, "events", "copies have bytes that were written after their event"),
        (EarlyEvents, "streams", "sum 0 after arrive"),
        (WrongBits, "copies", "a copy of torch.uint8"),
        (WrongArithmetic, "normalize", "other bits than on the CPU"),
        (WrongArithmetic, "operations", "normalize has other bits than on the CPU"),
        (WrongArithmetic, "delivery and memory", "other bits"),
        (Hoarder, "delivery and memory", "the limit is"),
        (Unregistrable, "registration", "OSError: no locked memory"),
    ],
)
def test_a_device_with_a_fault_fails_the_check_for_it(
    results: Callable[[FakeDevice, str], CheckResult],
    device: type[FakeDevice],
    failing: str,
    message: str,
) -> None:
    found = results(device(), failing)
    assert found.outcome == "failed"
    assert message in found.found
    assert "1 of 1 checks failed" in "\n".join(self_test.lines("fake", [found]))
