"""Batch norm, accumulation under `no_sync`, and an evaluation by all ranks under `no_grad` after each epoch."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        found = [F.cross_entropy(model(a), b, reduction="sum") for a, b in zip(x.split(8), y.split(8), strict=True)]
    model.train()
    total = torch.stack(found).sum()
    dist.all_reduce(total)
    return total.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--own-statistics", action="store_true")
    parser.add_argument("--sync-bn", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    net[1].running_mean.fill_(0.1 * rank)  # the constructor sends rank 0's, or each rank keeps its own
    if args.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, broadcast_buffers=False) if args.own_statistics else DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(64, 1, 6, 6, generator=generator) * (1 + rank)
    y = (3 * x.mean((1, 2, 3))).round().long() % 3
    losses, held_out = [], []
    for _ in range(3):
        for number, (a, b) in enumerate(zip(x[:48].split(6), y[:48].split(6), strict=True)):
            if number % 2 == 0:
                optimizer.zero_grad()
                with model.no_sync():
                    first = F.cross_entropy(model(a), b)
                    first.backward()
                continue
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            losses.append(first.item() + loss.item())
        held_out.append(evaluate(model, x[48:], y[48:]))
    means = [torch.empty(4) for _ in range(size)]
    dist.all_gather(means, net[1].running_mean)
    if rank == 0:
        torch.save({"losses": losses, "held_out": held_out, "means": means, "model": net.state_dict()}, args.out)
    dist.destroy_process_group()


main()
