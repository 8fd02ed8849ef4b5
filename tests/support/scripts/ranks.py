"""Trains on several ranks, for torchrun: DistributedDataParallel and a DistributedSampler."""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Lines(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / 42, 1.0])
        return x, 3 * x[0] - 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    data = Lines()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=args.workers)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = hashlib.sha256()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            seen.update(x.numpy().tobytes())
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, seen.hexdigest()[:16])
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f} data {' '.join(digests)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
