"""Trains a small network to recognise spoken words, and uses each recording more than once.

    python examples/speech.py --data DIGITS.parquet [--reuse 3] [--echo 2] [--epochs 8]

The data is a Parquet file with a column ``audio`` (the bytes of WAV or FLAC files) and a column
``label``. Every fifth row is used for testing. ``--reuse`` keeps spectrograms and masks them anew
for every use (refurbish). ``--echo`` uses every decoded recording several times, cropped and masked
anew.
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
QUIET = 1e-4  # softer sound counts as silence, which fills most of the second of a short word


def rows(path: Path) -> tuple[list[Any], list[Any]]:
    """The recordings for training and for testing."""
    table = pq.read_table(path, columns=["audio", "label"]).to_pylist()
    test = [row for place, row in enumerate(table) if place % 5 == 0]
    return [row for place, row in enumerate(table) if place % 5], test


def make_pipeline(data: list[Any], batch: int, *, reuse: int, echo: float) -> ps.Pipeline:
    """A pipeline from bytes to masked spectrograms: random crop and gain, then SpecAugment."""
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
        nn.AdaptiveAvgPool2d((5, 1)),  # pools over time only: the pitch matters
        nn.Flatten(),
        nn.Linear(5 * 64, classes),
    )


def accuracy(model: nn.Module, data: list[Any]) -> float:
    """The share of test recordings that are classified correctly."""
    pipeline = (
        ps.from_dataset(data, random=False)
        .map(ps.audio.decode(rate=RATE, mono=True))
        .map(ps.audio.crop_or_pad(seconds=1.0, rate=RATE))
        .map(ps.audio.mel_spectrogram(RATE, mels=MELS, floor=QUIET))
        .batch(64)
    )
    model.eval()
    correct = 0
    with torch.no_grad(), penstock.torch.loader(pipeline, workers=0, shuffle=False) as loader:
        for batch in loader:
            correct += int((model(batch["audio"]).argmax(1) == batch["label"]).sum())
    model.train()
    return correct / len(data)


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="a Parquet file")
    parser.add_argument("--reuse", type=int, default=1, help="uses of a kept spectrogram")
    parser.add_argument("--echo", type=float, default=1.0, help="uses of a decoded recording")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the recordings")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    train, test = rows(args.data)
    torch.manual_seed(args.seed)
    model = network(1 + max(int(row["label"]) for row in train))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    pipeline = make_pipeline(train, args.batch, reuse=args.reuse, echo=args.echo)
    print(pipeline.explain())
    test_accuracy = 0.0
    with penstock.torch.loader(pipeline, seed=args.seed) as loader:
        # With echo an epoch has more samples, so fewer epochs make the same number of steps.
        for epoch in range(max(1, round(args.epochs / args.echo))):
            started = time.perf_counter()
            for batch in loader:
                loss = nn.functional.cross_entropy(model(batch["audio"]), batch["label"].long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            seconds = time.perf_counter() - started
            test_accuracy = accuracy(model, test)
            print(f"epoch {epoch}: {seconds:.1f} s, {test_accuracy:.1%} of test recordings correct")
        stats = loader.stats()
    decoded = next(stage.samples for stage in stats.stages if stage.name == "decode")
    print(f"{stats.samples} samples trained on, {decoded} recordings decoded")
    if stats.refurbish is not None:
        print(f"{stats.refurbish.fresh} spectrograms made, {stats.refurbish.reused} used again")
    return test_accuracy


if __name__ == "__main__":
    main()
