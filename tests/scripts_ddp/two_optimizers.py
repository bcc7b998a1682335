"""Two optimizers of one model, and backwards that are all exchanged and added up."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(2)
model = DDP(AutoEncoder())
first = torch.optim.SGD(model.module.encoder.parameters(), lr=0.1, momentum=0.9)
second = torch.optim.Adam(model.module.decoder.parameters(), lr=0.02)
torch.manual_seed(20 + local)
losses = []
for _ in range(6):
    for x in torch.randn(2, 8, 6):
        loss = F.mse_loss(model(x), x)
        loss.backward()
        losses.append(loss.item())
    first.step()
    second.step()
    model.zero_grad()
if rank == 0:
    torch.save({"losses": losses, "model": model.module.state_dict()}, sys.argv[1])
dist.destroy_process_group()
