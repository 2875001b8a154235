"""How a client trains in one round: the settings of the local steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

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

        With momentum m the k-th of K gradients acts with α(1 + m + … + m^{K−k}).
        """
        m = self.momentum
        if not m:  # asked for every client of a round
            return lr * steps
        return lr * math.fsum((1.0 - m ** (k + 1)) / (1.0 - m) for k in range(steps))
