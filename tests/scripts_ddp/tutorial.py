"""torch's DDP tutorial, in the form that torchrun starts."""

import sys

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"Start running basic DDP example on rank {rank}.")
    torch.manual_seed(rank)  # DDP begins with rank 0's weights all the same
    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.05)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        loss = loss_fn(outputs, torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank == 0:
        torch.save({"losses": losses, "model": ddp_model.module.state_dict()}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    demo_basic(sys.argv[1])
