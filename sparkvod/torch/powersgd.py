"""PowerSGD: of each gradient that is a matrix two thin factors travel, by two allreduces.

One step of power iteration finds the space that the ranks' summed matrix M mostly lies in: with what the step before
found as Q, the columns of P = M Q, made orthonormal, span it, and M is near P (Mᵀ P)ᵀ. Both products are linear in M,
so that sums over ranks of the factors are the factors of the sum.

All ranks get the same bits: P and Q are results of allreduces, columns are made orthonormal by elementwise operations
in a fixed order, and an element of P Qᵀ is a sum of as many terms as there are columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from sparkvod.core.compression import PowerSGD
from sparkvod.core.reducer import BucketPlan, Slot
from sparkvod.torch.gradients import Kept, Reduction
from sparkvod.torch.lossy_bucket import LossyBucket, forget_what_is_not_finite

# A column of which less than this is left when what lies in the others' space is taken out is rounding, no direction.
_ROUNDING = 1e-6


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Returns a matrix [rows, columns] whose columns span the same space and are orthonormal, or zero.

    Modified Gram-Schmidt in float64, by operations that are rounded alike on every processor. A matrix that has an
    element that is not finite gives one of NaN.
    """
    if not torch.isfinite(matrix).all():
        return torch.full_like(matrix, torch.nan)
    rows = matrix.shape[0]
    columns = torch.nn.functional.pad(matrix.double().T, (0, (1 << max(rows - 1, 0).bit_length()) - rows))
    lengths = _sum(columns * columns).sqrt()
    for k, length in enumerate(lengths.tolist()):
        column, rest = columns[k], columns[k + 1 :]
        left = _sum(column * column).sqrt().item()
        if left <= _ROUNDING * length:
            column.zero_()
            continue
        column /= left
        if len(rest):
            rest -= _sum(rest * column).unsqueeze(1) * column
    return columns[:, :rows].T.to(matrix.dtype).contiguous()


def _sum(rows: torch.Tensor) -> torch.Tensor:
    # Over the last dimension, a power of two, by halves: torch.sum's order depends on the processor.
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        rows = rows[..., :half] + rows[..., half:]
    return rows[..., 0]


class _Matrix:
    """A gradient that travels by factors: its place and slot in the bucket, and where the factors lie in messages."""

    def __init__(self, place: int, slot: Slot, shape: tuple[int, int], rank: int, p: int, q: int) -> None:
        self.place, self.slot, self.shape = place, slot, shape
        self.p = slice(p, p + shape[0] * rank)
        self.q = slice(q, q + shape[1] * rank)
        self.factor = torch.empty(0)  # Q, [columns, rank]
        self.basis = torch.empty(0)  # P, orthonormal, [rows, rank]


