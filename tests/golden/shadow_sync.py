"""ShadowSync in numpy, for a given order of messages: tables on a server, and optimizers that step single rows.

Zheng et al., 2020, https://arxiv.org/abs/2003.03477. Rows step as under torch.optim.SparseAdam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]  # ids (B, 2), wanted (B,)
Params = dict[str, np.ndarray]  # tables a and b, head w


def gradients(at: Params, batch: Batch) -> tuple[float, Params]:
    """Returns the loss, the mean of (w . [a[id], b[id]] - wanted)^2 / 2, and its gradients."""
    ids, wanted = batch
    e = np.concatenate([at["a"][ids[:, 0]], at["b"][ids[:, 1]]], 1)
    off = (e @ at["w"] - wanted) / len(wanted)
    of_e, width = np.outer(off, at["w"]), at["a"].shape[1]
    grads = {name: np.zeros_like(x) for name, x in at.items()}
    np.add.at(grads["a"], ids[:, 0], of_e[:, :width])
    np.add.at(grads["b"], ids[:, 1], of_e[:, width:])
    grads["w"] = off @ e
    return float((off**2).sum() * len(wanted) / 2), grads


class Adam:
    """Steps a whole tensor, or some of its rows; each tensor has one counter."""

    def __init__(self, lr: float) -> None:
        self.lr = lr
        self.m: Params = {}
        self.v: Params = {}
        self.t: dict[str, int] = {}

    def step(self, name: str, x: np.ndarray, grad: np.ndarray, rows: np.ndarray | slice = slice(None)) -> None:
        m, v = (kept.setdefault(name, np.zeros_like(x)) for kept in (self.m, self.v))
        t = self.t[name] = self.t.get(name, 0) + 1
        m[rows] = 0.9 * m[rows] + 0.1 * grad[rows]
        v[rows] = 0.999 * v[rows] + 0.001 * grad[rows] ** 2
        x[rows] -= self.lr * (m[rows] / (1 - 0.9**t)) / (np.sqrt(v[rows] / (1 - 0.999**t)) + 1e-8)


def in_turn(x: Params, lr: float, batches: Callable[[int, int], Batch], shadow: range, steps: int) -> list[float]:
    """Losses of rank 0 of two that train by the mean gradient, but in the steps of `shadow` alone, with lazy tables."""
    adam, losses, used = Adam(lr), [], [0, 0]
    for step in range(steps):
        training = [0] if step in shadow else [0, 1]
        found = [gradients(x, batches(rank, used[rank])) for rank in training]
        ids = batches(0, used[0])[0]
        for rank in training:
            used[rank] += 1
        losses.append(found[0][0])
        for name in x:
            grad = sum(g[name] for _, g in found) / len(training)
            lazily = step in shadow and name != "w"
            adam.step(name, x[name], grad, np.unique(ids[:, "ab".index(name)]) if lazily else slice(None))
    return losses


def served(x: Params, lr: float, batches: Callable[[int, int], Batch], turns: Iterable[tuple[int, str]],
           trainers: int) -> list[list[float]]:  # fmt: skip
    """Each trainer's losses by plain steps, given in which order the server hears its look-ups and pushes."""
    heads, losses = [x["w"].copy() for _ in range(trainers)], [list[float]() for _ in range(trainers)]
    rows: dict[int, Params] = {}
    for who, what in turns:
        if what == "look up":
            rows[who] = {name: x[name].copy() for name in "ab"}
            continue
        loss, grads = gradients({**rows[who], "w": heads[who]}, batches(who, len(losses[who])))
        losses[who].append(loss)
        heads[who] = heads[who] - lr * grads["w"]
        for name in "ab":
            x[name] -= lr * grads[name]
    return losses


def averaged(x: Params, lr: float, batches: Callable[[int, int], Batch], block: tuple[float, float, float],
             events: Iterable[tuple[str, int]], heard: Iterable[int],
             elastic: bool = False) -> tuple[list[list[float]], float]:  # fmt: skip
    """Two trainers' losses by plain steps, and that of rank 0's next batch once what they have in common goes on.

    block:  alpha, eta, zeta; with eta = 0 and zeta = 1 the shadows average; `elastic`: alpha alone counts
    events: "forward", "update", "look", "meet" (the centre), "correct", and which trainer's, in an order that could be
    heard:  whom the server hears: each trainer looks up and pushes in turn
    """
    alpha, eta, zeta = block
    heads, losses = [x["w"].copy() for _ in range(2)], [list[float]() for _ in range(2)]
    before, w, delta, corrected = [x["w"]] * 2, x["w"].copy(), np.zeros_like(x["w"]), 0
    back = list(before)
    rows: list[list[Params]] = [[], []]
    grads: list[list[Params]] = [[], []]
    turns, pushed = iter(heard), [0, 0]

    def serve(who: int) -> None:
        if len(rows[who]) == pushed[who]:
            rows[who].append({name: x[name].copy() for name in "ab"})
            return
        for name in "ab":
            x[name] -= lr * grads[who][pushed[who]][name]
        pushed[who] += 1

    for what, who in events:
        if what == "forward":
            number = len(losses[who])
            while len(rows[who]) <= number:
                serve(next(turns))
            loss, found = gradients({**rows[who][number], "w": heads[who]}, batches(who, number))
            losses[who].append(loss)
            grads[who].append(found)
        elif what == "update":
            heads[who] = heads[who] - lr * grads[who][-1]["w"]
        elif what == "look":
            before[who] = heads[who].copy()
        elif what == "meet":
            w = (1 - alpha) * w + alpha * before[who]
            back[who] = w
        elif elastic:
            heads[who] = heads[who] + alpha * (back[who] - before[who])
        else:
            if corrected % 2 == 0:
                delta = eta * delta + zeta * (sum(before) / 2 - w)
                w = w + delta
            corrected += 1
            heads[who] = heads[who] + alpha * (w - before[who])
    for who in turns:
        serve(who)
    common = (1 - alpha) * w + alpha * sum(heads) / 2 if elastic else sum(heads) / 2
    return losses, gradients({**x, "w": common}, batches(0, len(losses[0])))[0]
