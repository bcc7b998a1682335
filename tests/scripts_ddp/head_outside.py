"""A head outside of the wrapper, with parameters in two optimizers. The script itself averages their gradients."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    body, head, factor = nn.Linear(8, 8), nn.Linear(8, 2), nn.Parameter(torch.tensor(1.5))
    ddp = DDP(body)
    first = torch.optim.SGD([*ddp.parameters(), *head.parameters()], lr=0.1, momentum=0.5)
    second = torch.optim.AdamW([factor], lr=0.05)
    rng, losses = torch.Generator().manual_seed(rank), []
    for step in range(12):
        loss = (factor * head(torch.tanh(ddp(torch.randn(4, 8, generator=rng))))).square().mean()
        first.zero_grad(set_to_none=step % 2 == 0)
        second.zero_grad()
        loss.backward()
        for p in (*head.parameters(), factor):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        first.step()
        second.step()
        losses.append(loss.item())
    if rank == 0:
        torch.save({"losses": losses, "body": body.state_dict(), "head": head.state_dict(), "factor": factor.data}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