class PowerSGDBucket(LossyBucket):
    """A bucket whose matrices travel by their factors, with the gradients that do not beside the first ones."""

    def __init__(
        self,
        lossy: PowerSGD,
        plan: BucketPlan,
        names: Sequence[str],
        shapes: Sequence[torch.Size],
        reduction: Reduction,
    ) -> None:
        super().__init__(plan, names, shapes, reduction)
        self._rank, self._start_step = lossy.rank, lossy.start_step
        self._matrices: list[_Matrix] = []
        self._unfactored: list[tuple[int, Slot, slice]] = []
        p = q = 0
        for place, (slot, shape) in enumerate(zip(plan.slots, shapes, strict=True)):
            rows_columns = lossy.factors(shape)
            if rows_columns is None:
                self._unfactored.append((place, slot, slice(p, p + slot.count)))
                p += slot.count
            else:
                rows, columns = rows_columns
                self._matrices.append(_Matrix(place, slot, rows_columns, lossy.rank, p, q))
                p, q = p + rows * lossy.rank, q + columns * lossy.rank
        self._flags_at, self._q_count = p, q
        for matrix in self._matrices:
            matrix.factor = self._drawn(matrix)
        self._context: object = None  # what the compressor must know of the message that is on its way
        self._is_second = self._is_whole = False  # what that message is: the second factors, all gradients as they are

    def _drawn(self, matrix: _Matrix) -> torch.Tensor:
        # The same on all ranks; other numbers in each step, lest what was in vain once be so again.
        seed = zlib.crc32(f"{self.names[matrix.place]} {self.steps}".encode(errors="replace"))
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((matrix.shape[1], self._rank), generator=generator, dtype=self.dtype)

    def _of(self, tensor: torch.Tensor, matrix: _Matrix) -> torch.Tensor:
        return self.part(tensor, matrix.slot).view(matrix.shape)

    def begin(self, news: bool) -> None:
        """Starts the allreduce of the first factors, of the gradients without factors, and of the flags."""
        self._is_second, self._is_whole = False, self.steps < self._start_step
        flags = self.flags(news).to(self.dtype)
        if self._is_whole:
            message = torch.cat([self.memory, flags])
            for place in self.absent:
                self.part(message, self.plan.slots[place]).zero_()
            as_they_are = [
                (k, slot, slice(slot.offset, slot.offset + slot.count)) for k, slot in enumerate(self.plan.slots)
            ]
        else:
            message = torch.zeros(self._flags_at + len(flags), dtype=self.dtype)
            message[self._flags_at :] = flags
            for place, slot, where in self._unfactored:
                if place not in self.absent:
                    message[where] = self.part(self.memory, slot)
            for matrix in self._matrices:
                if matrix.place not in self.absent:
                    product = message[matrix.p].view(matrix.shape[0], self._rank)
                    torch.mm(self._of(self.memory, matrix), matrix.factor, out=product)
            as_they_are = self._unfactored
        compressor = self.reduction.compression
        sent, self._context = compressor.compress(message)
        self._take_out(compressor.decompress(sent, self._context), as_they_are)
        self.pending = self.reduction.begin(sent, self.name)

    def _take_out(self, sent: torch.Tensor, as_they_are: Sequence[tuple[int, Slot, slice]]) -> None:
        for place, slot, where in as_they_are:
            if place not in self.absent:
                mine = self.part(self.memory, slot)
                mine -= sent[where]
                if not torch.isfinite(mine).all():
                    forget_what_is_not_finite(mine)

    def go_on(self) -> None:
        """Takes the first factors and starts the allreduce of the second, or takes these and makes the result."""
        pending, self.pending = self.pending, None
        assert pending is not None
        received = self.reduction.compression.decompress(pending.wait(), self._context).to(self.dtype)
        if self._is_second:
            self._finish(received)
        elif self._is_whole:
            self.result.copy_(received[: self.plan.flags])
            self.told(received[self.plan.flags :] != 0)
        else:
            self.told(received[self._flags_at :] != 0)
            for _, slot, where in self._unfactored:
                self.part(self.result, slot).copy_(received[where])
            if self._matrices:
                self._send_second(received)

    def _send_second(self, received: torch.Tensor) -> None:
        compressor = self.reduction.compression
        message = torch.zeros(self._q_count, dtype=self.dtype)
        for matrix in self._matrices:
            matrix.basis = orthonormal(received[matrix.p].view(matrix.shape[0], self._rank))
            if matrix.place not in self.absent:
                product = message[matrix.q].view(matrix.shape[1], self._rank)
                torch.mm(self._of(self.memory, matrix).T, matrix.basis, out=product)
        sent, self._context = compressor.compress(message)
        message = compressor.decompress(sent, self._context)
        for matrix in self._matrices:
            if matrix.place not in self.absent:
                mine, factor = self._of(self.memory, matrix), message[matrix.q].view(matrix.shape[1], self._rank)
                if torch.isfinite(factor).all():
                    mine.addmm_(matrix.basis, factor.T, alpha=-1)
                else:
                    forget_what_is_not_finite(mine)
        self._is_second = True
        self.pending = self.reduction.begin(sent, f"{self.name}.second")

    def _finish(self, received: torch.Tensor) -> None:
        for matrix in self._matrices:
            factor = received[matrix.q].view(matrix.shape[1], self._rank)
            torch.mm(matrix.basis, factor.T, out=self._of(self.result, matrix))
            if not self.had_gradient(matrix.place):
                continue
            # The next step begins with these columns, none of them large or small, and new ones for those in vain.
            largest = factor.abs().amax(dim=0)
            good = torch.isfinite(largest) & (largest > 0)
            scaled = factor / largest
            matrix.factor = scaled if good.all() else torch.where(good, scaled, self._drawn(matrix))

    def factors(self) -> dict[str, torch.Tensor]:
        """Returns the factors that the next step begins with, by name."""
        return {self.names[matrix.place]: matrix.factor for matrix in self._matrices}

    def restore(self, kept: Kept) -> None:
        """Takes what another bucket kept; what it knows nothing of is as in the beginning."""
        super().restore(kept)
        for matrix in self._matrices:
            factor = kept.factors.get(self.names[matrix.place])
            known = factor is not None and factor.shape == matrix.factor.shape
            matrix.factor = factor.to(self.dtype).clone() if known and factor is not None else self._drawn(matrix)
