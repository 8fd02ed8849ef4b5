"""Trains with Accelerate, which wraps loaders in its own classes."""

import argparse
import hashlib

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.full((4,), index / 50)
        return {"x": x, "y": x.square().sum()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(Squares(), batch_size=8, shuffle=True, num_workers=args.workers)
    val = DataLoader(Squares(), batch_size=8, num_workers=args.workers)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    seen = hashlib.sha256()
    for _ in range(args.epochs):
        for batch in train:
            seen.update(batch["x"].numpy().tobytes())
            loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        for batch in val:
            seen.update(batch["y"].numpy().tobytes())
    accelerator.print(
        f"loss {loss.item():.6f} data {seen.hexdigest()[:16]} "
        f"generator {torch.randint(1 << 30, ()).item()} {isinstance(train, DataLoader)}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
