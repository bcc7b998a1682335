"""A rank that follows a user's own training loop, from a script or a function.

[Note: Hand in hand] The loop has a thread of its own, and only one of it and the rank's thread runs at a time. When the
strategy asks for a forward, the loop runs until it calls backward. When the strategy asks for an update, the loop runs
until its optimizers have stepped. The backward runs on the rank's thread, so that buckets fill, overlap and are
exchanged as in any step. Between the update and the next forward the rank applies due changes, and may pause. So
strategies, compressors and changes do not depend on loops, nor loops on them.
"""

from __future__ import annotations

import gc
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.engine.collectives.wire import Aborted
from workbench.engine.script.batches import ScriptBatches
from workbench.engine.script.interception import DDPShim, LoopEnded, install_hooks, join_losses
from workbench.engine.script.optimizers import ScriptOptimizer, list_params
from workbench.engine.script.script_view import ScriptView
from workbench.engine.script.torchrun import open_script_store, prepare_main
from workbench.host.memory.batches import numbers
from workbench.settings import KnobError
from workbench.tasks import Learner, TaskError
from workbench.tasks._chance import Chance, Numbers
from workbench.tasks._loops import LED_RANKS

POLL_SECONDS = 0.2  # seconds between 2 checks whether this rank must leave
END_TIMEOUT = 5.0  # seconds that the rank waits for the loop's thread at the end
SHARDED_TYPES = {"DTensor", "FlatParameter"}  # of FSDP2 and FSDP


class NoSteps(RuntimeError):
    """A script has wrapped a model and ended without an error, but has trained no step."""


@contextmanager
def divide_gradients(params: Iterable[Tensor], share: float) -> Iterator[None]:
    """Inside, a backward divides the gradients of these parameters by `share`, which has scaled its loss."""
    removers = [p.register_hook(lambda grad: grad / share) for p in params if p.requires_grad]
    try:
        yield
    finally:  # a script may catch the error of a backward and go on
        for remover in removers:
            remover.remove()


