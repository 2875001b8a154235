"""The [wandb] table and the tensorboard switch of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gradalign.recipes.spec import Section


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
