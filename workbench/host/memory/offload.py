"""State that a rank keeps away from its device, in its host's memory or on disk, by kind and bucket.

Parameters kept away are a copy. Gradients and optimizer state exist only there. The host's processor steps a shard in
its memory. On a CPU, device and host are one memory.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, clone
from torch.optim import Optimizer

from workbench.host.memory.scratch_file import FileExtent, ScratchFile
from workbench.host.placement.optimizer_slots import Settings, step_apart, swap_bucket_slots
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Bucket, Op, StrategyError

OFFLOAD_LANES = ("offload", "fetch")  # without the network
Key = tuple[str, str]  # (parameter, slot)
VALUES_KEY = "", "values"  # of parameters or gradients
Held = dict[Key, Any]  # tensors and other values
Devices = dict[Key, torch.device]
Hops = list[tuple[str, int]]  # ("host" or "disk", bytes)


def name_span(op: Op) -> str:
    """Names an Op's Span."""
    shard, what, to = op.args[:3]
    return f"{op.verb} {what} {shard.index if shard.index >= 0 else ~shard.index} to {to}"


class OffloadedItem(NamedTuple):
    """State kept away.

    devices: the original devices of its tensors
    extent:  their place on the disk, in the order of `devices`; then `values` has no tensors
    """

    where: str
    values: Held
    devices: Devices
    nbytes: int
    extent: FileExtent | None = None


