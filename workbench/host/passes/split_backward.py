"""A backward in two halves: first the gradient of the input, later those of the parameters.

The first half notes the gradients at each node from which parameters branch off. The second half continues there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """Runs to `x`, later to `params`."""

    def __init__(self, made: Tensor, x: Tensor, params: Iterable[nn.Parameter]) -> None:
        self._made, self._x = made, x
        self._params = [p for p in params if p.requires_grad]
        self._gradients_of_node: dict[Node, tuple[Tensor | None, ...]] = {}
        self._grad: Tensor | None = None
        self._hanging = _find_branches(made, x, self._params)

    def of_input(self, grad: Tensor) -> Tensor | None:
        """Returns None if `made` does not depend on `x`."""
        self._grad = grad
        hooks = [node.register_prehook(partial(self._note_gradients, node)) for node in self._hanging or ()]
        try:
            (found,) = torch.autograd.grad(self._made, self._x, grad, retain_graph=True, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def of_params(self) -> None:
        """Adds to the parameters' `grad`."""
        if self._hanging is None:  # parameters branch off from several nodes
            if self._params:
                self._made.backward(self._grad, inputs=self._params)
            return
        for node, params in self._hanging.items():
            grads = self._gradients_of_node.pop(node, ())
            edges = [(GradientEdge(node, k), grad) for k, grad in enumerate(grads) if grad is not None]
            if edges:
                torch.autograd.backward([edge for edge, _ in edges], [grad for _, grad in edges], inputs=params)
        beside = [p for p in self._params if not any(p is q for some in self._hanging.values() for q in some)]
        if beside:  # parameters off the way to `x`
            self._made.backward(self._grad, inputs=beside)

    def _note_gradients(self, node: Node, grads: Sequence[Tensor | None]) -> None:
        self._gradients_of_node[node] = tuple(grads)


def _find_branches(made: Tensor, x: Tensor, params: list[nn.Parameter]) -> dict[Node, list[nn.Parameter]] | None:
    """Returns, by node from `made` to `x`, parameters that branch off there, last node first.

    None if a parameter branches off from several nodes, because it might count twice.
    """
    root, end = made.grad_fn, get_gradient_edge(x).node
    leaf = {get_gradient_edge(p).node: p for p in params}
    order = _sort_nodes(root)
    on_way = {end}
    for node in reversed(order):
        if any(after in on_way for after, _ in node.next_functions):
            on_way.add(node)
    found: dict[Node, list[nn.Parameter]] = {}
    seen: dict[nn.Parameter, int] = defaultdict(int)
    for node in order:
        if node not in on_way or node is end:
            continue
        todo, mine, known = [after for after, _ in node.next_functions if after not in on_way], [], set[Any]()
        while todo:
            one = todo.pop()
            if one is None or one in known:
                continue
            known.add(one)
            if one in leaf:
                mine.append(leaf[one])
            todo += [after for after, _ in one.next_functions]
        for p in mine:
            seen[p] += 1
        if mine:
            found[node] = mine
    return None if any(count > 1 for count in seen.values()) else found


def _sort_nodes(root: Node | None) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    todo: list[tuple[Node | None, bool]] = [(root, False)]
    while todo:
        node, left = todo.pop()
        if node is None or (node in seen and not left):
            continue
        if left:
            order.append(node)
            continue
        seen.add(node)
        todo.append((node, True))
        todo += [(after, False) for after, _ in node.next_functions if after not in seen]
    return order[::-1]
