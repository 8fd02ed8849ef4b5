"""Trains a small network on photographs in class folders, as a tutorial would."""

import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.classifier = nn.Linear(8 * 16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--augment", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    fixed = [transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor(), normalize]
    random = [
        transforms.RandomResizedCrop(32),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        normalize,
    ]
    train_set = datasets.ImageFolder(
        f"{args.data}/train", transforms.Compose(random if args.augment else fixed)
    )
    val_set = datasets.ImageFolder(f"{args.data}/val", transforms.Compose(fixed))
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size, shuffle=True, num_workers=args.workers
    )
    val_loader = DataLoader(val_set, batch_size=args.batch_size, num_workers=args.workers)

    model = Net(len(train_set.classes))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    seen = hashlib.sha256()
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            seen.update(images.numpy().tobytes())
            seen.update(labels.numpy().tobytes())
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in val_loader:
                seen.update(images.numpy().tobytes())
                correct += (model(images).argmax(1) == labels).sum().item()
        print(f"epoch {epoch}: {correct} of {len(val_set)} right")
    generator = torch.randint(1 << 30, ()).item()
    print(f"loss {loss.item():.6f} data {seen.hexdigest()[:16]} generator {generator}")


if __name__ == "__main__":
    main()
