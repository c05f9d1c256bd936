"""``DistributedOptimizer``: a PyTorch optimizer whose gradients are reduced over the ranks while backward runs.

To make updates equal to those of one process on the same global batch, also when ranks have different numbers of rows
or none: pass ``op=Sum`` and scale each rank's mean loss by *its rows / all ranks' rows of this step*. A rank without
rows calls ``step()`` without a backward pass and contributes nothing.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from sparkvod.core import ops
from sparkvod.core.compression import check_compressor, lossy_and_compressor
from sparkvod.core.gradients import check_predivide, chunks, groups_of
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.core.timeline import timeline_span
from sparkvod.torch.compression import Compression
from sparkvod.torch.exchange import LANE, GradientExchange, Settings
from sparkvod.torch.gradients import Kept

__all__ = ["DistributedOptimizer"]


class _Distributed(Optimizer):
    """What a distributed optimizer does differently; mixed in before the user's class."""

    _exchange: GradientExchange
    _synchronized: bool
    _synchronizes: bool

    def _start(self, settings: Settings) -> None:
        self._exchange = GradientExchange(self, settings)
        self._synchronized = False
        self._synchronizes = True

    def synchronize(self) -> None:
        """Reduces all gradients and waits for them, so that they can be looked at or clipped before ``step()``.

        Call ``step()`` inside :meth:`skip_synchronize` after it. Gradients that no rank has stay None.

        Raises:
            ValueError: gradients were changed between ``backward()`` and this call.
            HorovodInternalError: an allreduce failed.
        """
        self._exchange.reduce()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step()`` takes the gradients as they are."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes accumulate locally before their sum is reduced.

        Raises:
            ValueError: it is not positive.
        """
        self._exchange.settings.passes = _positive(passes)
        self._exchange.new_step()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Reduces the gradients, unless :meth:`synchronize` did, and makes the wrapped optimizer's step.

        A closure's gradients are reduced each time that it has run.

        Args:
            closure: computes the loss again, as for the wrapped optimizer.
            **kwargs: passed on.

        Raises:
            AssertionError: within :meth:`skip_synchronize`, the gradients are not reduced.
            ValueError: gradients were changed between ``backward()`` and this call; no parameter was changed.
            HorovodInternalError: an allreduce failed; no parameter was changed by this rank's step.
        """
        synchronized, self._synchronized = self._synchronized, False
        if closure is None and self._exchange.completed:
            self._exchange.new_step()
            return _step(super().step, None, kwargs)
        if not self._synchronizes:
            self._exchange.refuse_unreduced()
            return _step(super().step, closure and _followed(closure, self._exchange.refuse_unreduced), kwargs)
        if synchronized and self._exchange.unreduced_anywhere():
            synchronized = False  # what a later backward() has left was not reduced
        if synchronized:
            warnings.warn(
                "step() was called after synchronize() and does not reduce again; call it within "
                "'with optimizer.skip_synchronize():' to say that this is meant",
                stacklevel=2,
            )
        if closure is None:
            if not synchronized:
                self._exchange.reduce()
            return _step(super().step, None, kwargs)
        if not synchronized and self._exchange.unreduced_anywhere():
            self._exchange.reduce()

        return _step(super().step, _followed(closure, self._exchange.reduce), kwargs)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # What torch.amp.GradScaler.step() asks before it looks at gradients. Here they are reduced, so that all ranks
        # find the same ones not finite, and a rank without rows has those of the others.
        if self._synchronizes and not self._synchronized:
            self._exchange.complete_for_step()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    # The wrapped class's step runs the user's step hooks; torch must not wrap this one to run them again.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears the gradients, as the wrapped optimizer does.

        Raises:
            AssertionError: gradients are on their way: between ``backward()`` and ``step()`` or ``synchronize()``.
        """
        if self._exchange.begun:
            raise AssertionError(
                "zero_grad() was called between backward() and step() or synchronize(), while gradients are being "
                "reduced: call it after step() or before backward(). If a loss of another model has computed them, as "
                "a GAN's generator does with its discriminator's, pass the parameters that it trains: "
                "loss.backward(inputs=list(model.parameters()))"
            )
        self._exchange.prepare()
        self._synchronized = False
        super().zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Returns the wrapped optimizer's state; with lossy compression also ``compression_state()``, as such."""
        state: dict[str, Any] = super().state_dict()
        compression = self.compression_state()
        return state if compression is None else state | {"compression": compression}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads the wrapped optimizer's state; what is on its way is waited for and forgotten.

        With lossy compression also what :meth:`load_compression_state` takes, if it is there; else that begins anew.
        """
        self._exchange.drain()
        self._synchronized = False
        super().load_state_dict(*args, **kwargs)
        (state, *_) = (*args, *kwargs.values())
        self.load_compression_state(state.get("compression"))

    def compression_state(self) -> dict[str, Any] | None:
        """Returns what lossy compression (top-k, PowerSGD) keeps for the next step; None with other compressions.

        What was left out of the gradients is each rank's own. Where one rank's ``state_dict()`` is saved for all, save
        this of every rank as well to go on exactly as without a pause.
        """
        if lossy_and_compressor(self._exchange.settings.compression)[0] is None:
            return None
        kept, (rank, size) = self._exchange.kept(), self._exchange.place
        return {"rank": rank, "size": size, "steps": kept.steps, "errors": kept.errors, "factors": kept.factors}

    def load_compression_state(self, state: Mapping[str, Any] | None) -> None:
        """Takes what :meth:`compression_state` returned, all ranks alike; None to begin anew.

        What was left out of the gradients is taken only if it is this rank's own, among as many ranks.

        Raises:
            ValueError: it is something else.
        """
        if state is None:
            self._exchange.restore(Kept())
            return
        missing = [name for name in ("rank", "size", "steps", "errors", "factors") if name not in state]
        if missing:
            raise ValueError(
                f"a state of the compression without {', '.join(missing)} was found, what compression_state() returned "
                "was expected; pass that, or None to begin anew"
            )
        own = (state["rank"], state["size"]) == self._exchange.place
        errors = dict(state["errors"]) if own else {}
        self._exchange.restore(Kept(errors, dict(state["factors"]), state["steps"]))

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = type(self).__mro__[2]
        return _rebuild, (base, self._exchange.settings, self._exchange.kept()), self.__getstate__()


def _followed(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        loss = closure()
        then()
        return loss

    return both


def _step(step: Callable[..., Any], closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
    if closure is not None:
        return step(closure, **kwargs)
    with timeline_span("step", LANE):
        return step(**kwargs)


_classes: dict[type[Optimizer], type[_Distributed]] = {}


def _distributed_class(base: type[Optimizer]) -> type[_Distributed]:
    if base not in _classes:
        members = {"__doc__": base.__doc__, "__module__": base.__module__}
        _classes[base] = type(base.__name__, (_Distributed, base), members)
    return _classes[base]


def _rebuild(base: type[Optimizer], settings: Settings, kept: Kept) -> _Distributed:
    # First half of copying and unpickling; __setstate__ brings the parameters. Hooks come with the first step.
    optimizer = object.__new__(_distributed_class(base))
    optimizer._start(settings)
    optimizer._exchange.restore(kept)
    return optimizer


def DistributedOptimizer(  # noqa: N802
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = ops.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns an optimizer that reduces the gradients over all ranks before each step of ``optimizer``.

    The result is of a class derived from the optimizer's own, with its name, and shares its parameter groups and state;
    use it in its place. Each gradient enters its bucket as soon as the backward pass has it, and a bucket whose
    gradients are all there is reduced while the backward pass goes on. In a world of one nothing is added.

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: pairs of name and parameter, for messages; all parameters or none.
        compression: ``Compression.none``, ``.fp16``, ``.bf16``, ``.topk(ratio)``, ``.powersgd(rank)``, a
            ``Compression.chain(...)`` of these, or a class with ``compress`` and ``decompress``.
        backward_passes_per_step: backward passes whose gradients are summed locally before they are reduced.
        op: ``Average`` or ``Sum``.
        gradient_predivide_factor: with ``Average``: gradients are divided by it before the sum and by the rest of the
            number of ranks after it.
        num_groups: deprecated; use ``groups``.
        groups: what is reduced together: a number of groups of consecutive parameters, or lists of parameters, the
            others being reduced one by one. None: buckets by size, in the order of the backward pass.
        sparse_as_dense: makes sparse gradients dense; without it they are an error.
        process_set: the ranks that exchange gradients, by default all; an average is one over these.

    Raises:
        NotInitializedError: before ``init``.
        TypeError: an argument is of a wrong type.
        ValueError: an argument, or a parameter's dtype, cannot be used; the process set is not registered, or this
            rank is none of its.
    """
    ops.own_set_id(process_set, "DistributedOptimizer")
    op = ops.reduce_op(op)
    check_predivide(gradient_predivide_factor, op)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a {type(optimizer).__name__} was found, a torch.optim.Optimizer to wrap was expected")
    check_compressor(compression, lossy=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = groups_of(groups, num_groups, "parameters")
    settings = Settings(
        names=_names(optimizer, named_parameters),
        compression=compression,
        passes=_positive(backward_passes_per_step),
        op=op,
        predivide=gradient_predivide_factor,
        groups=_groups(groups, parameters),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    base = type(optimizer)
    if issubclass(base, _Distributed):
        raise ValueError("an optimizer that is already distributed was found, a plain one was expected; wrap it once")
    distributed = object.__new__(_distributed_class(base))
    # A learning-rate scheduler may have put its wrapper of the old step in the instance.
    distributed.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    distributed._start(settings)
    distributed._exchange.attach()
    return distributed


def _positive(passes: Any) -> int:
    if isinstance(passes, bool) or not isinstance(passes, numbers.Integral) or passes <= 0:
        raise ValueError(f"backward_passes_per_step={passes} was found, a positive number was expected")
    return int(passes)


def _names(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Any]] | None) -> list[str]:
    if named_parameters is None:
        return [
            f"noname.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index in range(len(group["params"]))
        ]
    if not isinstance(named_parameters, Iterable):
        raise TypeError(
            f"named_parameters of type {type(named_parameters).__name__} was found, (name, parameter) tuples were "
            "expected; pass model.named_parameters()"
        )
    pairs = list(named_parameters)
    strange = [entry for entry in pairs if not (isinstance(entry, tuple) and len(entry) == 2)]
    if strange:
        raise ValueError(
            f"a {type(strange[0]).__name__} was found in named_parameters, (name, parameter) tuples were expected; "
            "pass model.named_parameters()"
        )
    seen = [name for name, _ in pairs]
    twice = sorted({name for name in seen if seen.count(name) > 1}) if len(set(seen)) < len(seen) else []
    if twice:
        raise ValueError(
            f"named_parameters has {', '.join(twice)} more than once, unique names were expected; "
            "put a prefix before the names of each model"
        )
    by_id = {id(parameter): name for name, parameter in pairs}
    names, unnamed = [], []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = by_id.get(id(parameter))
            names.append(name or "")
            if name is None:
                unnamed.append(f"group {number}, index {index}, shape {tuple(parameter.shape)}")
    if unnamed:
        raise ValueError(
            f"{len(unnamed)} parameters of the optimizer were found that named_parameters does not name "
            f"({'; '.join(unnamed[:3])}), all or none were expected; pass the named_parameters() of the whole model"
        )
    return names


def _groups(
    groups: int | list[list[torch.nn.Parameter]] | None, parameters: list[torch.nn.Parameter]
) -> list[list[int]] | None:
    if groups is None:
        return None
    if isinstance(groups, int):
        return chunks(groups, range(len(parameters)))
    places = {id(parameter): index for index, parameter in enumerate(parameters)}
    indices: list[list[int]] = []
    seen: set[int] = set()
    for group in groups:
        indices.append([])
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"a {type(parameter).__name__} was found in groups, parameters were expected")
            if id(parameter) in seen:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} was found twice in groups, once was expected"
                )
            seen.add(id(parameter))
            if id(parameter) in places:
                indices[-1].append(places[id(parameter)])
    return [group for group in indices if group]
