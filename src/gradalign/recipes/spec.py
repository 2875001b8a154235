"""The validated description of an experiment: what a recipe file says, and nothing a machine adds.

Two runs of one spec give the same numbers, so the spec leaves out what cannot change them: workers, folders, progress.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from gradalign.errors import GradalignError

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Portion = Annotated[float, Field(gt=0, le=1)]
HeldOut = Annotated[float, Field(gt=0, lt=1)]
Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seeds = Annotated[int, Field(ge=1, le=10_000)]

Value = TypeVar("Value")
Table = TypeVar("Table", bound=BaseModel)
Values = Annotated[list[Value], Field(min_length=1)]
Curve = Literal["test_accuracy", "test_loss", "train_accuracy", "train_loss", "r", "drift", "cosine"]


class Section(BaseModel):
    """A table of the recipe: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ScheduleSpec(Section):
    """A number that changes over the rounds, e.g. ``{ kind = "warmup", value = 0.1, rounds = 20 }``.

    In place of rounds, ``share`` and ``at_shares`` are shares of the run.
    """

    kind: Literal["steps", "warmup", "off-until", "cosine"]
    value: NotNegative
    rounds: Count | None = None
    start: NotNegative | None = None
    end: NotNegative | None = None
    round: Whole | None = None
    at_rounds: dict[str, NotNegative] | None = None
    share: NotNegative | None = None
    at_shares: dict[str, NotNegative] | None = None


Rate = Annotated[
    Annotated[ScheduleSpec, Tag("ScheduleSpec")] | Annotated[Positive, Tag("float")],
    Discriminator(lambda value: "ScheduleSpec" if isinstance(value, Mapping | ScheduleSpec) else "float"),
]


def _form(value: Any) -> str | None:
    """Return which form the setting of an algorithm has."""
    if isinstance(value, Mapping | ScheduleSpec):
        return "ScheduleSpec"
    if isinstance(value, bool | str):
        return type(value).__name__
    return "float" if isinstance(value, int | float) else None


_WRONG_FORM = "Input should be a number, a word, true, false or a schedule's table"
Setting = Annotated[
    Annotated[ScheduleSpec, Tag("ScheduleSpec")]
    | Annotated[bool, Tag("bool")]
    | Annotated[Finite, Tag("float")]
    | Annotated[str, Tag("str")],
    Discriminator(_form, custom_error_type="setting", custom_error_message=_WRONG_FORM),
]
"""A parameter of an algorithm or of a server's rule. Whose it is, and what it may be, their classes say when built."""


class Settings(BaseModel):
    """A table whose further keys are the fields of an algorithm, or of a server's rule."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    __pydantic_extra__: dict[str, Setting]

    def given(self) -> dict[str, float | str | ScheduleSpec]:
        return dict(self.__pydantic_extra__)


class AlgorithmSpec(Settings):
    """Which algorithm; names join with ``+``. Each key belongs to the algorithms that have it.

    Where two of them share a key, ``[algorithm.parts.NAME]`` has the values of one.
    """

    name: str = "fedga"
    parts: dict[str, Settings] | None = None


class ServerSpec(Settings):
    """Parameters of the server's rule; the rule itself is part of the algorithm's name (fedavgm, fedadam, …)."""


class LocalSpec(Section):
    """How a client trains in one round; see ``LocalTraining``."""

    lr: Rate = 0.1
    steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count | Literal["whole"] | None = None
    """Left out, or "whole": all of the client."""
    weight_decay: NotNegative = 0.0
    momentum: Share = 0.0
    clip_norm: Positive | None = None
    gradient_examples: Count | None = None
    optimizer: str | None = None
    optimizer_settings: dict[str, Any] | None = None


class ClientsSpec(Section):
    """Who takes part in a round."""

    per_round: Count | None = None
    weights: Literal["uniform", "examples"] = "uniform"
    dropout: Share = 0.0
    holdout: HeldOut | None = None
    """The share of each client's examples that is not trained on and takes the test set's place; see ``hold_out``."""
    min_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0


class EarlyStoppingSpec(Section):
    """When a run ends before its last round; see ``EarlyStopping``."""

    patience: Count
    min_delta: NotNegative = 0.0


class MeasureSpec(Section):
    """What is measured and how often; 0 is never, and no number picks a spacing; see ``Measure``."""

    test_every: Whole | None = None
    train_every: Whole | None = None
    train_clients: Count = 50
    clients_every: Whole | None = None
    test_clients: Count = 1000
    personalized: bool = False
    metrics: list[str] = []
    monitor: str | None = None
    mode: Literal["max", "min"] | None = None
    early_stopping: EarlyStoppingSpec | None = None
    keep_best: bool = False
    target_accuracy: Portion | None = None


class TaskSpec(BaseModel):
    """What is trained: a built-in task or ``package.module:function``; all other keys are the task's own."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str = "digits"

    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PaperSpec(Section):
    """What the paper reports for this experiment, shown beside the result and never used.

    ``test_accuracy`` is in percent, by algorithm: a mean, or a mean and a standard deviation. ``setting`` says what
    these are of, as tables of the recipe's form, with lists of values; in another setting they are not shown.
    """

    source: str
    claim: str | None = None
    test_accuracy: dict[str, Finite | Annotated[list[Finite], Field(min_length=2, max_length=2)]] = {}
    setting: dict[str, dict[str, Any]] | None = None
    applies: bool | None = None
    """False where the problem is no longer the paper's, as with other clients: then its numbers are not shown."""


