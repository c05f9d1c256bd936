"""Top-k: each gradient's largest elements travel, with their places, by an all-gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparkvod.core import collectives
from sparkvod.core.compression import TopK
from sparkvod.core.reducer import BucketPlan, Slot
from sparkvod.torch import adapter
from sparkvod.torch.gradients import Reduction
from sparkvod.torch.lossy_bucket import LossyBucket, forget_what_is_not_finite


class TopKBucket(LossyBucket):
    """A bucket whose gradients' largest elements travel.

    Every rank chooses its own; the result has the sum of what was chosen for a place, in the order of the ranks, so
    that all have the same bits.
    """

    def __init__(
        self,
        lossy: TopK,
        plan: BucketPlan,
        names: Sequence[str],
        shapes: Sequence[torch.Size],
        reduction: Reduction,
    ) -> None:
        super().__init__(plan, names, shapes, reduction)
        self._lossy = lossy
        self._place_dtype = torch.int32 if plan.flags < 1 << 31 else torch.int64
        self._context: object = None  # what the compressor must know of the values

    def begin(self, news: bool) -> None:
        """Chooses, and starts one grouped all-gather of values, places and flags."""
        present = [slot for place, slot in enumerate(self.plan.slots) if place not in self.absent]
        places = torch.cat([torch.empty(0, dtype=torch.int64), *map(self._largest, present)])
        chosen = self.memory[places]
        compressor = self.reduction.compression
        sent, self._context = compressor.compress(chosen)
        left = chosen - compressor.decompress(sent, self._context)
        self.memory[places] = left
        # NaN counts as larger than all, and so does what is infinite, so that they are among the chosen.
        if not torch.isfinite(left).all():
            forget_what_is_not_finite(self.memory)
        self.pending = collectives.grouped_allgather(
            adapter,
            [sent, places.to(self._place_dtype), self.flags(news)],
            self.name,
            process_set=self.reduction.process_set,
        )

    def _largest(self, slot: Slot) -> torch.Tensor:
        largest = self.part(self.memory, slot).abs().topk(self._lossy.count(slot.count), sorted=False).indices
        return largest + slot.offset

    def go_on(self) -> None:
        """Adds up what the ranks chose."""
        pending, self.pending = self.pending, None
        assert pending is not None
        (values, _), (places, _), (flags, _) = pending.wait()
        reduction = self.reduction
        values = reduction.compression.decompress(values, self._context)
        self.result.zero_()
        # One after the other on the CPU: all ranks add in the same order.
        self.result.index_add_(0, places, values.to(self.dtype) * reduction.factor)
        self.told(flags.view(-1, len(self.plan.slots) + 1).any(dim=0))
