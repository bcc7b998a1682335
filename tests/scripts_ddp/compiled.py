"""torch.compile around DistributedDataParallel, and a subclass of it, as projects write their own."""

import sys

import torch
import torch.distributed as dist
from beside import data
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Named(DistributedDataParallel):
    """Looks up missing attributes in the model inside."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


dist.init_process_group("gloo")
torch.manual_seed(8)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
model = Named(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
called = torch.compile(model, backend="eager")
losses = []
for x, y in data(dist.get_rank(), 12):
    optimizer.zero_grad()
    loss = F.mse_loss(called(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    torch.save({"losses": losses, "model": net.state_dict()}, sys.argv[1])
dist.destroy_process_group()
