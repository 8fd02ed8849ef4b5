"""A plain training script: torch's DataLoader over torchvision's ImageFolder, without Penstock.

The accelerator is simulated by a sleep, which uses no CPU. Files, augmentation and model are real.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="images, in one folder for each class")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--step", type=float, default=25, help="ms of the accelerator for a batch")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    augmentation = [
        transforms.RandomResizedCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, DEVIATION),
    ]
    data = ImageFolder(args.folder, transforms.Compose(augmentation))
    loader = DataLoader(
        data,
        batch_size=args.batch,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, len(data.classes))),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        began, images, total = time.perf_counter(), 0, 0.0
        for pixels, labels in loader:
            loss = nn.functional.cross_entropy(model(pixels[:, :, ::7, ::7]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.step / 1000)  # the rest of the step, on an accelerator
            images += len(labels)
            total += loss.item() * len(labels)
        speed = images / (time.perf_counter() - began)
        print(f"epoch {epoch}: {speed:.0f} images/s, loss {total / images:.2f}", flush=True)


if __name__ == "__main__":
    main()
