"""Batch normalisation over the batches of all ranks, as one process would normalise them joined."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm

from sparkvod.core import basics, collectives
from sparkvod.core.names import now
from sparkvod.core.ops import Sum, own_set_id
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.torch import adapter


class SyncBatchNorm(_BatchNorm):
    """Applies batch normalisation with the mean and variance of all ranks' batches together.

    A drop-in for ``torch.nn.SyncBatchNorm``, with the same parameters, buffers and ``state_dict``. In training each
    forward and each backward pass makes one small collective, so all ranks of the process set must make the same
    passes, also with a batch of no rows. Outputs, running statistics and the inputs' gradients are those of one process
    on the joined batch; the gradients of ``weight`` and ``bias`` are this rank's part, which a ``DistributedOptimizer``
    sums or averages. In evaluation nothing is exchanged.

    Args:
        num_features: channels C of an input of shape (N, C) or (N, C, ...).
        eps: added to the variance.
        momentum: of the running statistics; None for their plain average.
        affine: whether there are ``weight`` and ``bias``.
        track_running_stats: whether there are running statistics; without, evaluation takes its own batch's.
        process_set: the ranks whose batches are joined, by default all.
        device: where parameters and buffers are made.
        dtype: their dtype.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    #: Whether this rank's rows count; a row that only stands in for none is normalised and not counted.
    counts = True

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs an input of at least 2 dimensions, got shape {list(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Normalise the input.

        Args:
            input: of shape (N, C) or (N, C, ...), floating; N may differ between ranks and may be 0.

        Raises:
            NotInitializedError: in training, before ``init``.
            ValueError: the shape does not fit, or all ranks together have one value per channel.
        """
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm has {self.num_features} features, got an input of {list(input.shape)}")
        if not self.training:
            return torch.nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias,
                self.running_mean is None, 0.0, self.eps,
            )  # fmt: skip
        members = own_set_id(self.process_set, "SyncBatchNorm")
        mean, variance, count = _statistics(input, self.counts, members)
        self._track(mean, variance, count)
        normalised: torch.Tensor = _Normalise.apply(
            input, self.weight, self.bias, mean, variance, count, self.counts, self.eps, members
        )
        return normalised

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None or count == 0:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1))
            for running, now_ in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.copy_((1 - factor) * running.double() + factor * now_.to(running.device))

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> Any:
        """Return the module with all its batch normalisations, ``torch.nn.SyncBatchNorm`` too, made synchronised.

        Args:
            module: a module; its parts are replaced, and share parameters and buffers with what they replace.
            process_set: the ranks whose batches are joined.
        """
        result = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
                raise ValueError("a lazy batch normalisation has no features yet: run the model once, then convert it")
            result = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats, process_set
            )
            result._parameters.update(module._parameters)
            result._buffers.update(module._buffers)
            result.train(module.training)
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return result


def synchronise(model: torch.nn.Module) -> list[SyncBatchNorm]:
    """Make each ``torch.nn.SyncBatchNorm`` of a model ours, in place, and return all that the model has.

    The objects stay the same, with their hooks, parameters and names.

    Raises:
        ValueError: there is a subclass of ``torch.nn.SyncBatchNorm``, whose own code would be lost.
    """
    for name, module in model.named_modules():
        if type(module) is torch.nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm  # type: ignore[assignment]
            module.process_set = global_process_set  # type: ignore[assignment]
        elif isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"module {name!r} is a {type(module).__name__}, a subclass of torch.nn.SyncBatchNorm, which would not "
                "be synchronised here: derive it from sparkvod.torch.SyncBatchNorm"
            )
    return [module for module in model.modules() if isinstance(module, SyncBatchNorm)]


def _across(values: torch.Tensor, what: str, members: int) -> torch.Tensor:
    # Named after its length too, so that layers of unlike widths do not push each other out of the response cache.
    kind = f"sync_batch_norm.{what}.{values.numel()}"
    return now(
        kind,
        None,
        lambda name: collectives.allreduce(
            adapter, values, name, Sum, in_place=True, wake=False, process_set=members
        ).wait(),
        members,
    )


def _others(tensor: torch.Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _working(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _statistics(tensor: torch.Tensor, counts: bool, members: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns mean and biased variance per channel, float64 and equal on all ranks, and the values of a channel."""
    channels = tensor.shape[1]
    ranks = basics.world().ranks_of(members)
    mine = torch.zeros(len(ranks), 2 * channels + 1, dtype=torch.float64)
    count = tensor.numel() // channels if counts and channels else 0
    if count:
        with torch.no_grad():
            variance, mean = torch.var_mean(_working(tensor.detach()), _others(tensor), correction=0)
        mine[ranks.index(basics.rank())] = torch.cat([mean.cpu(), variance.cpu(), torch.tensor([float(count)])])
    # Each rank's own place, so that means and variances are combined without the cancellation of sums of squares.
    every = _across(mine, "forward", members) if len(ranks) > 1 else mine
    shares, means, variances = every[:, -1:], every[:, :channels], every[:, channels:-1]
    total = float(shares.sum())
    if total == 1:
        raise ValueError(
            f"SyncBatchNorm needs more than one value per channel over all ranks in training, got {list(tensor.shape)}"
        )
    if total == 0:
        return torch.zeros(channels, dtype=torch.float64), torch.ones(channels, dtype=torch.float64), 0.0
    weights = shares / total
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0), total


class _Normalise(Function):
    """The gradient of the joined batch: what each rank's outputs do to the common mean and variance is summed."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: float,
        counts: bool,
        eps: float,
        members: int,
    ) -> torch.Tensor:
        """Normalises by the common statistics."""
        kind, device = _working(tensor[:0]).dtype, tensor.device
        mean, variance = mean.to(device, kind), variance.to(device, kind)
        ctx.save_for_backward(tensor, weight, mean, torch.rsqrt(variance + eps))
        ctx.count, ctx.counts, ctx.members = count, counts, members
        if tensor.numel() == 0:
            return tensor.clone()
        scale, shift = (None if each is None else each.to(kind) for each in (weight, bias))
        return torch.nn.functional.batch_norm(tensor, mean, variance, scale, shift, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sums over the ranks what the gradient needs of each."""
        tensor, weight, mean, inverse = ctx.saved_tensors
        shape = [1, -1] + [1] * (tensor.dim() - 2)
        grad, others = _working(grads[0]), _others(tensor)
        normal = (_working(tensor) - mean.view(shape)) * inverse.view(shape)
        own = torch.stack([grad.sum(others), (grad * normal).sum(others)])
        sums = own.double().cpu()
        if len(basics.world().ranks_of(ctx.members)) > 1:
            sums = _across(sums.clone(), "backward", ctx.members)
        means = (sums / max(ctx.count, 1.0)).to(grad.device, grad.dtype)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        if ctx.counts:  # else the statistics do not depend on these rows
            grad = grad - means[0].view(shape) - normal * means[1].view(shape)
        inputs = grad * scale.view(shape)
        for_weight, for_bias = (None, None) if weight is None else (own[1].to(weight.dtype), own[0].to(weight.dtype))
        return inputs.to(tensor.dtype), for_weight, for_bias, None, None, None, None, None, None
