"""Training on CIFAR-10: finding and checking the data, and a network that learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import parse
from benchmarks.harness import training

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_two_files_are_found_by_name_or_given(cifar: Path) -> None:
    train, test = cifar / "c-train.parquet", cifar / "c-test.parquet"
    assert training.find_files(cifar, None) == (train, test)
    assert training.find_files(test, train) == (test, train)
    for name in ("accuracy", "echo"):
        options = parse([name, "--data", str(train), str(test), "--seeds", "2"])[1]
        assert (options.data, options.test, options.seeds) == (train, test, 2)
    with pytest.raises(SystemExit, match="is one file: give the file of the test set too"):
        training.find_files(train, None)
    with pytest.raises(SystemExit, match=r"is a folder, but the file .* is given too"):
        training.find_files(cifar, test)


def test_a_folder_without_both_files_is_an_error_that_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / "train-0.parquet").touch()
    (tmp_path / "train-1.parquet").touch()
    with pytest.raises(SystemExit, match=r"'train' .*has: train-0.parquet, train-1.parquet"):
        training.find_files(tmp_path, None)


def test_too_few_images_or_columns_are_an_error_before_training(
    cifar: Path, tmp_path: Path
) -> None:
    train, test = training.find_files(cifar, None)
    training.check_files(train, test, 96, 8)
    for samples, batch, said in (
        (97, 8, "has 96 images, but at least 97"),
        (None, 100, "has 96 images, but at least 100"),
        (4, 8, "--samples 4 is less than one batch of 8"),
    ):
        with pytest.raises(SystemExit, match=said):
            training.check_files(train, test, samples, batch)
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"image": [b""]}), tmp_path / "x.parquet")
    with pytest.raises(SystemExit, match=r"x.parquet has no column label"):
        training.check_files(train, tmp_path / "x.parquet", None, 8)


def test_rows_are_bytes_and_classes_from_the_first_on(cifar: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    everything = training.read_rows(cifar / "c-test.parquet")
    assert len(everything) == 64
    assert training.read_rows(cifar / "c-test.parquet", 5) == everything[:5]
    structs = {"image": [{"bytes": b"abc", "path": None}], "label": [3]}
    pyarrow.parquet.write_table(pa.table(structs), tmp_path / "s.parquet")
    assert training.read_rows(tmp_path / "s.parquet") == [(b"abc", 3)]


def test_the_same_seed_and_batches_make_the_same_network(cifar: Path) -> None:
    pytest.importorskip("torch")
    images = training.read_images(cifar / "c-test.parquet")
    assert images.pixels.shape == (64, 32, 32, 3)

    def learned(seed: int, steps: int | None) -> tuple[float, list[float]]:
        trainer = training.Trainer(training.Recipe(width=4, rate=0.05), seed, steps)
        for first in range(0, 64, 8):
            trainer.step(images.pixels[first : first + 8], images.labels[first : first + 8])
        weights = [float(part.detach().sum()) for part in trainer._model.parameters()]
        return trainer.accuracy(images), weights

    for steps in (8, None):
        assert learned(1, steps) == learned(1, steps)
        assert learned(1, steps)[1] != learned(2, steps)[1]


def test_a_network_learns_distinct_classes(cifar: Path) -> None:
    pytest.importorskip("torch")
    images = training.read_images(cifar / "c-test.parquet")
    trainer = training.Trainer(training.Recipe(width=8), 0, 60)
    for step in range(60):
        part = slice(step * 16 % 64, step * 16 % 64 + 16)
        trainer.step(images.pixels[part], images.labels[part])
    assert trainer.steps_taken == 60
    assert trainer.accuracy(images) > 0.9
