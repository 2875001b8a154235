"""Scaling a recipe down: fewer rounds, clients and examples, and a word on what it was before.

A scaled federation is the whole one with fewer members: the data is divided among all clients first, then some clients
and some of their examples are kept. So classes per client stay what they are, and only ``data`` makes clients smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gradalign.errors import GradalignError
from gradalign.experiment.spec import FullSizeSpec, ScaleSpec, Spec, explain, merge


def apply_scale(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a recipe's tables with its ``scale`` worked in, so that running the result needs no scale any more.

    Args:
        data: The recipe as plain data; ``scale`` is a share for everything, or a table of shares.
        source: What to call the recipe in messages.
    """
    plain = {key: value for key, value in data.items() if key != "scale"}
    scale = read_scale(data.get("scale"), source)
    if scale is None:
        return plain
    full = Spec.model_validate({key: plain[key] for key in ("rounds",) if isinstance(plain.get(key), int)})
    rounds = max(1, round(scale.of("rounds") * full.rounds))
    changes: dict[str, Any] = {
        "rounds": rounds,
        "full_size": {"rounds": full.rounds},
        "task": {"client_share": scale.of("clients"), "data_share": scale.of("data")},
    }
    clients = plain.get("clients")
    per_round = clients.get("per_round") if isinstance(clients, Mapping) else None
    if isinstance(per_round, int) and scale.of("clients") < 1.0:
        # Alignment is between clients: a round with one of them would have none.
        changes["clients"] = {"per_round": max(min(2, per_round), round(scale.of("clients") * per_round))}
        changes["full_size"]["per_round"] = per_round
    changes |= _smaller_batches(plain, scale.of("data")) | _denser_measuring(plain, scale.of("rounds"))
    changes["task"] = {key: share for key, share in changes["task"].items() if share < 1.0}
    return merge(plain, changes)


def _smaller_batches(data: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Shrink batches with the clients, so that a step still sees the same share of a client."""
    return _shrink(data, "local", ("batch_size", "gradient_examples"), share)


def _denser_measuring(data: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Measure more often in fewer rounds, so that curves keep their points."""
    return _shrink(data, "measure", ("test_every", "train_every"), share)


def _shrink(data: Mapping[str, Any], table: str, keys: tuple[str, ...], share: float) -> dict[str, Any]:
    given = data.get(table)
    if share == 1.0 or not isinstance(given, Mapping):
        return {}
    counts = {key: given[key] for key in keys if isinstance(given.get(key), int) and given[key] > 0}
    return {table: {key: max(1, round(share * count)) for key, count in counts.items()}}


def read_scale(given: Any, source: str) -> ScaleSpec | None:
    """Check the ``scale`` of a recipe: one share, or a table of shares."""
    if given is None:
        return None
    table = given if isinstance(given, Mapping) else {"all": given}
    try:
        return ScaleSpec.model_validate({k: float(v) if type(v) is int else v for k, v in table.items()})
    except ValidationError as error:
        raise _named(explain(error, f"{source}: scale")) from None


def _named(error: GradalignError) -> GradalignError:
    return GradalignError(str(error).replace(": scale: all:", ": scale:"))


def describe_scale(full: FullSizeSpec, spec: Spec) -> str:
    """Return in words at what scale a run was; the task's own facts say how many clients and examples it kept."""
    words = [f"{spec.rounds:,} of {full.rounds:,} rounds"]
    if full.per_round is not None:
        words.append(f"{spec.clients.per_round} instead of {full.per_round} clients a round")
    shares = spec.task.options()
    for key, what in (("client_share", "the clients"), ("data_share", "their examples")):
        if key in shares:
            words.append(f"{100 * shares[key]:.4g} % of {what}")
    if "data_share" in shares and isinstance(spec.local.batch_size, int):
        words.append(f"batches of {spec.local.batch_size}")
    return ", ".join(words)
