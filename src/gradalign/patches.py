"""Convolutions whose weight gradient is a few matrix products over the images' patches.

For large windows of many channels that is faster on a CPU than the convolution library's own way, as long as the
patches of a few images at a time stay in the processor's cache. Forward and the images' gradient stay the library's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGE_WINDOW = 512  # numbers in a patch of one image, from which on it gains
_CACHED = 300_000  # numbers in the patches of one block of images


class _PatchConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(images, weight)
        return F.conv2d(images, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        images, weight = ctx.saved_tensors
        outwards = gradients[0].contiguous(memory_format=torch.channels_last)
        needs_images, needs_weight, needs_bias = ctx.needs_input_grad
        inwards = _of_images(outwards, images, weight) if needs_images else None
        return (
            inwards,
            _of_weight(outwards, images, weight) if needs_weight else None,
            outwards.permute(0, 2, 3, 1).flatten(0, 2).sum(0) if needs_bias else None,
        )


def _of_images(outwards: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.convolution_backward(
        outwards, images, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]
    )[0]
    return found


def _of_weight(outwards: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    """Return Σ patchesᵀ·outwards over blocks of images, laid out as the weight is."""
    out, channels, height, width = weight.shape
    inside, back = images.permute(0, 2, 3, 1), outwards.permute(0, 2, 3, 1)  # channels innermost: contiguous
    rows, columns = back.shape[1:3]
    image, row, pixel, _ = inside.stride()
    block = max(1, _CACHED // (rows * columns * height * width * channels))
    total = images.new_zeros(height * width * channels, out)
    for first in range(0, len(images), block):
        few = inside[first : first + block]
        windows = few.as_strided(
            (len(few), rows, columns, height, width * channels), (image, row, pixel, row, 1), few.storage_offset()
        )
        total.addmm_(windows.reshape(-1, height * width * channels).t(), back[first : first + block].reshape(-1, out))
    return total.t().reshape(out, height, width, channels).permute(0, 3, 1, 2)


class PatchConv2d(nn.Conv2d):
    """A convolution that computes its weight's gradient over patches."""

    def _conv_forward(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        innermost = images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last)
        if not innermost or not weight.requires_grad or torch.is_autocast_enabled():
            plain: Tensor = super()._conv_forward(images, weight, bias)
            return plain
        outputs: Tensor = _PatchConvolution.apply(images, weight, bias)  # type: ignore[no-untyped-call]
        return outputs


def convolve_by_patches(module: nn.Module) -> None:
    """Make the convolutions that gain from it compute their weight's gradient over patches, in place."""
    for part in module.modules():
        if type(part) is nn.Conv2d and part.weight[0].numel() >= LARGE_WINDOW:
            plain = part.groups == 1 and set(part.stride) == set(part.dilation) == {1}
            if plain and part.padding in (0, (0, 0)) and part.padding_mode == "zeros":
                part.__class__ = PatchConv2d
