"""How a client trains in one round: the settings of the local steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gradalign.algorithms.schedule import Schedule, require, setting_of
from gradalign.errors import GradalignError, real, whole


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalTraining:
    """How a client trains in one round.

    Attributes:
        lr: The learning rate α, a number or a schedule over rounds.
        steps: K, the number of local steps. Give this or ``epochs``.
        epochs: E, the number of passes over the client's data (1 when neither is given).
        batch_size: Examples per step; None takes the whole client.
        weight_decay: wd, added to every step's gradient as wd·y.
        momentum: Heavy-ball momentum of the local steps, from zero in every round.
        clip_norm: Scale the loss gradient down to this norm when it is longer, before decay, correction and pull.
        gradient_examples: How many of the client's examples the gradient phase uses; None takes all. They are the
            first ones that the local steps of the same round will see, so K = 1 with as many as ``batch_size``
            is GradAlign on mini-batches.
        precision: "bf16" computes gradients' matrix products and convolutions in bfloat16 (torch's autocast): faster
            where the processor has such instructions, with gradients off by some percent. Parameters, sums and
            evaluation keep the model's precision. None (the default) keeps it everywhere.
        optimizer: The name of a ``torch.optim`` class that takes the steps, such as "adam" or "adamw"; None or "sgd"
            is SGD. It begins anew in every round, and is given this round's lr, ``weight_decay`` as its own, and
            gradients that are clipped, corrected and pulled already.
        optimizer_settings: Its other arguments, such as ``{"betas": [0.9, 0.99]}``.
    """

    lr: float | Schedule = 0.1
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip_norm: float | None = None
    gradient_examples: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    optimizer_settings: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr", setting_of("local.lr", self.lr))
        # A schedule may pass through zero (a warm-up's start, a cosine's end); a constant may not stay there.
        require("local.lr", self.lr, **({"above": 0.0} if isinstance(self.lr, float) else {"least": 0.0}))
        require("local.weight_decay", self.weight_decay, least=0.0)
        object.__setattr__(self, "momentum", real("local.momentum", self.momentum, 0.0, 1.0, below=True))
        if self.clip_norm is not None:
            require("local.clip_norm", self.clip_norm, above=0.0)
        if self.steps is not None and self.epochs is not None:
            raise GradalignError("local.steps and local.epochs were both given; choose one")
        if self.precision not in (None, "bf16"):
            raise GradalignError(f'precision must be "bf16" or left out, got {self.precision!r}')
        for name in ("steps", "epochs", "batch_size", "gradient_examples"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(f"local.{name}", value, 1))
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Refuse an optimizer that cannot take a step; SGD without settings is our own."""
        if not isinstance(self.optimizer_settings, Mapping | None):
            wanted = 'settings by their names, such as {"eps": 1e-6}'
            raise GradalignError(f"local.optimizer_settings must be {wanted}, got {self.optimizer_settings!r}")
        given = dict(self.optimizer_settings or {})
        if not given and str(self.optimizer or "sgd").lower() == "sgd":
            object.__setattr__(self, "optimizer", None)
            object.__setattr__(self, "optimizer_settings", None)
            return
        object.__setattr__(self, "optimizer", str(self.optimizer or "sgd").lower())
        for name in sorted({"lr", "weight_decay", "params"} & given.keys()):
            raise GradalignError(f"local.optimizer_settings.{name} is not set there; give local.{name}")
        if self.momentum:
            problem = "local.momentum is plain SGD's"
            raise GradalignError(f"{problem}; give {self.optimizer} its own in local.optimizer_settings")
        one = torch.zeros(1)
        one.grad = torch.ones(1)
        try:
            self.make_optimizer([one], 1.0).step()
        except GradalignError:
            raise
        except Exception as error:  # whatever torch says of settings, or of an optimizer that asks for more
            problem = f"the optimizer {self.optimizer} cannot take local steps"
            raise GradalignError(f"local.optimizer: {problem} with {given}: {error}") from None

    def make_optimizer(self, parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        """Return the optimizer of one client's round, from scratch; SGD where no other is named."""
        every = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
        known = {name: kind for name, kind in every.items() if kind is not torch.optim.Optimizer}
        kind = known.get(self.optimizer or "sgd")
        if kind is None:
            known_names = ", ".join(sorted(known))
            raise GradalignError(f'local.optimizer: "{self.optimizer}" is not in torch.optim; known are {known_names}')
        given = {"momentum": self.momentum} if self.optimizer is None else dict(self.optimizer_settings or {})
        if "weight_decay" in signature(kind).parameters:
            given["weight_decay"] = self.weight_decay
        elif self.weight_decay:
            raise GradalignError(f"local.weight_decay is set, but torch's {kind.__name__} has none")
        made: torch.optim.Optimizer = kind(list(parameters), lr=lr, **given)
        return made

    def __repr__(self) -> str:
        """Return what differs from the defaults, beside lr."""
        default = {one.name: one.default for one in fields(self)}
        told = {name: getattr(self, name) for name in default}
        changed = [f"{name}={value!r}" for name, value in told.items() if name == "lr" or value != default[name]]
        return f"LocalTraining({', '.join(changed)})"

    def steps_for(self, examples: int) -> int:
        """Return K for a client with this many examples."""
        if self.steps is not None:
            return self.steps
        return (self.epochs or 1) * math.ceil(examples / self.batch_for(examples))

    def batch_for(self, examples: int) -> int:
        """Return the batch size for a client with this many examples."""
        return min(examples, self.batch_size or examples)

    def total_step_size(self, lr: float, steps: int) -> float:
        """Return the sum of the step sizes given to all gradients of a round: αK, more with momentum.

        With momentum m the k-th of K gradients acts with α(1 + m + … + m^{K−k}). Another optimizer's steps are no
        gradients times numbers; for it αK stands for itself, and Δ_i/(αK) is no mean gradient.
        """
        m = self.momentum
        if not m:  # asked for every client of a round
            return lr * steps
        return lr * math.fsum((1.0 - m ** (k + 1)) / (1.0 - m) for k in range(steps))
