"""A LightningModule and its Trainer: accumulation, clipping, a scheduler, and a validation between passes."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("held_out", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


lightning.seed_everything(4)
x = torch.randn(128, 6)
rows = TensorDataset(x, x[:, :3].tanh())
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=2, strategy="ddp", logger=False, barebones=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                            gradient_clip_val=1.0, accumulate_grad_batches=2)  # fmt: skip
model = Model()
trainer.fit(model, DataLoader(rows, 8, shuffle=True), DataLoader(rows, 32))
if trainer.global_rank == 0:
    torch.save({"held_out": trainer.callback_metrics["held_out"], "model": model.net.state_dict()}, sys.argv[1])
