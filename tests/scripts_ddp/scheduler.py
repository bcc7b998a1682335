"""A scheduler per step, groups with their own rates, command line arguments, a module next to the script."""

import argparse

import torch
import torch.distributed as dist
from beside import data
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LambdaLR


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    model = DDP(net, find_unused_parameters=True)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    warm = LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    scheduler = ChainedScheduler([warm, CosineAnnealingLR(optimizer, T_max=6)])
    losses = []
    for x, y in data(dist.get_rank(), args.steps):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        torch.save({"losses": losses, "model": net.state_dict(), "lr": scheduler.get_last_lr()}, args.out)
    dist.destroy_process_group()


main()
