"""The ``tensorboard`` and ``wandb`` settings of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from gradalign.errors import GradalignError
from gradalign.recipes.spec import Section, explain, merge
from gradalign.tracking import Tracker, Trackers


class WandbSpec(Section):
    """Where Weights & Biases keeps a run."""

    project: str = "gradalign"
    mode: Literal["online", "offline", "disabled"] | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] = Field(default_factory=list)


class TrackingSpec(Section):
    """Who is told of a run while it runs: part of a recipe, but not of the spec, since it changes no number."""

    tensorboard: bool = False
    wandb: WandbSpec | None = None
    """``true`` in a recipe is an empty table, ``false`` is none."""


def take_tracking(data: dict[str, Any], changes: dict[str, Any], source: str) -> TrackingSpec:
    """Take the trackers' settings out of the recipe and of the changes."""
    names = list(TrackingSpec.model_fields)
    asked = {name: data.pop(name) for name in names if name in data}
    for name in [name for name in names if name in changes]:
        change = changes.pop(name)
        if not (change is True and isinstance(asked.get(name), Mapping)):  # "on" keeps the recipe's own table
            asked = merge(asked, {name: change})
    wandb = asked.get("wandb")
    if not isinstance(wandb, bool | Mapping | None):
        raise GradalignError(f"{source}: wandb must be true, false or a table of settings, got {wandb!r}")
    if isinstance(wandb, bool):
        asked["wandb"] = {} if wandb else None
    try:
        return TrackingSpec.model_validate(asked)
    except ValidationError as error:
        raise explain(error, source, TrackingSpec) from None


def make_trackers(tracking: TrackingSpec) -> Trackers:
    """Return the trackers that are asked for; one whose package is not installed says so."""
    from gradalign.tracking.services import TensorBoard, WeightsAndBiases

    wanted: list[Tracker] = [TensorBoard()] if tracking.tensorboard else []
    if tracking.wandb is not None:
        wanted.append(WeightsAndBiases(**tracking.wandb.model_dump()))
    return Trackers(wanted)
