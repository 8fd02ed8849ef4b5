"""Trains a small network to tell spoken words apart, with recordings used more than once.

    python examples/speech.py --data DIGITS.parquet [--reuse 3] [--echo 2] [--epochs 8]

The data is a Parquet file with a column ``audio`` (the bytes of WAV or FLAC files) and a column
``label``. Every fifth row is kept for testing. ``--reuse`` keeps spectrograms and masks them anew
every time (refurbish); ``--echo`` uses every recording several times, cropped and masked anew.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import nn

import penstock as ps
import penstock.torch

RATE, MELS = 8_000, 40
QUIET = 1e-4  # what is softer counts as silence, which most of a short word's second is


def rows(path: Path) -> tuple[list[Any], list[Any]]:
    """The recordings for training and for testing."""
    table = pq.read_table(path, columns=["audio", "label"]).to_pylist()
    test = [row for place, row in enumerate(table) if place % 5 == 0]
    return [row for place, row in enumerate(table) if place % 5], test


def road(data: list[Any], batch: int, *, reuse: int, echo: float) -> ps.Pipeline:
    """From bytes to masked spectrograms: random length and loudness, then SpecAugment."""
    pipeline = ps.from_dataset(data, random=False).map(ps.audio.decode(rate=RATE, mono=True))
    if echo > 1:
        pipeline = pipeline.echo(echo)
    pipeline = (
        pipeline.map(ps.audio.random_crop(seconds=1.0, rate=RATE))
        .map(ps.audio.random_gain(-6, 6))
        .map(ps.audio.mel_spectrogram(RATE, mels=MELS, floor=QUIET))
    )
    if reuse > 1:
        pipeline = pipeline.refurbish(reuse)
    return pipeline.map(ps.audio.spec_augment(time=8, freq=6)).batch(batch)


def network(classes: int) -> nn.Module:
    def block(inner: int, outer: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inner, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]

    return nn.Sequential(
        nn.BatchNorm2d(1),
        *block(1, 16),
        *block(16, 32),
        *block(32, 64),
        nn.AdaptiveAvgPool2d((5, 1)),  # over time: which pitch it is matters
        nn.Flatten(),
        nn.Linear(5 * 64, classes),
    )


def accuracy(model: nn.Module, data: list[Any]) -> float:
    """The share of test recordings that are told right."""
    pipeline = (
        ps.from_dataset(data, random=False)
        .map(ps.audio.decode(rate=RATE, mono=True))
        .map(ps.audio.crop_or_pad(seconds=1.0, rate=RATE))
        .map(ps.audio.mel_spectrogram(RATE, mels=MELS, floor=QUIET))
        .batch(64)
    )
    model.eval()
    right = 0
    with torch.no_grad(), penstock.torch.loader(pipeline, workers=0, shuffle=False) as loader:
        for batch in loader:
            right += int((model(batch["audio"]).argmax(1) == batch["label"]).sum())
    model.train()
    return right / len(data)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a Parquet file")
    parser.add_argument("--reuse", type=int, default=1, help="uses of a kept spectrogram")
    parser.add_argument("--echo", type=float, default=1.0, help="uses of a decoded recording")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the recordings")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    train, test = rows(given.data)
    torch.manual_seed(given.seed)
    model = network(1 + max(int(row["label"]) for row in train))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    pipeline = road(train, given.batch, reuse=given.reuse, echo=given.echo)
    print(pipeline.explain())
    found = 0.0
    with penstock.torch.loader(pipeline, seed=given.seed) as loader:
        # An epoch with echo delivers more, so as many fewer make the same number of steps.
        for epoch in range(max(1, round(given.epochs / given.echo))):
            started = time.perf_counter()
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["audio"]), batch["label"].long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            seconds = time.perf_counter() - started
            found = accuracy(model, test)
            print(f"epoch {epoch}: {seconds:.1f} s, {found:.1%} of the test recordings right")
        stats = loader.stats()
    decoded = next(stage.samples for stage in stats.stages if stage.name == "decode")
    print(f"{stats.samples} samples trained on, {decoded} recordings decoded")
    if stats.refurbish is not None:
        print(f"{stats.refurbish.fresh} spectrograms made, {stats.refurbish.reused} used again")
    return found


if __name__ == "__main__":
    main()
