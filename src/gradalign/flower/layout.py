"""Named arrays, as Flower's own apps load and return them, and the flat vectors that the rounds reckon with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from gradalign.client.flat import FlatModel, Point
from gradalign.errors import GradalignError

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Where each named array lies: ``(name, shape, vector, offset)``, the vector being x, floats, ints or the rest.

    What is neither trained nor a buffer (frozen layers) is not exchanged in rounds. It goes along to apps that load a
    whole state_dict, as ``rest.NAME``.
    """

    entries: tuple[tuple[str, tuple[int, ...], str, int], ...]
    exact: bool = True
    """Whether x has what is trained and nothing else; arrays without a model may be running means as well."""

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return where ``FlatModel`` puts the entries of a model's state_dict; tied ones lie in one place."""
        trained = {id(p): p.numel() for p in model.parameters() if p.requires_grad}
        begins = dict(zip(trained, accumulate(trained.values(), initial=0), strict=False))
        named, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
        ends = {"floats": 0, "ints": 0}
        entries = []
        for name, value in model.state_dict().items():
            where, offset = f"rest.{name}", 0
            if name in named and id(named[name]) in begins:
                where, offset = "x", begins[id(named[name])]
            elif name in buffers:
                where = "floats" if value.is_floating_point() else "ints"
                offset, ends[where] = ends[where], ends[where] + value.numel()
            entries.append((name, tuple(value.shape), where, offset))
        return cls(tuple(entries), exact=not isinstance(model, NamedArrays))

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Tensor], names: Iterable[str]) -> Layout:
        """Return a layout with these arrays in x, for arrays whose model is not known."""
        floats = {name: arrays[name].numel() for name in names}
        begins = dict(zip(floats, accumulate(floats.values(), initial=0), strict=False))
        places = {name: ("x", begins[name]) if name in begins else (f"rest.{name}", 0) for name in arrays}
        return cls(tuple((name, tuple(value.shape), *places[name]) for name, value in arrays.items()), exact=False)

    def encode(self) -> str:
        return json.dumps([self.exact, self.entries])

    @classmethod
    def decode(cls, text: str) -> Layout:
        exact, entries = json.loads(text)
        return cls(tuple((name, tuple(shape), where, offset) for name, shape, where, offset in entries), exact)

    def named(self, vectors: Mapping[str, Tensor]) -> Named:
        """Return the arrays that these vectors hold."""
        return {
            name: vectors[where].reshape(-1)[offset : offset + prod(shape)].reshape(shape)
            for name, shape, where, offset in self.entries
            if where in vectors
        }

    def flat(self, arrays: Mapping[str, Tensor], like: Mapping[str, Tensor], only: set[str] | None = None) -> Named:
        """Return the vectors of an app's arrays, shaped as those of ``like``; what the app left out is an error.

        With ``only``, these arrays alone, and zeros elsewhere.
        """
        vectors = {name: torch.zeros_like(vector) for name, vector in like.items()}
        for name, shape, where, offset in self.entries:
            if where not in vectors or (only is not None and name not in only):
                continue
            if name not in arrays or tuple(arrays[name].shape) != shape:
                raise GradalignError(f"the app's reply has no array {name} of shape {shape}, as it was sent")
            vectors[where][offset : offset + prod(shape)] = arrays[name].reshape(-1).to(vectors[where])
        return vectors


class NamedArrays(nn.Module):
    """A model that is only its arrays: what the server knows of one that it was given as an ArrayRecord."""

    def __init__(self, arrays: ArrayRecord) -> None:
        super().__init__()
        values = arrays.to_torch_state_dict()
        trained = next((value.dtype for value in values.values() if value.is_floating_point()), None)
        for name, value in values.items():
            *path, last = name.split(".")
            home: nn.Module = self
            for part in path:
                if part not in home._modules:
                    home.add_module(part, nn.Module())
                home = home.get_submodule(part)
            if value.dtype == trained and last not in ("running_mean", "running_var"):  # torch's names in its layers
                home.register_parameter(last, nn.Parameter(value.clone()))
            else:
                home.register_buffer(last, value.clone())


def as_arrays(model: nn.Module, point: Point) -> ArrayRecord:
    """Return a model's state_dict at a point, as Flower sends it."""
    FlatModel(model).load(point)
    state = model.state_dict()
    # NumPy has no bfloat16; float32 holds the same numbers, and load_state_dict makes them what they were.
    return ArrayRecord({name: v.float() if v.dtype == torch.bfloat16 else v for name, v in state.items()})
