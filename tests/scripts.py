"""Typical training scripts in three parts: setup, loop, and the replacement of the loop.

`BATCH` is the number of examples in a batch. The loop leaves `losses`, one per step. The replacement leaves `task`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

HEAD = """
import random
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
torch.manual_seed(7)
inputs = torch.randn(96, 6)
targets = torch.tanh(inputs @ torch.randn(6, 3)) + 0.1 * torch.randn(96, 3)
labels = targets.argmax(1)
"""


class Script(NamedTuple):
    """made: setup before the loop; loop; adopted: its replacement; decays: whether its parameter groups differ"""

    made: str
    loop: str
    adopted: str

    def make(self, batch: int = 8) -> dict[str, Any]:
        """Returns the script's names before the loop."""
        names: dict[str, Any] = {"BATCH": batch, "__name__": "__main__"}
        exec(HEAD + self.made, names)
        return names

    def plain(self, batch: int = 8) -> dict[str, Any]:
        """Returns the script's names after the loop."""
        names = self.make(batch)
        exec(f"losses = []\ntorch.manual_seed(0)\nrandom.seed(0)\n{self.loop}", names)
        return names

    def task(self, batch: int = 8) -> Any:
        """Returns the adopted task."""
        names = self.make(batch)
        exec(self.adopted, names)
        return names["task"]


LOOP = """
for epoch in range(2):
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
"""
ADOPTED = """
from workbench import adopt
task = adopt(model, optimizer, loader, F.mse_loss)
"""
SCRIPTS = {
    "torch's DDP tutorial": Script("""
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler
class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)
    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp_model = DDP(ToyModel())
dist.destroy_process_group()
model = ddp_model.module
dataset = TensorDataset(inputs, targets)
sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=5)
loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
loss_fn = nn.MSELoss()
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
""", """
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
""", """
from workbench import adopt
task = adopt(ddp_model, optimizer, loader, loss_fn)
"""),
    "gradient accumulation": Script("""
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, labels), BATCH // 4, shuffle=True)
""", """
for epoch in range(2):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        total += loss.item()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
""", """
from workbench import adopt
task = adopt(model, optimizer, loader, F.cross_entropy, accumulate=4)
"""),
    "mixed precision": Script("""
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, labels), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
""", """
for epoch in range(2):
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
""", """
from workbench import adopt
task = adopt(model, optimizer, loader, criterion, autocast="bf16")
"""),
    "a scheduler per step": Script("""
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
decay = [p for p in model.parameters() if p.ndim > 1]
rest = [p for p in model.parameters() if p.ndim < 2]
groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0, "lr": 0.03}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
loader = DataLoader(TensorDataset(inputs, targets), BATCH, shuffle=True)
warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm, cosine])
""", """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
""", """
from workbench import adopt
task = adopt(model, optimizer, loader, F.mse_loss, scheduler=scheduler)
"""),
    "two optimizers": Script("""
class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))
model = AutoEncoder()
optimizer_e = torch.optim.SGD(model.encoder.parameters(), lr=0.1, momentum=0.9)
optimizer_d = torch.optim.SGD(model.decoder.parameters(), lr=0.02)
loader = DataLoader(TensorDataset(inputs), BATCH)
def reconstruction(model, batch):
    return F.mse_loss(model(batch[0]), batch[0])
""", """
for epoch in range(2):
    for batch in loader:
        loss = reconstruction(model, batch)
        optimizer_e.zero_grad(), optimizer_d.zero_grad()
        loss.backward()
        optimizer_e.step(), optimizer_d.step()
        losses.append(loss.item())
""", """
from workbench import adopt
task = adopt(model, (optimizer_e, optimizer_d), loader, reconstruction)
"""),
    "a custom sampler": Script("""
class HardFirst(Sampler):
    "The longest inputs first, in blocks that are shuffled."
    def __init__(self, data):
        self.order = data.norm(dim=1).argsort(descending=True).tolist()
    def __len__(self):
        return len(self.order)
    def __iter__(self):
        blocks = [self.order[i : i + 16] for i in range(0, len(self.order), 16)]
        for block in blocks:
            random.shuffle(block)
            yield from block
model = nn.Linear(6, 3)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, targets), BATCH, sampler=HardFirst(inputs))
""", """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
""", """
from workbench import adopt
task = adopt(model, optimizer, loader, nn.MSELoss())
"""),
    "dicts, a frozen layer and a dropped rest": Script("""
class Rows:
    def __len__(self):
        return 90
    def __getitem__(self, i):
        return {"x": inputs[i], "label": labels[i]}
def collate(rows):
    return {"x": torch.stack([r["x"] for r in rows]), "labels": torch.stack([r["label"] for r in rows])}
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.head(torch.relu(self.body(x))), labels)}
model = Classifier()
optimizer = torch.optim.Adam(model.head.parameters(), lr=0.02)  # the body stays as it is
loader = DataLoader(Rows(), 16, shuffle=True, collate_fn=collate, drop_last=True)
""", """
for epoch in range(3):
    for batch in loader:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
""", """
from workbench import adopt
task = adopt(model, optimizer, loader, lambda model, batch: model(**batch)["loss"])
"""),
    "batches that a sampler makes": Script("""
class Buckets(Sampler):
    "Batches of inputs of about the same length."
    def __len__(self):
        return 96 // BATCH
    def __iter__(self):
        by_length = inputs.norm(dim=1).argsort().split(BATCH)
        for k in torch.randperm(len(by_length)).tolist():
            yield by_length[k].tolist()
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, targets), batch_sampler=Buckets())
""", LOOP, ADOPTED),
    "a stream": Script("""
class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(inputs, targets)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Stream(), BATCH)
""", LOOP, ADOPTED),
}  # fmt: skip
