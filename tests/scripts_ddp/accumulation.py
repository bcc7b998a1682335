"""Gradients of four batches for each step, exchanged with the last; clipped; evaluated on rank 0 between passes."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(7)
inputs = torch.randn(128, 6)
dataset = TensorDataset(inputs, torch.tanh(inputs @ torch.randn(6, 3)).argmax(1))
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(dataset, seed=5)
loader = DataLoader(dataset, 4, sampler=sampler)
losses = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % 4 == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
        total += loss.item()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
    model.eval()
    with torch.no_grad():
        model(inputs)
if dist.get_rank() == 0:
    torch.save({"losses": losses, "model": model.module.state_dict()}, sys.argv[1])
dist.barrier()
dist.destroy_process_group()
