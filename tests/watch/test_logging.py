"""Statistics in the logs of training runs, read back from TensorBoard and Lightning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import MissingExtraError, PipelineError
from penstock.torch.logging import TensorBoard, scalars
from penstock.watch.rates import between
from tests.support.snapshots import STATS

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("live")

NAMES = {
    "penstock/stall",
    "penstock/samples_per_second",
    "penstock/batches_per_second",
    "penstock/bytes_read_per_second",
    "penstock/utilisation",
    "penstock/bad_samples",
    "penstock/seconds_per_sample/source",
}


class ListWriter:
    """A ``SummaryWriter`` that keeps its entries in a list."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.entries.append((tag, scalar_value, global_step))

    def of(self, tag: str) -> list[tuple[int, float]]:
        return [(step, value) for name, value, step in self.entries if name == tag]


def numbers() -> ps.Loader:
    return ps.from_dataset(np.arange(40.0)).batch(4).loader(workers=0, seed=0)


def test_rates_without_samples_are_left_out() -> None:
    found = scalars(between(None, STATS), STATS, "data")
    assert found["data/stall"] == 0.25
    assert found["data/samples_per_second"] == 100.0
    assert found["data/seconds_per_sample/decode"] == 0.009
    assert found["data/cache_hits/0"] == 0.4
    nothing = replace(STATS, elapsed=11.0)
    assert "data/cache_hits/0" not in scalars(between(STATS, nothing), nothing, "data")
    assert scalars(between(STATS, STATS), STATS) == {}


def test_an_entry_covers_the_time_since_the_last_one() -> None:
    writer = ListWriter()
    with numbers() as loader:
        board = TensorBoard(writer, loader)
        epoch = iter(loader)
        next(epoch)
        first = board.log(7)
        assert {name for name, _, _ in writer.entries} == NAMES
        assert writer.of("penstock/stall") == [(7, first["penstock/stall"])]
        before = loader.stats()
        list(epoch)
        second, after = board.log(8), loader.stats()
    seconds = after.elapsed - before.elapsed
    # The interval measured here lies within the interval of the second entry.
    assert 0 < second["penstock/batches_per_second"] * seconds < 9 * 2
    assert [step for step, _ in writer.of("penstock/stall")] == [7, 8]


def test_a_wrapped_loader_gives_the_same_batches_and_logs_by_itself() -> None:
    writer = ListWriter()
    with numbers() as loader, numbers() as plain:
        board = TensorBoard(writer, loader, prefix="data", every=4)
        for _ in range(2):
            assert [b.tolist() for b in board.wrap()] == [b.tolist() for b in plain]
    assert [step for step, _ in writer.of("data/stall")] == [4, 8, 12, 16, 20]


def test_objects_without_statistics_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"list has no stats\(\)"):
        TensorBoard(ListWriter(), [1, 2])  # type: ignore[arg-type]
    with numbers() as loader, pytest.raises(PipelineError, match="every is 0"):
        TensorBoard(ListWriter(), loader, every=0)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writing = pytest.importorskip("torch.utils.tensorboard")
        reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with writing.SummaryWriter(str(tmp_path)) as writer, numbers() as loader:
        for _ in TensorBoard(writer, loader, every=5).wrap():
            pass
    found = reading.EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == NAMES
    assert [event.step for event in found.Scalars("penstock/stall")] == [5, 10]
    assert all(0 <= event.value <= 1 for event in found.Scalars("penstock/stall"))


# Lightning.

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.fixture(params=PACKAGES)
def package(
    request: pytest.FixtureRequest, torchvision: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """One of Lightning's two packages. Lightning imports torchvision if it is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip(request.param)
        importlib.import_module(f"{request.param}.loggers")
        # As in a program that imports only this package.
        for name in PACKAGES:
            if name != request.param:
                monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delitem(sys.modules, "penstock.torch.lightning", raising=False)
        yield found


def test_lightning_logs_rates_of_its_loader(package: Any, tmp_path: Path) -> None:
    from penstock.torch import DataLoader
    from penstock.torch.logging import LightningCallback

    class Model(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layer(batch[0]).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    class Log(package.loggers.logger.DummyLogger):  # type: ignore[misc]
        entries: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.entries.append((step, metrics))

    Log.entries = []
    assert LightningCallback.__mro__[1].__module__.startswith(package.__name__)
    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(24, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = package.Trainer(
            max_epochs=2,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=Log(),
            callbacks=LightningCallback(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=3,
        )
        with DataLoader(data, batch_size=4, shuffle=True) as loader:
            trainer.fit(Model(), loader)
    ours = [(step, values) for step, values in Log.entries if "penstock/stall" in values]
    theirs = [step for step, values in Log.entries if "loss" in values]
    assert [step for step, _ in ours] == theirs == [2, 5, 8, 11]
    assert all(set(values) == NAMES for _, values in ours)
    assert all(0 <= values["penstock/stall"] <= 1 for _, values in ours)


@pytest.mark.usefixtures("package")
def test_the_loader_is_found_among_those_of_a_trainer() -> None:
    from penstock.torch.lightning import find_loader
    from penstock.torch.logging import LightningCallback

    with numbers() as loader:
        for loaders in (loader, [1, loader], {"a": [1], "b": (2, loader)}):
            assert find_loader(loaders) is loader
    assert find_loader([1, {"a": None}]) is None
    with pytest.raises(PipelineError, match="every is 0"):
        LightningCallback(every=0)

    class Trainer:
        train_dataloader = [1]  # noqa: RUF012

    with pytest.raises(PipelineError, match=r"Pass it: LightningCallback\(loader\)"):
        LightningCallback().on_train_epoch_start(Trainer(), None)


class HideLightning:
    """An import finder for which Lightning is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in ("lightning", "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_without_lightning_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [HideLightning(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "penstock.torch.lightning", raising=False)
    import penstock.torch.logging as logging

    with pytest.raises(MissingExtraError, match="pip install lightning"):
        _ = logging.LightningCallback
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = logging.Other
