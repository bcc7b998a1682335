"""An embedding with sparse gradients, which SparseAdam steps, and dense layers on top of it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.EmbeddingBag(60, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, words):
        return self.head(self.rows(words))


dist.init_process_group("gloo")
torch.manual_seed(7)
model = DDP(Bag())
rows = torch.optim.SparseAdam(list(model.module.rows.parameters()), lr=0.02)
head = torch.optim.Adam(model.module.head.parameters(), lr=0.02)
generator = torch.Generator().manual_seed(dist.get_rank())
losses = []
for _ in range(12):
    words = torch.randint(60, (8, 3), generator=generator)
    loss = (model(words) - words.float().mean(1, keepdim=True) / 60).square().mean()
    rows.zero_grad(), head.zero_grad()
    loss.backward()
    rows.step(), head.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    torch.save({"losses": losses, "model": model.module.state_dict()}, sys.argv[1])
dist.destroy_process_group()
