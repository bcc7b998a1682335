"""A communication hook of the script's own: ranks agree on the signs of their gradients."""

import sys

import torch
import torch.distributed as dist
from beside import data
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def signs(group, bucket):
    summed = dist.all_reduce(bucket.buffer().sign_(), group=group, async_op=True).get_future()
    return summed.then(lambda done: done.value()[0] / dist.get_world_size(group))


dist.init_process_group("gloo")
torch.manual_seed(6)
model = DDP(nn.Linear(6, 3))
model.register_comm_hook(dist.group.WORLD, signs)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for x, y in data(dist.get_rank(), 12):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    torch.save({"losses": losses, "model": model.module.state_dict()}, sys.argv[1])
dist.destroy_process_group()