class FullSizeSpec(Section):
    """What a recipe asked for before it was scaled down; only told, never used."""

    rounds: Count
    per_round: Count | None = None


class CompareSpec(Section):
    """What ``gradalign compare`` runs, with settings of single algorithms as nested recipe tables."""

    algorithms: list[str] = ["fedga", "scaffold", "fedprox", "fedavg"]
    seeds: Seeds = 3
    equal: Literal["communication", "updates"] = "communication"
    """What all entries have the same of: ``rounds`` is the recipe's own algorithm's, the others' follow from it."""
    settings: dict[str, dict[str, Any]] = {}
    curves: list[Curve] = ["test_accuracy", "test_loss", "r"]


class SweepSpec(Section):
    """What ``gradalign sweep`` tries: lists of values, and how it stops and decides. What is not given has defaults."""

    lr: Values[Positive] | None = None
    batch: Values[Count | Literal["whole"]] | None = None
    K: Values[Count] | None = None
    epochs: Values[Count] | None = None
    weight_decay: Values[NotNegative] | None = None
    beta: Values[NotNegative] | None = None
    """The coarse values; the fine ones lie around the best of them."""
    beta_fine: Values[NotNegative] | None = None
    beta_schedule: Values[str] | None = None
    """How β changes over the run, in words; its values are searched with the first."""
    mu: Values[NotNegative] | None = None
    alpha: Values[Positive] | None = None
    rho: Values[Positive] | None = None
    server_lr: Values[Positive] | None = None
    clip_norm: Values[Positive] | None = None
    holdout: HeldOut | None = None
    stop_after: Portion | None = None
    margin: Share | None = None
    finalists: Count | None = None
    seeds: Seeds | None = None


class Spec(Section):
    """One experiment."""

    name: str = "experiment"
    seed: Whole = 0
    rounds: Count = 50
    fast: bool = True
    """Use ways of computing that are faster and the same up to rounding; see ``gradalign.fast``."""
    precision: Literal["bf16"] | None = None
    """Compute gradients in bfloat16: faster on some processors, never the same; see ``LocalTraining``."""
    task: TaskSpec = TaskSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    server: ServerSpec = ServerSpec()
    local: LocalSpec = LocalSpec()
    clients: ClientsSpec = ClientsSpec()
    measure: MeasureSpec = MeasureSpec()
    paper: PaperSpec | None = None
    full_size: FullSizeSpec | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain TOML values, unset keys left out."""
        return self.model_dump(exclude_none=True)


# What pydantic adds to the place of a problem where a setting may have one of several forms.
_BRANCHES = ("ScheduleSpec", "bool", "float", "str", "constrained-int", "literal['whole']")


def _allowed(location: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """Return the keys of the table that an unknown key was found in."""
    model: Any = root
    for step in location[:-1]:
        if step in model.model_fields:  # else the place in a list or the name in a table of such tables
            model = next(iter(_tables_in(model.model_fields[step].annotation)), ScheduleSpec)
    beside = ["compare", "sweep", "scale", "tensorboard", "wandb", "device"] if model is Spec else []
    return [*model.model_fields, *beside]


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    own = [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
    return [*own, *(table for part in get_args(annotation) for table in _tables_in(part))]


def unknown_setting(where: str, key: str, known: list[str]) -> str:
    """Say that a table has no such key, and which one may have been meant."""
    close = difflib.get_close_matches(key, known, n=1)
    hint = f'did you mean "{close[0]}"?' if close else f"known here: {', '.join(known)}"
    return f"{where} is not a known setting; {hint}"


def explain(error: ValidationError, source: str, root: type[BaseModel]) -> GradalignError:
    """Turn pydantic's report into one sentence: where, what is allowed, what was given."""
    problems = error.errors()
    first = problems[0]
    location = tuple(step for step in first["loc"] if step not in _BRANCHES)
    where = ".".join(str(step) for step in location)
    if first["type"] == "extra_forbidden":
        text = unknown_setting(where, str(location[-1]), _allowed(location, root))
    else:
        message = first["msg"].replace("Input should", "must", 1)
        message = "must be a table of settings" if first["type"] == "model_type" else message
        text = f"{where}: {message[0].lower() + message[1:]}, got {first['input']!r}"
    more = len({e["loc"][0:2] for e in problems}) - 1
    return GradalignError(f"{source}: {text}" + (f" (and {more} more)" if more > 0 else ""))


def checked(kind: type[Table], data: Any, source: str) -> Table:
    """Check a table of plain values, or say in one sentence what is wrong with it."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise explain(error, source, kind) from None


def validate(data: Mapping[str, Any], source: str) -> Spec:
    return checked(Spec, dict(data), source)