class ScriptLoop(ScriptBatches):
    """One rank's loop, used by both threads. See [Note: Hand in hand].

    waits_at:   where the loop waits: "forward", "backward" or "updated"; "end" if it is over
    model:      the model that it trains, known from its first forward on
    wrappers:   the DistributedDataParallels that the loop has made
    optimizers: of the model's parameters
    began:      when the loop began to prepare the coming step
    """

    def __init__(self, run: ScriptView) -> None:
        super().__init__()
        install_hooks()
        self.run, self.task = run, run.experiment.task
        self.waits_at, self.began = "", None
        self.model: nn.Module | None = None
        self.wrappers: list[ref[DDPShim]] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._known: set[int] = set()  # parameters of the model and of optimizers, by id
        self._outside: list[Tensor] = []  # parameters that an optimizer steps, but the model does not have
        self._scales = False  # whether the last backward had a share of the loss
        self.has_left = False
        self._go: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._loss: tuple[Tensor, Tensor, dict[str, Any]]  # (loss to differentiate, loss to record, backward's options)
        self._open = self._updating = self._exchanges = False  # _exchanges: whether the last forward's backward does
        self._summed = False  # whether the gradients in `grad` are summed over ranks
        self._local: list[Tensor] = []  # losses of backwards without an exchange
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # gradients of earlier exchanges, to which the loop adds
        self._stepped: set[int] = set()  # parameters that optimizers have stepped in this update
        self._updated = False  # whether an optimizer of the loop has begun an update
        self._saved: WeakValueDictionary[tuple[Any, ...], Tensor] = WeakValueDictionary()  # tied parameters share one
        self._chance: Numbers | None = None
        self._store: dist.TCPStore | None = None  # on rank 0, of the script's process group
        self._thread = threading.Thread(target=self._run_loop, name=f"rank {run.rank.id} loop", daemon=True)

    # -- on the rank's thread --

    def make_learner(self) -> Learner:
        """Returns the loop as a task. Each function lets the loop run until it has made the value."""
        return Learner(model=self._run_to_forward, data=lambda *_: itertools.repeat(None), loss=self._run_forward,
                       optimizer=self._make_optimizer, scripted=True)  # fmt: skip

    def _make_optimizer(self, params: Iterable[Any], lr: float) -> Any:
        return ScriptOptimizer(self)

    def _run_to_forward(self) -> nn.Module:
        """Raises NoSteps or TaskError if the loop ends before a forward, TaskError without an optimizer, KnobError for
        2 models.
        """
        self._thread.start()
        self._await_loop()
        if self.waits_at == "end" and self.wrappers and not self._updated:
            raise NoSteps(f"{self.loop_name}: ended without a step, as a script does that resumes what was finished")
        if self.model is None or self.waits_at != "forward":
            raise TaskError(
                f"{self.loop_name}: ended without a step; it must call a DistributedDataParallel with gradients, or "
                f"loop over workbench.steps(loader, model)"
            )
        self._chance = numbers()
        mine, others = {id(p) for p in self.model.parameters()}, []
        for one in gc.get_objects():
            if issubclass(type(one), torch.optim.Optimizer):  # not isinstance: it asks the object
                if mine & list_params(one):
                    self.optimizers.append(one)
                    self._note_outside(one)
                elif len(LED_RANKS) == 1:  # else it may be another rank's
                    others.append(one)
        if not self.optimizers:
            raise TaskError(
                f"{self.loop_name}: no optimizer has a parameter of its model; create the optimizer before the first "
                f"forward"
            )
        self._require_one_model()
        for one in others if self.wrappers else ():
            self._note_outside(one)
        return self.model

    def _note_outside(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes parameters that the model does not have. The script itself exchanges their gradients.

        Raises KnobError if the loop knows nothing of ranks, or if a backward has scaled such a gradient already.
        """
        if self.model is not None:  # it may have new layers
            self._known.update(map(id, self.model.parameters()))
        found = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._known]
        if found and not self.wrappers and self.run.rank.size > 1:
            raise KnobError(
                f"{self.loop_name}: an optimizer steps parameters that the model does not have, and ranks would not "
                f"exchange their gradients; join both in one Module"
            )
        if self._scales and any(p.grad is not None for p in found):
            raise KnobError(
                f"{self.loop_name}: an optimizer steps parameters outside of the DistributedDataParallel, and was made "
                f"after the first forward; make it before, or take TorchDDP"
            )
        self._outside += found
        self._known.update(map(id, found))

    def _require_one_model(self) -> None:
        """Raises KnobError if an optimizer steps a second wrapped model. Later the error would come inside a step."""
        mine = {id(p) for p in self.model.parameters()} if self.model is not None else set()
        found = [one for made in self.wrappers if (one := made()) is not None and one.module is not self.model]
        theirs = [{id(p) for p in one.module.parameters() if p.requires_grad} - mine for one in found]
        for one in gc.get_objects():
            if issubclass(type(one), torch.optim.Optimizer) and any(other & list_params(one) for other in theirs):
                raise KnobError(self._two_models)

    @property
    def _two_models(self) -> str:
        return (
            f"{self.loop_name}: trains two models, and a run exchanges only one; wrap one, or join both in one Module"
        )

    @property
    def ddp_shim(self) -> DDPShim | None:
        every = [one for made in self.wrappers if (one := made()) is not None and one.module is self.model]
        return every[-1] if every else None

    def run_to_next(self) -> bool:
        """Returns whether there is one."""
        self.began = self.run.host.watch.now()
        if self.waits_at == "updated":
            self._let_run()
        return self.waits_at != "end"

    def _run_forward(self, module: Any, batch: Any) -> Tensor:
        """Returns the loss once the loop calls backward. Raises LoopEnded if it goes elsewhere."""
        if self.waits_at == "forward":
            self._let_run()
        if self.waits_at != "backward":
            raise LoopEnded
        self._note_added()
        return self._loss[0]

    def _note_added(self) -> None:
        """Ranks take in parameters that the loop has added to its model, like unfrozen ones."""
        layout, frozen = self.run.layout, self.run.host.usage.frozen
        known = {id(place.param) for place in layout.order} | {id(p) for p in frozen.values()}
        frozen |= {name: p for name, p in self.run.model.named_parameters() if p.requires_grad and id(p) not in known}

    def recorded_loss(self, loss: Tensor) -> Tensor:
        """Returns the unscaled sum of the losses of a step's backwards."""
        every = [*self._local, self._loss[1]]
        return every[0] if len(every) == 1 else torch.stack([x.double() for x in every]).sum()

    def run_backward(self, loss: Tensor, share: float | None) -> None:
        """Runs the loop's backward on `share` of its loss, and scales its earlier local gradients by `share`."""
        share = 1.0 if share is None else float(share)
        for p in self.run.model.parameters() if self._local and share != 1.0 else ():
            if p.grad is not None:
                p.grad.mul_(share)
        self._summed = self.run.host.hooks.is_exchanging or self.run.experiment.strategy.opaque
        self._scales = share != 1.0
        with divide_gradients(self._outside if self._scales else [], share):
            loss.backward(None if share == 1.0 else torch.full_like(loss, share), **self._loss[2])

    def copy_sums(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Copies the summed gradients to which the loop goes on adding before its next update."""
        params = self.model.parameters() if self._summed and self.model is not None else ()
        return [(p, p.grad.clone()) for p in params if p.grad is not None]

    def run_update(self) -> None:
        """Runs the loop until it has stepped every parameter with a gradient, or goes on without an update."""
        for p, before in self._kept:
            p.grad = before if p.grad is None else p.grad.add_(before)
        self._kept, self._local = [], []
        self._stepped.clear()
        self._updating, self._open = True, False
        self._let_run()
        self._updating = False

    def _let_run(self) -> None:
        if self._chance is not None:
            Chance(self._chance).begin()
            self._chance = None
        self._go.put(True)
        self._await_loop()

    def _await_loop(self) -> None:
        while True:
            try:
                self.waits_at, error = self._arrivals.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self.run.leaving.is_set():
                    raise Aborted("told to leave") from None
                continue
            if error is not None:
                raise error
            return

    def run_to_end(self) -> None:
        """Lets the loop run on after its block, to its own end. All ranks now have the same model."""
        self.settled = self.has_left = True
        self._go.put(False)
        self.waits_at = ""
        while self.waits_at != "end" and not self.exits:
            self._await_loop()

    def close(self) -> None:
        """The loop's thread gets END_TIMEOUT seconds to restore the process's state."""
        self.has_left = True
        self._go.put(False)
        if self._thread.is_alive():
            self._thread.join(END_TIMEOUT)

    @property
    def thread_id(self) -> int | None:
        return self._thread.ident

    @property
    def loop_name(self) -> str:
        return str(getattr(self.task, "file", "") or getattr(getattr(self.task, "run", None), "__name__", "loop"))

    # -- on the loop's thread --

    def _run_loop(self) -> None:
        LED_RANKS[threading.get_ident()] = self
        error: BaseException | None = None
        task: Any = self.task
        try:
            torch.set_num_threads(1)
            script = hasattr(task, "file")
            self._store = open_script_store(self.run) if script else None
            with (
                self.run.session.children.collect_started(),
                prepare_main(self.run, task, self._store) if script else nullcontext(task.run) as train,
            ):
                train()
        except LoopEnded:
            pass
        except SystemExit as left:
            if left.code not in (None, 0):
                error = TaskError(f"{self.loop_name}: ended with exit code {left.code}")
        except BaseException as failed:
            error = failed
        finally:
            del LED_RANKS[threading.get_ident()]
            self.restore_forwards()
            self._arrivals.put(("end", error))

    def _wait_at(self, where: str) -> None:
        """Waits until the rank lets the loop go on. Raises LoopEnded if the rank has left."""
        if self.has_left:
            raise LoopEnded
        self._arrivals.put((where, None))
        if not self._go.get():
            raise LoopEnded

    def enter_forward(self, model: nn.Module, exchanges: bool) -> Callable[..., Any]:
        """Waits until the rank may compute a forward with gradients. Returns the module that replaces `model` in it.

        exchanges: whether ranks exchange the gradients of this forward
        """
        if self.settled:
            return model
        if self.model is not None and self.model is not model:
            raise KnobError(self._two_models)
        self.model, self._exchanges = model, exchanges
        if not self._open:
            self._open = True
            self._wait_at("forward")
        around: Any = self.run.host.parts.module
        if around is not model:
            around.require_backward_grad_sync = exchanges
        return around

    def intercept_backward(self, really: Callable[..., None], loss: Any, given: Any, **how: Any) -> None:
        """Runs a backward on the rank's thread if it exchanges gradients, else on this one."""
        if not self._open or self.has_left or self._inside or how["inputs"] is not None:
            return really(loss, given, **how)
        self._set_sums_aside()
        one = join_losses(loss, given)
        told = getattr(one, "unscaled", one.detach())
        if self._exchanges:
            self._loss = one, told, how
            return self._wait_at("backward")
        self._local.append(told)
        self._inside = True
        try:
            with self.run.host.timing.interrupt_pass("backward"):
                really(one, None, **how)
        finally:
            self._inside = False

    def _set_sums_aside(self) -> None:
        """Sets aside gradients that are already summed over ranks. `run_update` adds them after the next exchange."""
        if self._summed and not self.run.experiment.strategy.opaque:
            self._kept += self.copy_sums()
            for p, _ in self._kept:
                p.grad = None
        self._summed = False

    def separate_storage(self, x: Tensor) -> Tensor:
        """Returns `x` of a state dict in the same memory, with a storage of its own.

        Parameters lie in the storage of their bucket, and safetensors leaves out tensors that share a storage.
        """
        layout = getattr(self.run, "layout", None)
        if layout is None or x.untyped_storage()._cdata not in layout.lying or not x.numel():
            return x
        return self._saved.setdefault((x.data_ptr(), x.dtype, x.shape), torch.from_dlpack(x))

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises KnobError at the first update of a script that no strategy can follow."""
        self._updated = True
        if self._known and not list_params(optimizer) <= self._known:
            self._note_outside(optimizer)
        if self.model is not None or self.wrappers or self.in_block:
            return
        kinds = {type(p).__name__ for group in optimizer.param_groups for p in group["params"]}
        if kinds & SHARDED_TYPES:
            raise KnobError(
                f"{self.loop_name}: shards its model itself (fully_shard, FullyShardedDataParallel), which no "
                f"strategy supports; wrap it in DistributedDataParallel instead"
            )
        if dist.is_initialized():
            raise KnobError(
                f"{self.loop_name}: updates a model without a DistributedDataParallel around it, so no strategy "
                f"can exchange its gradients; wrap it before the first update"
            )

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The update is over when every parameter with a gradient is stepped."""
        mine = list_params(optimizer)
        params = [p for p in self.model.parameters() if p.requires_grad] if self.model is not None else []
        if not mine.intersection(map(id, params)):
            return
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self._stepped |= mine
        if self._updating and all(p.grad is None or id(p) in self._stepped for p in params):
            self._wait_at("updated")
