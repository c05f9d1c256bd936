"""The exchange of gradients behind a distributed optimizer: autograd's hooks, backward passes, the current world."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sparkvod.core import basics, ops, timeline
from sparkvod.core.agreement import agree
from sparkvod.core.compression import lossy_and_compressor, only_casts
from sparkvod.core.gradients import scales
from sparkvod.core.objects import any_rank
from sparkvod.core.process_sets import ProcessSet, global_process_set
from sparkvod.torch.bucketed import BucketGradients
from sparkvod.torch.compressed import CompressedGradients
from sparkvod.torch.gradients import Gradients, Kept, Reduction, refuse_changed
from sparkvod.torch.lossy import LossyGradients
from sparkvod.torch.parts import Parts

# The lane of the timeline that shows a distributed optimizer: "backward" from the first gradient that is ready to the
# end of the computation, "synchronize" while it waits for what is not hidden, "step".
LANE = "DistributedOptimizer"

# The exchange whose hooks are on a parameter.
_owners: Any = WeakTensorKeyDictionary()


@dataclass
class Settings:
    """What ``DistributedOptimizer`` was asked for; plain values, so that an optimizer can be copied and pickled.

    Attributes:
        names: names of the parameters, in the order of the parameter groups.
        compression: a compressor, a lossy stage, or a chain.
        passes: backward passes per step.
        op: ``Average`` or ``Sum``.
        predivide: gradient_predivide_factor.
        groups: indices of parameters that share a bucket; None to fill buckets by size.
        sparse_as_dense: whether sparse gradients are made dense.
        process_set: the ranks that exchange gradients with each other.
    """

    names: list[str]
    compression: Any
    passes: int
    op: int
    predivide: float
    groups: list[list[int]] | None
    sparse_as_dense: bool
    process_set: ProcessSet = global_process_set


class GradientExchange:
    """Reduces the gradients of an optimizer's parameters, as they become ready where there is more than one rank.

    Args:
        optimizer: the optimizer; only its parameter groups are read.
        settings: what was asked for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.settings = settings
        self._optimizer = weakref.ref(optimizer)
        self._generation = 0
        self._members = 0  # number of the process set in the current world
        self._gradients: Parts | None = None
        self._kept = Kept()  # what the next parts begin with
        self._place = (0, 1)
        self._prefix = ""
        self._fresh = True
        self._completed = False
        self._names: list[str] = []
        self._known: list[torch.nn.Parameter] = []
        self._others: list[tuple[torch.nn.Parameter, str]] = []
        self._passes_left: list[int] = []
        self._backward_ns = 0  # when the first gradient since the last step was ready
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    # ---- the world ----

    def attach(self) -> Parts | None:
        """Makes the exchange fit the current world; returns None among one rank, where nothing is exchanged.

        Raises:
            NotInitializedError: there is no world.
            ValueError: the process set is not registered in it, or this rank is none of the set's.
        """
        world = basics.world()
        # A model that was converted before the ranks have agreed on anything only needs other buckets.
        stays = self._prefix or self._gradients is None or self._gradients.begun or self._gradients.fits()
        if world.generation == self._generation and stays:
            return self._gradients
        members = ops.own_set_id(self.settings.process_set, "DistributedOptimizer")
        _remove_all(self._hooks)
        self._members = members
        self._place = self.place
        self.kept()
        if self._gradients is not None:
            self._gradients.give_back()  # what another world did not finish
        self._generation = world.generation
        self._gradients, self._prefix = None, ""
        self._names, self._known, self._others, self._passes_left = [], [], [], []
        if len(world.ranks_of(members)) == 1:
            return None
        named = self._named_parameters()
        self._known = [parameter for _, parameter in named]
        self._others = [(parameter, name) for name, parameter in named if not parameter.requires_grad]
        self._gradients = Parts()
        self._add([(parameter, name) for name, parameter in named if parameter.requires_grad])
        return self._gradients

    def _add(self, trained: Sequence[tuple[torch.nn.Parameter, str]]) -> None:
        parameters, names = [parameter for parameter, _ in trained], [name for _, name in trained]
        assert self._gradients is not None
        self._gradients.add(self._make(parameters, names), len(parameters))
        self._watch(parameters, names)

    def _parameters(self) -> list[torch.nn.Parameter]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        parameters, names = self._parameters(), self.settings.names
        if len(parameters) < len(names):
            raise _exchanged_parameters(f"{len(parameters)} parameters instead of {len(names)}")
        # add_param_group brings parameters that have no name yet.
        names += [f"allreduce.noname.added.{number}" for number in range(len(names), len(parameters))]
        return list(zip(names, parameters, strict=True))

    def _make(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> Gradients:
        settings, world = self.settings, basics.world()
        size, first = len(world.ranks_of(self._members)), len(self._names)
        op, prescale, postscale = scales(settings.op, settings.predivide, size)
        lossy, compressor = lossy_and_compressor(settings.compression)
        reduction = Reduction(op, prescale, postscale, compressor, settings.sparse_as_dense, self._members, size)
        if lossy is not None:
            part = LossyGradients(parameters, names, reduction, lossy, self._groups_of(names), self, first)
            part.restore(self._kept)
            return part
        if not only_casts(compressor):
            return CompressedGradients(parameters, names, reduction, self, first)
        return BucketGradients(basics.engine(), parameters, names, reduction, self._groups_of(names), self, first)

    def _groups_of(self, names: Sequence[str]) -> list[list[int]] | None:
        # The settings count all parameters, the buckets only those that are trained. Added ones go by size.
        if self.settings.groups is None or self._names:
            return None
        places = {name: place for place, name in enumerate(names)}
        named = [[self.settings.names[index] for index in group] for group in self.settings.groups]
        groups = [[places[name] for name in group if name in places] for group in named]
        return [group for group in groups if group]

    def _watch(self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        myself = weakref.ref(self)
        for parameter, name in zip(parameters, names, strict=True):
            index = len(self._names)
            self._names.append(name)
            before = _owners.get(parameter)
            if before is not None and (owner := before()) is not None and owner is not self:
                owner.detach()
            _owners[parameter] = myself
            self._passes_left.append(self.settings.passes)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_hook(myself, index)))

    # Parameters may be added to the optimizer, or made trainable. Their gradients are exchanged when the ranks have
    # agreed on them; since one rank alone may have some, by mistake, it says so in what all send anyway.

    def _added(self) -> list[torch.nn.Parameter]:
        added = self._parameters()[len(self._known) :]
        return [each for each in (*added, *(other for other, _ in self._others)) if each.requires_grad]

    def _notice(self, gradients: Parts) -> bool:
        news = not gradients.agreed or bool(self._added())
        gradients.announce(news)
        return news

    def _refuse_removed(self) -> None:
        parameters, known = self._parameters(), self._known
        if len(parameters) < len(known) or not all(map(operator.is_, known, parameters)):
            self.drain()
            raise _exchanged_parameters("other parameters than it was made for")

    def _adopt(self) -> None:
        self._others += [(parameter, name) for name, parameter in self._named_parameters()[len(self._known) :]]
        self._known = self._parameters()
        new = [(parameter, name) for parameter, name in self._others if parameter.requires_grad]
        if new:
            self._others = [(parameter, name) for parameter, name in self._others if not parameter.requires_grad]
            self._add(new)

    def _exchange(self, gradients: Parts) -> list[str]:
        # Returns the names of the gradients that were changed on their way.
        first_time = not self._prefix
        news = self._notice(gradients)
        changed = gradients.reduce()
        if first_time or gradients.heard or (news and not gradients.carries):
            self._adopt()
            self._agree(gradients)
            return changed + gradients.release_and_reduce(self._prefix)
        for parameter in self._added() if news else ():
            if parameter.grad is not None:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} with a gradient was found that was added to the "
                    "optimizer, or made trainable, between backward() and step(), when gradients were on their way "
                    "already, and it was expected before backward(); add it there"
                )
        return changed

    def _agree(self, gradients: Parts) -> None:
        # In the first exchange, not where the optimizer is made, which a rank may do for itself alone: there it would
        # wait for the others. The number is drawn here for the same reason. Nothing was sent before.
        if not self._prefix:
            kind = "optimizer" if self._members == 0 else f"optimizer.set{self._members}."
            self._prefix = f"allreduce.{kind}{basics.world().number(kind)}"
        try:
            agree(self._prefix, gradients.description(), self.settings.process_set)
        except BaseException:
            gradients.drain()
            raise

    # ---- a step ----

    def on_gradient(self, index: int) -> None:
        """Called by autograd when a backward pass has written a parameter's gradient."""
        if self._generation != basics.generation() or not self._prefix:
            if not basics.is_initialized():
                return
            before, name = self._gradients, self._names[index]
            if self.attach() is not before and self._gradients is not None:
                index = self._names.index(name)
        if self._gradients is None:
            return
        if self._passes_left[index] <= 0:
            raise self.computed_again(self._names[index])
        if self._backward_ns == 0:
            self._backward_ns = time.monotonic_ns()
        self._passes_left[index] -= 1
        self._fresh = False
        if self._passes_left[index] == 0:
            if not self._gradients.begun:
                self._notice(self._gradients)
            self._gradients.take(index)

    @property
    def begun(self) -> bool:
        """Whether a gradient is on its way, in this world."""
        current = self._gradients is not None and self._generation == basics.generation()
        return current and self._gradients is not None and self._gradients.begun

    @property
    def unreduced(self) -> bool:
        """Whether a backward pass has run here whose gradients are not reduced, be it that passes accumulate first."""
        return self._gradients is not None and not self._fresh

    def refuse_unreduced(self) -> None:
        """Checks that no backward pass has run here whose gradients are not reduced.

        Raises:
            AssertionError: one has.
        """
        self._refuse_anothers_gradients()
        if self.unreduced:
            raise AssertionError(
                "step() was called within skip_synchronize() after a backward() that no synchronize() followed, with "
                "gradients of this rank alone; call synchronize() before it"
            )

    def unreduced_anywhere(self) -> bool:
        """Returns whether any rank has gradients that are not reduced; a collective."""
        return self.attach() is not None and any_rank(self.unreduced, self._members)

    def reduce(self) -> None:
        """Reduces all gradients and waits.

        The first time, and when parameters were added, the ranks first compare what they would exchange.

        Raises:
            ValueError: gradients were changed while they were on their way, or a parameter was added meanwhile.
            MismatchError: the ranks' models or options differ; the first time nothing was reduced.
            HorovodInternalError: an allreduce failed; the gradients are then undefined.
        """
        self._refuse_anothers_gradients()
        gradients = self.attach()
        if gradients is None:
            return
        self._refuse_removed()
        if self._backward_ns != 0:
            timeline.mark("backward", self._backward_ns, LANE)
            self._backward_ns = 0
        try:
            with timeline.timeline_span("synchronize", LANE):
                changed = self._exchange(gradients)
        finally:
            self.new_step()
        refuse_changed(changed)

    def computed_again(self, name: str) -> AssertionError:
        """Returns what to raise where a parameter gets a gradient after its last pass of this step."""
        return AssertionError(
            f"gradients were computed more than backward_passes_per_step={self.settings.passes} times before step() or "
            f"synchronize() (parameter {name!r}): call step() in between, or raise backward_passes_per_step to sum the "
            "passes. If a loss is not meant to train this parameter (GAN, several optimizers), pass what it trains as "
            "backward(inputs=...). With checkpointing, pass use_reentrant=False; for gradients of gradients, use "
            "torch.autograd.grad(..., create_graph=True)"
        )

    # ---- a GradScaler ----

    @property
    def completed(self) -> bool:
        """Whether the gradients of the coming step were reduced for a GradScaler, and are still there."""
        return self._completed and self._fresh and bool(self.gradients())

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients that the parameters have now."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def complete(self) -> list[torch.Tensor]:
        """Reduces the gradients for a GradScaler, on all ranks alike.

        Returns:
            Those that it will not find, since it has looked at this rank's: of dtypes and devices that are new.
        """
        before = {(gradient.dtype, gradient.device) for gradient in self.gradients()}
        self.reduce()
        self._completed = True
        return [gradient for gradient in self.gradients() if (gradient.dtype, gradient.device) not in before]

    def complete_for_step(self) -> None:
        """Reduces the gradients when ``GradScaler.step()`` begins, unless that was done; a rank may have none.

        Raises:
            ValueError: backward passes are missing: the scaler may have unscaled gradients of this rank alone.
        """
        if self.attach() is None or self.completed:
            return
        if self.unreduced and not self.begun:
            raise ValueError(
                f"scaler.step() was called after fewer backward passes than "
                f"backward_passes_per_step={self.settings.passes}, with gradients of this rank alone: call "
                "optimizer.synchronize() after the last backward(), before unscale_() and step() of the scaler"
            )
        self.complete()

    def _refuse_anothers_gradients(self) -> None:
        # Only after another optimizer took the parameters can gradients be in its hands.
        optimizer = self._optimizer()
        if self._generation == basics.generation() or optimizer is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                reference = _owners.get(parameter)
                owner = reference() if reference is not None else None
                if owner is not None and owner is not self and owner.begun:
                    raise RuntimeError(
                        "step() found gradients that another DistributedOptimizer over the same parameters is "
                        "reducing: for each optimizer in turn call zero_grad(), backward() and step(), or put "
                        "parameters that several losses train into one optimizer"
                    )

    def prepare(self) -> None:
        """Takes the parameters, if there is a world, so that the next backward pass is this optimizer's."""
        if basics.is_initialized():
            self.attach()
        self.new_step()

    def new_step(self) -> None:
        """Begins to count backward passes anew."""
        self._passes_left = [self.settings.passes] * len(self._names)
        self._fresh, self._completed = True, False

    def drain(self) -> None:
        """Waits for what is on its way and forgets it."""
        if self._gradients is not None and self._generation == basics.generation():
            self._gradients.drain()
        self.new_step()

    def detach(self) -> None:
        """Lets go of the parameters, for another optimizer; the next step takes them back.

        Wrapping a model's parameters again, as a notebook does that runs a cell twice, thus reduces them once.
        """
        self.drain()
        self.kept()
        _remove_all(self._hooks)
        self._generation = 0
        self._gradients = None

    # ---- what lossy compression keeps ----

    def kept(self) -> Kept:
        """Returns copies of what is kept for the next step."""
        if self._gradients is not None:
            self._kept = Kept()
            self._gradients.keep(self._kept)
        return self._kept

    def restore(self, kept: Kept) -> None:
        """Takes what was kept; what it knows nothing of is as in the beginning."""
        self._kept = kept
        if self._gradients is not None:
            self._gradients.restore(kept)

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among those that exchange, and their number; of the last world, where there is none."""
        members = self.settings.process_set
        if basics.is_initialized() and members.included():
            self._place = members.rank() or 0, members.size() or 1
        return self._place


def _exchanged_parameters(what: str) -> ValueError:
    return ValueError(
        f"{what} were found in the param_groups of a DistributedOptimizer, parameters may be added to it only; make a "
        "new optimizer over the model's parameters and distribute it"
    )


def _hook(exchange: weakref.ref[GradientExchange], index: int) -> Callable[[torch.Tensor], None]:
    # Weak, so that parameters do not keep an optimizer alive that the program has dropped.
    def on_gradient(_: torch.Tensor) -> None:
        alive = exchange()
        if alive is not None:
            alive.on_gradient(index)

    return on_gradient


def _remove_all(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
