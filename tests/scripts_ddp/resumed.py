"""Trains with batch norm, dropout and Adam, saves everything, and goes on from that in a second call."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 8  # of one call

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--saved", type=Path, required=True)
args = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(11)
net = nn.Sequential(nn.Linear(6, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
first, losses = 0, []
torch.manual_seed(20 + rank)
if args.saved.exists():
    state = torch.load(args.saved)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first, losses = state["step"], state["losses"]
    torch.manual_seed(40 + rank)
dist.barrier()
for step in range(first, first + STEPS):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(9, 6, generator=generator)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
    loss.backward()
    optimizer.step()
    scheduler.step()
    losses.append(loss.item())
if rank == 0:
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "step": first + STEPS, "losses": losses}, args.saved)
    torch.save({"model": net.state_dict(), "losses": losses}, args.out)
dist.destroy_process_group()