class OffloadStore:
    """One rank's state away from its device.

    out:  copies a device's tensor into the host's memory
    into: copies one from there to a device
    """

    def __init__(self, out: Callable[[Tensor], Tensor] = clone,
                 into: Callable[[Tensor, torch.device], Tensor] = lambda x, device: x.clone()) -> None:  # fmt: skip
        self._out, self._into = out, into
        self._items: dict[tuple[str, int], OffloadedItem] = {}
        self._scratch = ScratchFile()
        self._lock = threading.Lock()
        self._now: Counter[str] = Counter()  # bytes by place
        self._most: Counter[str] = Counter()

    # -- amounts --

    def take_peaks(self) -> dict[str, int]:
        """Returns peaks by place since the last call."""
        with self._lock:
            if not self._most and not self._now:  # a Counter is slow
                return {}
            most, self._most = self._most, Counter(self._now)
        return dict(most)

    @property
    def item_count(self) -> int:
        return len(self._items)

    def has_kind(self, what: str) -> bool:
        return any(kind == what for kind, _ in self._items)

    def list_slots(self) -> set[str]:
        found = [{*item.values, *item.devices} for (what, _), item in self._items.items() if what == "optimizer state"]
        return {f"{slot}/{name}" for keys in found for name, slot in keys}

    def renumber_items(self) -> None:
        """Renumbers old buckets' items as ~index before new buckets are cut."""
        self._items = {(what, ~index): item for (what, index), item in self._items.items()}

    def drop_old_items(self) -> None:
        """Old buckets' items have no elements."""
        for what, index in [key for key in self._items if key[1] < 0]:
            self._drop_item(what, index)

    def read_parameters(self, index: int) -> Tensor | None:
        """Returns None if they are here."""
        item = self._items.get(("parameters", index))
        if item is None:
            return None
        found: Tensor = self._read_item(item)[VALUES_KEY]
        return found

    # -- away and back --

    def offload_state(
        self, layout: ParameterLayout, optimizer: Optimizer, shard: Bucket, what: str, where: str
    ) -> Hops:
        """Stores `what` on "host" or "disk". Returns the hops."""
        item = self._items.get((what, shard.index))
        if what == "parameters":
            layout.note_copy(shard.index, True)
        if item is not None:
            return self._move_item(shard.index, what, item, where)
        found = self._take_state(layout, optimizer, shard, what)
        devices = {key: x.device for key, x in found.items() if isinstance(x, Tensor)}
        held = {key: self._out(x) if isinstance(x, Tensor) else x for key, x in found.items()}
        nbytes = _count_bytes(held)
        self._store_item(what, shard.index, held, devices, where)
        return [("host", nbytes), *([("disk", nbytes)] if where == "disk" else [])]

    def fetch_state(self, layout: ParameterLayout, optimizer: Optimizer, shard: Bucket, what: str, where: str,
              keep: bool) -> tuple[Tensor | None, Hops]:  # fmt: skip
        """Brings `what` to "host" or "device". Returns (n,) values for the device, and the hops.

        keep: whether to leave a copy in the old place
        """
        item = self._find_item(what, shard)
        hops: Hops = [("disk", item.nbytes)] if item.where == "disk" else []
        if where == "host":
            return None, self._move_item(shard.index, what, item, "host")
        values = self._read_item(item)
        values = {key: self._into(x, item.devices[key]) if isinstance(x, Tensor) else x for key, x in values.items()}
        if not keep:
            self._drop_item(what, shard.index)
            layout.note_copy(shard.index, self.read_parameters(shard.index) is not None)
        if what == "optimizer state":
            self._return_slots(layout, optimizer, shard, values)
        return values.get(VALUES_KEY), [*hops, ("host", item.nbytes)]

    def step_shard(self, layout: ParameterLayout, optimizer: Optimizer, shard: Bucket, settings: Settings,
             unused: Collection[str] = ()) -> None:  # fmt: skip
        """Steps this shard in the host's memory, and uses up its gradients.

        unused: parameters that no rank used: they are not stepped
        """
        values, grads = (self._require_in_memory(what, shard)[VALUES_KEY] for what in ("parameters", "gradients"))
        state = self._require_in_memory("optimizer state", shard)
        stepped = self._step_values(layout, optimizer, shard, values, grads, state, settings, unused)
        home = self._items["parameters", shard.index].devices[VALUES_KEY]
        devices = {key: home if x.numel() > 1 or values.numel() == 1 else x.device  # counters stay on the host
                   for key, x in stepped.items() if isinstance(x, Tensor)}  # fmt: skip
        self._drop_item("gradients", shard.index)
        self._drop_item("optimizer state", shard.index)
        self._store_item("optimizer state", shard.index, stepped, devices, "host")

    # -- internals --

    def _find_item(self, what: str, shard: Bucket) -> OffloadedItem:
        item = self._items.get((what, shard.index))
        if item is None:
            raise StrategyError(f"{what} of {shard.name} are on the device: call `offload` first")
        return item

    def _require_in_memory(self, what: str, shard: Bucket) -> Held:
        item = self._find_item(what, shard)
        if item.where != "host":
            raise StrategyError(f"{what} of {shard.name} are on the {item.where}: call `fetch` to the host first")
        return item.values

    def _take_state(self, layout: ParameterLayout, optimizer: Optimizer, shard: Bucket, what: str) -> Held:
        """The device keeps only parameters."""
        if what == "parameters":
            start = shard.offset - layout.weight_bucket(shard.index).offset - layout.begins[shard.index]
            return {VALUES_KEY: layout.weights[shard.index][start : start + shard.data.numel()]}
        if what == "gradients":
            grads = shard.data
            shard.release()
            layout.release_gradients(shard.index)
            return {VALUES_KEY: grads}
        return self._take_slots(layout, optimizer, shard)

    def _take_slots(self, layout: ParameterLayout, optimizer: Optimizer, shard: Bucket) -> Held:
        return swap_bucket_slots(layout, optimizer, shard.index)

    def _return_slots(self, layout: ParameterLayout, optimizer: Optimizer, shard: Bucket, values: Held) -> None:
        swap_bucket_slots(layout, optimizer, shard.index, values)

    def _step_values(
        self,
        layout: ParameterLayout,
        optimizer: Optimizer,
        shard: Bucket,
        values: Tensor,
        grads: Tensor,
        state: Held,
        by: Settings,
        unused: Collection[str],
    ) -> Held:
        return step_apart(layout, optimizer, shard, values, grads, state, by, unused)

    def _move_item(self, index: int, what: str, item: OffloadedItem, where: str) -> Hops:
        if item.where == where:
            return []
        values = self._read_item(item)
        self._drop_item(what, index)
        self._store_item(what, index, values, item.devices, where)
        return [("disk", item.nbytes)]

    def _store_item(self, what: str, index: int, held: Held, devices: Devices, where: str) -> None:
        nbytes, extent = _count_bytes(held), None
        if where == "disk" and devices and not next(held[key] for key in devices).is_meta:
            extent = self._scratch.write_tensors([held[key] for key in devices])
            held = {key: x for key, x in held.items() if key not in devices}
        self._items[what, index] = OffloadedItem(where, held, devices, nbytes, extent)
        self._add_bytes(where, nbytes)

    def _read_item(self, item: OffloadedItem) -> Held:
        if item.extent is None:
            return item.values
        return item.values | dict(zip(item.devices, self._scratch.read_tensors(item.extent), strict=True))

    def _drop_item(self, what: str, index: int) -> None:
        item = self._items.pop((what, index))
        if item.extent is not None:
            self._scratch.free_extent(item.extent)
        self._add_bytes(item.where, -item.nbytes)

    def _add_bytes(self, where: str, nbytes: int) -> None:
        with self._lock:
            self._now[where] += nbytes
            self._most[where] = max(self._most[where], self._now[where])


def _count_bytes(held: Held) -> int:
    return sum(x.numel() * x.element_size() for x in held.values() if isinstance(x, Tensor))
