"""Mixed precision: autocast in bfloat16 and a GradScaler, which leaves out a step whose gradients overflow."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(3)
model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)), gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
torch.manual_seed(10 + dist.get_rank())
losses = []
for _ in range(12):
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
if dist.get_rank() == 0:
    torch.save({"losses": losses, "model": model.module.state_dict(), "scale": scaler.get_scale()}, sys.argv[1])
dist.destroy_process_group()
