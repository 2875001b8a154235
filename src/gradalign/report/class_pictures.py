"""The picture of who holds what: classes against clients, sizes, and some examples where they are images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase

from gradalign.runs import write_atomically
from gradalign.tasks.class_counts import ClassCounts
from gradalign.tasks.data import PartitionedClients
from gradalign.tasks.task import Task

_SAMPLED_CLIENTS = 10
_SAMPLES = 3
_MOST_NAMES = 50


def draw_class_counts(path: Path, task: Task, held: ClassCounts) -> None:
    """Draw the picture and write it as a PNG."""
    clients = task.clients
    if isinstance(clients, PartitionedClients) and clients.tensors[0].ndim == 4:
        figure = Figure(figsize=(11, 9.5), layout="constrained")
        top, bottom = np.ravel(np.asarray(figure.subfigures(2, 1, height_ratios=(1, 3.4)), dtype=object))
        _draw_samples(top, clients)
        _draw_counts(bottom, held)
    else:
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        _draw_counts(figure, held)
    facts = ", ".join(str(task.facts[key]) for key in ("partition", "kept") if key in task.facts)
    figure.suptitle(f"{task.name}: who holds what ({facts})" if facts else f"{task.name}: who holds what")
    write_atomically(path, lambda file: figure.savefig(file, dpi=150, format="png"))


def _draw_counts(figure: FigureBase, held: ClassCounts) -> None:
    """Draw the classes of every client as a heat map, with the clients' sizes above and the classes' beside."""
    grid = figure.subplots(
        2, 2, sharex="col", sharey="row", gridspec_kw={"height_ratios": (1, 4), "width_ratios": (6, 1)}
    )
    sizes, spread = held.counts.sum(axis=1), held.counts.sum(axis=0)
    places, classes = np.arange(len(sizes)), np.arange(len(held.names))
    grid[0, 0].bar(places, sizes, width=1.0 if len(sizes) > 100 else 0.8, color="#0072B2")
    grid[0, 0].set_ylabel("examples")
    grid[1, 1].barh(classes, spread, color="#0072B2")
    grid[1, 1].set_xlabel("examples")
    grid[0, 1].set_visible(False)
    shown = np.ma.masked_equal(held.counts.T, 0)  # an empty square is white: not held at all
    many = int(held.counts.max()) > 50 * max(1, int(shown.min()))
    mesh = grid[1, 0].imshow(
        shown,
        aspect="auto",
        cmap="viridis_r",
        interpolation="nearest",
        norm=LogNorm(vmin=1, vmax=int(held.counts.max())) if many else None,
        vmin=None if many else 0,
    )
    grid[1, 0].set_xlabel("client")
    grid[1, 0].set_ylabel("class")
    if len(held.names) <= 2 * _MOST_NAMES - 15:
        grid[1, 0].set_yticks(classes, held.names, fontsize=9 if len(held.names) <= 30 else 6)
    figure.colorbar(mesh, ax=grid[1, :], label="examples of the class at the client", pad=0.01, fraction=0.04)
    for axes in (grid[0, 0], grid[1, 1]):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def _draw_samples(figure: FigureBase, clients: PartitionedClients) -> None:
    """Draw the first images of the first clients, upright."""
    images = clients.tensors[0].numpy()
    count = min(_SAMPLED_CLIENTS, len(clients))
    grid = figure.subplots(_SAMPLES, count, squeeze=False)
    for client in range(count):
        rows = clients.rows[clients.offsets[client] : clients.offsets[client + 1]].numpy()
        for line in range(_SAMPLES):
            axes = grid[line, client]
            axes.set_axis_off()
            if line < len(rows):
                picture = images[rows[line]]
                axes.imshow(picture[0] if len(picture) == 1 else picture.transpose(1, 2, 0), cmap="gray")
        grid[0, client].set_title(f"client {client}", fontsize=8)
