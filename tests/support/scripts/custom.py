"""Trains on sequences of many lengths with its own dataset, sampler and collate function."""

import argparse
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class Sequences(Dataset):  # type: ignore[misc]
    def __init__(self, count: int, broken: int | None = None) -> None:
        self.broken = broken
        rng = np.random.default_rng(0)
        self.items = [
            rng.normal(size=(int(rng.integers(3, 9)), 4)).astype(np.float32) for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise LookupError(f"sequence {index} is missing")
        values = torch.from_numpy(self.items[index])
        return {"values": values, "label": int(values.mean() > 0), "name": f"sequence {index}"}


class ByLength(Sampler):  # type: ignore[misc]
    """Batches of sequences of similar length, in a new order each epoch."""

    def __init__(self, dataset: Sequences, batch_size: int) -> None:
        order = sorted(range(len(dataset)), key=lambda i: len(dataset.items[i]))
        self.batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self.batches)
        random.shuffle(batches)
        yield from batches


def pad(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
    longest = max(len(sample["values"]) for sample in samples)
    values = torch.zeros(len(samples), longest, 4)
    for row, sample in zip(values, samples, strict=True):
        row[: len(sample["values"])] = sample["values"]
    labels = torch.tensor([sample["label"] for sample in samples])
    return values, labels, tuple(sample["name"] for sample in samples)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--broken", type=int)
    args = parser.parse_args()
    torch.manual_seed(1)
    random.seed(1)
    dataset = Sequences(args.samples, args.broken)
    loader = DataLoader(
        dataset,
        batch_sampler=ByLength(dataset, 8),
        collate_fn=pad,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    seen = hashlib.sha256()
    try:
        for _ in range(args.epochs):
            for values, labels, names in loader:
                assert isinstance(names, tuple)
                seen.update(values.numpy().tobytes() + " ".join(names).encode())
                loss = nn.functional.cross_entropy(model(values).mean(1), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except LookupError:
        print("skipped the rest: a sequence is missing")
        raise SystemExit(3) from None
    drawn = f"{random.random():.9f} {torch.randint(1 << 30, ()).item()}"
    print(f"loss {loss.item():.6f} data {seen.hexdigest()[:16]} generators {drawn}")


if __name__ == "__main__":
    main()
