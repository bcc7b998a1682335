"""Options of DistributedDataParallel: small buckets, a static graph, gradients that are views of buckets."""

import sys

import torch
import torch.distributed as dist
from beside import data
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
model = DDP(net, bucket_cap_mb=0.015625, static_graph=True, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for x, y in data(dist.get_rank(), 12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    torch.save({"losses": losses, "model": net.state_dict()}, sys.argv[1])
dist.destroy_process_group()
