"""Trainers do with the drop-in what they do with torch's loader, and Penstock is at work inside."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.torch import DataLoader
from tests.torch.compat.datasets import Made, Stream, values


def column(index: int) -> Any:
    return torch.tensor([float(index)])


def ours(loader: Any, used: Any, batches: int) -> None:
    """Assert that Penstock has prepared that many batches of a trainer's loader."""
    if loader is DataLoader:
        assert isinstance(used, DataLoader)
        assert used.stats().batches == batches


@pytest.fixture
def accelerate() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("accelerate")
        found.state.AcceleratorState._reset_state(True)
        found.state.GradientState._reset_state()
        yield found
        found.state.AcceleratorState._reset_state(True)
        found.state.GradientState._reset_state()


@pytest.mark.parametrize("first", ["loader", "accelerator"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_accelerate_prepares(accelerate: Any, first: str, shuffle: bool, loader: Any) -> None:
    def seen(kind: Any) -> Any:
        torch.manual_seed(1)
        if first == "loader":
            made = kind(Made(n=21), batch_size=4, shuffle=shuffle)
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        else:
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
            made = kind(Made(n=21), batch_size=4, shuffle=shuffle)
        model, prepared = torch.nn.Linear(1, 1), accelerator.prepare(made)
        steps, gathered = [], list[float]()
        for batch in prepared:
            with accelerator.accumulate(model):
                steps.append((batch.tolist(), accelerator.sync_gradients))
        for batch in prepared:
            gathered += accelerator.gather_for_metrics(batch).tolist()
        ours(kind, prepared, 12)
        return steps, gathered, len(prepared)

    steps, gathered, length = seen(loader)
    assert (steps, gathered, length) == seen(torch.utils.data.DataLoader)
    assert [synced for _, synced in steps] == [False, False, False, True, False, True]
    assert sorted(gathered) == [float(i) for i in range(21)]


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("dataset", [Made(n=10), Stream(10)], ids=["map", "stream"])
def test_accelerate_skips_first_batches(
    accelerate: Any, prepared: bool, dataset: Any, loader: Any
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    made = loader(dataset, batch_size=4)
    if prepared:
        made = accelerator.prepare(made)
    skipping = accelerate.skip_first_batches(made, 1)
    assert values(skipping) == [[4, 5, 6, 7], [8, 9]]
    ours(loader, skipping, 3 if isinstance(dataset, Stream) else 2)


def test_accelerate_saves_and_loads_its_state(accelerate: Any, tmp_path: Path, loader: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(loader(Made(n=8), batch_size=4, shuffle=True))
    list(prepared)
    accelerator.save_state(str(tmp_path))
    expected = values(prepared)
    accelerator.load_state(str(tmp_path))
    assert values(prepared) == expected


def test_accelerate_leaves_torchs_own_loaders_alone(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    DataLoader(Made())
    prepared = accelerator.prepare(torch.utils.data.DataLoader(Made()))
    assert type(prepared.base_dataloader) is torch.utils.data.DataLoader


def test_accelerate_keeps_penstocks_own_arguments(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    made = DataLoader(Made(n=4), batch_size=2, random=False, cache="1MB", seed=3)
    prepared = accelerator.prepare(made)
    for _ in range(2):
        assert len(values(prepared)) == 2
    assert prepared.seed == 3
    assert prepared.stats().caches[0].hits == 4


@pytest.fixture
def lightning(torchvision: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("lightning")


def fit(lightning: Any, loader: Any, **options: Any) -> tuple[list[Any], Any]:
    """The batches of a training, and the loader that the trainer has used."""

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[Any] = []

        def training_step(self, batch: Any, _: int) -> Any:
            self.seen.append(batch.flatten().tolist())
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(1)
    made, model = loader(Made(column, 12), batch_size=4, shuffle=True), Model()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, made)
    return model.seen, trainer.train_dataloader


@pytest.mark.parametrize(
    ("options", "batches"), [({}, 6), ({"overfit_batches": 2}, 4), ({"limit_train_batches": 1}, 2)]
)
def test_lightning_fits(lightning: Any, options: Any, batches: int, loader: Any) -> None:
    expected, _ = fit(lightning, torch.utils.data.DataLoader, **options)
    seen, used = fit(lightning, loader, **options)
    assert seen == expected
    assert len(seen) == batches
    ours(loader, used, batches)


def test_lightning_fabric(lightning: Any, loader: Any) -> None:
    def seen(kind: Any) -> Any:
        torch.manual_seed(1)
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        made = fabric.setup_dataloaders(kind(Made(n=12), batch_size=4, shuffle=True))
        batches = values(made)
        ours(kind, made._dataloader, 3)
        return batches

    assert seen(loader) == seen(torch.utils.data.DataLoader)


@pytest.fixture
def transformers(accelerate: Any, torchvision: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers", reason="transformers is not installed")


def hugging_face_train(
    transformers: Any, kind: Any, folder: Path, *, resume: bool = False, **options: Any
) -> tuple[list[Any], Any]:
    """The batches of a training by Hugging Face's Trainer, and the loader that it has used."""
    seen: list[Any] = []

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, labels: Any = None) -> Any:
            seen.append(x.flatten().tolist())
            return {"loss": self.layer(x).mean()}

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        used: Any = None

        def get_train_dataloader(self) -> Any:
            made = kind(self.train_dataset, batch_size=4, shuffle=True)
            self.used = self.accelerator.prepare(made)
            return self.used

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        seed=1,
        **options,
    )
    data = Made(lambda index: {"x": column(index), "labels": column(index)}, 12)
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return seen, trainer.used


def test_hugging_face_trainer_trains_and_resumes(
    transformers: Any, tmp_path: Path, loader: Any
) -> None:
    expected, _ = hugging_face_train(transformers, torch.utils.data.DataLoader, tmp_path / "torch")
    seen, used = hugging_face_train(transformers, loader, tmp_path / "ours")
    assert seen == expected
    for epoch in (seen[:3], seen[3:]):
        assert sorted(x for batch in epoch for x in batch) == [float(i) for i in range(12)]
    assert seen[:3] != seen[3:]
    ours(loader, used, 6)
    rest, used = hugging_face_train(transformers, loader, tmp_path / "ours", resume=True)
    assert rest == expected[2:]
    if loader is DataLoader:
        assert isinstance(used, DataLoader)


def test_ignite_trains(loader: Any) -> None:
    engine = pytest.importorskip("ignite.engine", reason="pytorch-ignite is not installed")

    def seen(kind: Any) -> list[Any]:
        torch.manual_seed(1)
        batches: list[Any] = []
        trainer = engine.Engine(lambda _, batch: batches.append(batch.tolist()))
        made = kind(Made(n=10), batch_size=4, shuffle=True, num_workers=1)
        state = trainer.run(made, max_epochs=2)
        assert (state.epoch, state.iteration, state.epoch_length) == (2, 6, 3)
        ours(kind, made, 6)
        return batches

    found = seen(loader)
    assert found == seen(torch.utils.data.DataLoader)
    assert sorted(x for batch in found[3:] for x in batch) == [float(i) for i in range(10)]


def test_ignite_deterministic_engine_resumes_as_with_torch(loader: Any) -> None:
    engine = pytest.importorskip("ignite.engine", reason="pytorch-ignite is not installed")
    deterministic = pytest.importorskip("ignite.engine.deterministic")

    def seen(kind: Any, state: Any = None) -> tuple[list[Any], Any]:
        batches: list[Any] = []
        trainer = deterministic.DeterministicEngine(lambda _, batch: batches.append(batch.tolist()))
        saved: list[Any] = []
        trainer.add_event_handler(
            engine.Events.ITERATION_COMPLETED(once=4), lambda: saved.append(trainer.state_dict())
        )
        if state is not None:
            trainer.load_state_dict(state)
        made = kind(Made(n=12), batch_size=4, shuffle=True)
        trainer.run(made, max_epochs=2)
        return batches, saved[0] if saved else None

    def both(kind: Any) -> Any:
        torch.manual_seed(1)
        whole, state = seen(kind)
        torch.manual_seed(2)
        return whole, seen(kind, state)[0]

    whole, rest = both(loader)
    assert (whole, rest) == both(torch.utils.data.DataLoader)
    assert (len(whole), len(rest)) == (6, 2)


def test_timm_creates_a_loader(
    torchvision: Any, monkeypatch: pytest.MonkeyPatch, loader: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("timm", reason="timm is not installed")
        from timm.data import create_loader
        from timm.data import loader as timm_loader

    import numpy as np
    from PIL import Image

    class Photos(Made):
        transform: Any = None

        def __getitem__(self, index: int) -> Any:
            photo = Image.fromarray(np.full((40, 40, 3), 9 * index, dtype=np.uint8))
            return self.transform(photo), index

    def seen(kind: Any) -> Any:
        monkeypatch.setattr(torch.utils.data, "DataLoader", kind)
        torch.manual_seed(1)
        made = create_loader(
            Photos(n=10),
            input_size=(3, 32, 32),
            batch_size=4,
            is_training=True,
            no_aug=True,
            use_prefetcher=True,
            num_workers=1,
            device=torch.device("cpu"),
            persistent_workers=False,
        )
        assert isinstance(made, timm_loader.PrefetchLoader)
        epochs = [[(x.mean().item(), y.tolist()) for x, y in made] for _ in range(2)]
        ours(kind, made.loader, 4)
        return epochs

    found = seen(loader)
    assert found == seen(torch.utils.data.DataLoader)
    # timm drops the last batch of a training epoch.
    assert [len({y for _, ys in epoch for y in ys}) for epoch in found] == [8, 8]
    assert found[0] != found[1]
