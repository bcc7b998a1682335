"""WarmUp: the first steps are uncompressed, or compressed less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.compressors._base import Compressor, inside
from workbench.compressors._ratio import at_density, ratio
from workbench.compressors._split import by_part, twice
from workbench.compressors.dense import Dense
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.compressors.top_k import TopK
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class WarmUp(Compressor):
    """Sends the first `steps` exchanges of every parameter uncompressed, or with a density that falls in stages.

        dense:         Dense() for the first `steps` exchanges, then `of`
        exponential:   `of` with density rho^((j+1) / (E+1)) in stage j = 0 .. E-1, then `of` with its own rho

    E = `stages`, each of steps / E exchanges. This is Deep Gradient Compression's schedule with stages for its epochs.
    For rho = 0.001 and E = 5 the densities are `0.316, 0.1, 0.032, 0.01, 0.0032`. It needs an `of` with exactly one
    `density` in it; "dense" takes any compressor. Early gradients are large and turn quickly, so delayed parts of them
    arrive stale.

    Exchanges are counted by parameter, in the rank's Memory. A change of bucket size, strategy or `of` does not restart
    the count. Only a larger `steps` warms up again. Under LocalSGD an exchange is a round. Bytes are those of the
    compressor in use. While the density is above 1 / p, pairs of index and value take more bytes than a dense
    all-reduce. The bare name WarmUp means ErrorFeedback(of=WarmUp()).

    When to use it: with strong sparsifiers from the first step of a training. Not when compression begins in the middle
    of a run.

    Reference: Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training",
    ICLR 2018, https://arxiv.org/abs/1712.01887
    """

    of: Compressor = knob(TopK(), doc="the compressor after the warm-up")
    steps: int = knob(100, 0, 10**6, unit="steps", doc="warm-up, in exchanges of each parameter")
    schedule: str = knob(
        "dense",
        choices=("dense", "exponential"),
        doc="dense: send whole buckets; exponential: lower the density in stages",
    )
    stages: int = knob(5, 1, 1000, doc="exponential: number of densities, each for equally many steps")

    buffer: ClassVar[str] = "warm_up"
    drops: ClassVar[tuple[str, ...]] = ("warm_up",)

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def refuses(self) -> str | None:
        if self.schedule == "exponential" and ratio(self.of, ("density",)) is None:
            return (
                f"schedule='exponential': {self.of} has no density to lower, or more than one; use schedule='dense' "
                f"with it, or a compressor with one density, such as TopK"
            )
        return twice(self)

    def at(self, step: int) -> Compressor:
        """Returns a parameter's compressor in its exchange number `step`, from 0."""
        if step >= self.steps:
            return self.of
        if self.schedule == "dense":
            return next((c.whole() for c in inside(self.of) if c.carries), Dense())  # keeps an existing momentum
        found = ratio(self.of, ("density",))
        assert found is not None, "refused before it starts"
        stage = step * self.stages // self.steps
        return at_density(self.of, found[1].default ** ((stage + 1) / (self.stages + 1)))

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        made = memory.parts.setdefault(self.buffer, {})
        steps = [made.get(part.name, 0) for part in bucket.parts]
        made.update((part.name, step + 1) for part, step in zip(bucket.parts, steps, strict=True))
        by_step = {step: self.at(step) for step in set(steps)}
        return await by_part([by_step[step] for step in steps], rank, bucket, memory)
