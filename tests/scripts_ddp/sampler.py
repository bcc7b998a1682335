"""A sampler of its own that deals out examples by rank, with loader processes, and metrics summed over ranks."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Rows(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(96, 6, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.x[i, :3].abs()}


class LongestFirst(Sampler):
    def __init__(self, data, rank, size):
        self.order = data.x.norm(dim=1).argsort(descending=True).tolist()[rank::size]

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


def main(out):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = DDP(nn.Linear(6, 3))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    rows = Rows()
    loader = DataLoader(rows, 8, sampler=LongestFirst(rows, rank, size), num_workers=1)
    losses = []
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    total = torch.tensor(losses)
    dist.all_reduce(total)
    if rank == 0:
        torch.save({"losses": losses, "model": model.module.state_dict(), "total": total}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
