"""Images as bytes in memory: normalised when a batch is drawn, cropped and flipped in local steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Normalise:
    """Turns (N, C, H, W) bytes into floats: (pixel / 255 − mean) / std, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the batch with normalised images and int64 labels."""
        images, labels = batch
        shape = (1, len(self.mean), 1, 1)
        mean, std = (255.0 * torch.tensor(values).reshape(shape) for values in (self.mean, self.std))
        return images.to(torch.float32).sub_(mean).div_(std), labels.to(torch.int64)

    def black(self) -> tuple[float, ...]:
        """Return the value of a black pixel after normalisation, channel by channel."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))


@dataclass(frozen=True)
class CropAndFlip:
    """Cuts every image out of a black frame at a place of its own and mirrors every second one, by chance.

    All images of a batch at once; chance comes from torch's global generator, which local steps seed.
    """

    fill: tuple[float, ...]
    padding: int = field(default=4, kw_only=True)

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its images moved by up to ``padding`` pixels and half of them mirrored."""
        images, labels = batch
        count, _, height, width = images.shape
        # Padding with zeros around (image − fill) and adding fill back gives each channel its own frame colour.
        fill = torch.tensor(self.fill, dtype=images.dtype).reshape(1, -1, 1, 1)
        framed = F.pad(images - fill, [self.padding] * 4)
        places = torch.randint(2 * self.padding + 1, (2, count))
        mirrored = torch.rand(count) < 0.5
        windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # a view: (N, C, places down, places across, H, W)
        cut = windows[torch.arange(count), :, places[0], places[1]].add_(fill)
        return torch.where(mirrored.reshape(-1, 1, 1, 1), cut.flip(3), cut), labels
