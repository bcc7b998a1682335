"""A loop of accelerate: accumulation, clipping, and a scheduler."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(9)
x = torch.randn(384, 6)
loader = DataLoader(TensorDataset(x, x[:, :3].tanh()), 8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.item())
if accelerator.is_main_process:
    torch.save({"losses": losses, "model": accelerator.unwrap_model(model).state_dict()}, sys.argv[1])
accelerator.end_training()
