"""Trains with Lightning: a module, a Trainer, two loaders."""

import argparse
import hashlib
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
        self.seen = hashlib.sha256()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.seen.update(x.numpy().tobytes())
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        x, y = batch
        self.seen.update(x.numpy().tobytes())
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    lightning.seed_everything(3, verbose=False)
    x = torch.randn(60, 10)
    data = TensorDataset(x, x[:, :3].argmax(1))
    train, val = torch.utils.data.random_split(data, [48, 12])
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(train, batch_size=8, shuffle=True, num_workers=args.workers),
        DataLoader(val, batch_size=8, num_workers=args.workers),
    )
    loss = trainer.callback_metrics["val_loss"].item()
    print(f"loss {loss:.6f} data {model.seen.hexdigest()[:16]} steps {trainer.global_step}")


if __name__ == "__main__":
    main()
