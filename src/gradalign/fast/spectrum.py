"""Convolutions of small images with large windows, as products of their spectra: the same numbers for less arithmetic.

The discrete Fourier transform turns a circular convolution into one product for each frequency. An image of 12×12
and a window of 5×5 have 144 frequencies, where the direct way multiplies 64·25 times for every pair of channels. The
transforms are small and dense, so that they too are matrix products, which a CPU does at full speed; they are
orthogonal up to scale, so that the error is one of the last digit of an image's largest numbers, as elsewhere.
Everything is linear: backward runs the transposes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_LARGEST = 2**20  # numbers in a transform: a few megabytes, for images of up to 32×32
_GAIN = 0.8  # share of the direct convolution's multiplications, below which the spectra are faster
_PREPARED = 200  # multiplications in whose time a number of the weight's spectrum is laid out and collected


@dataclass(frozen=True)
class Shape:
    """The sizes of a convolution, as (height, width) each; the padding is zeros on either side."""

    image: tuple[int, int]
    window: tuple[int, int]
    padding: tuple[int, int]

    @property
    def output(self) -> tuple[int, int]:
        """The size of the images that come out."""
        sizes = zip(self.image, self.window, self.padding, strict=True)
        height, width = (image + 2 * padding - window + 1 for image, window, padding in sizes)
        return height, width

    @property
    def period(self) -> tuple[int, int]:
        """The size of the transform: what goes round its edge meets zeros; even, so that real frequencies pair up."""
        height, width = (image + padding for image, padding in zip(self.image, self.padding, strict=True))
        return height + height % 2, width + width % 2


def spectra_gain(shape: Shape, images: int, into: int, out: int) -> bool:
    """Return whether spectra take clearly less time, forward and backward together, counted in multiplications."""
    if min(shape.output) < 1 or any(pad >= window for pad, window in zip(shape.padding, shape.window, strict=True)):
        return False
    taps, frequencies = math.prod(shape.window), math.prod(shape.period)
    pixels, outputs = math.prod(shape.image), math.prod(shape.output)
    if frequencies * max(pixels, outputs) > _LARGEST:
        return False
    direct = 3 * images * outputs * taps * into * out
    transforms = 2 * images * frequencies * (pixels * into + outputs * out)
    products = 6 * images * frequencies * into * out
    of_weight = frequencies * (2 * taps + _PREPARED) * into * out
    return transforms + products + of_weight < _GAIN * direct


@dataclass(frozen=True)
class Spectrum:
    """The transforms of one shape.

    A spectrum's rows come in pairs: real and imaginary part of one frequency of every two conjugate ones; then, as
    two more pairs, the four frequencies that are real for real images, the constant one first.

    Attributes:
        image: (row of the spectrum, pixel).
        window: (row of the spectrum, tap), conjugate: ``nn.Conv2d`` correlates.
        output: (pixel, row of the spectrum), back from the product.
    """

    image: Tensor
    window: Tensor
    output: Tensor


@lru_cache(maxsize=32)
def spectrum_of(shape: Shape, dtype: torch.dtype) -> Spectrum:
    """Return the transforms of a shape, on the CPU whatever a user's program has set."""
    height, width = shape.period
    every = itertools.product(range(height), range(width))
    one_of_two = [(row, column) for row, column in every if (row, column) < (-row % height, -column % width)]
    real = list(itertools.product((0, height // 2), (0, width // 2)))
    pairs = len(one_of_two)
    frequencies = torch.tensor([*one_of_two, *real], dtype=torch.float64, device="cpu")
    frequencies /= torch.tensor(shape.period, device="cpu")

    def waves(size: tuple[int, int], sign: int, first: tuple[int, int] = (0, 0)) -> Tensor:
        """Return cosine and sine of every pair, the cosine of the real frequencies, at the pixels of an image."""
        rows, columns = (
            torch.arange(start, start + many, device="cpu") for start, many in zip(first, size, strict=True)
        )
        turns = torch.cartesian_prod(rows, columns).to(torch.float64).view(-1, 2) @ frequencies.t()
        cosine, sine = torch.cos(2 * math.pi * turns).t(), torch.sin(2 * math.pi * turns).t()
        return torch.cat([torch.stack([cosine, sign * sine], dim=1)[:pairs].flatten(0, 1), cosine[pairs:]])

    image, window = waves(shape.image, -1), waves(shape.window, 1)
    output = waves(shape.output, -1, (-shape.padding[0], -shape.padding[1])) / (height * width)
    output[: 2 * pairs] *= 2  # for the conjugates
    return Spectrum(image.to(dtype), window.to(dtype), output.t().contiguous().to(dtype))


def _blocks(window: Tensor) -> Tensor:
    """Return what a pair of rows is multiplied with: [[r, −i], [i, r]] of a window's (pair, part, out, into)."""
    pairs, _, out, into = window.shape
    blocks = window.new_empty(pairs, 2, out, 2, into)
    blocks[:, :, :, 0] = window
    blocks[:, 1, :, 1] = window[:, 0]
    torch.neg(window[:, 1], out=blocks[:, 0, :, 1])
    blocks[-2:, 1, :, 1] = window[-2:, 1]  # two real numbers each
    blocks[-2:, 0, :, 1] = blocks[-2:, 1, :, 0] = 0
    return blocks.view(pairs, 2 * out, 2 * into)


def _from_blocks(blocks: Tensor) -> Tensor:
    """Return the transpose of ``_blocks``, of blocks given as (pair, part, out, part, into)."""
    pairs, _, out, _, into = blocks.shape
    window = blocks.new_empty(pairs, 2, out, into)
    torch.add(blocks[:, 0, :, 0], blocks[:, 1, :, 1], out=window[:, 0])
    torch.sub(blocks[:, 1, :, 0], blocks[:, 0, :, 1], out=window[:, 1])
    window[-2:, 0], window[-2:, 1] = blocks[-2:, 0, :, 0], blocks[-2:, 1, :, 1]
    return window


class _SpectralConvolution(torch.autograd.Function):
    """From images, weight and bias to (image, pixel, channel): a result of its own, which may be changed in place."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        (many, into), out, spectrum = images.shape[:2], len(weight), spectrum_of(shape, images.dtype)
        rows = len(spectrum.image)
        taps = weight.permute(2, 3, 0, 1).reshape(-1, out * into)
        blocks = _blocks((spectrum.window @ taps).view(rows // 2, 2, out, into))
        pixels = images.permute(0, 2, 3, 1).reshape(many, -1, into)
        seen = torch.bmm(spectrum.image.expand(many, -1, -1), pixels)
        product = images.new_empty(many, rows, out)
        torch.bmm(_by_pair(seen), blocks.mT, out=_by_pair(product))
        if bias is not None:
            product[:, -4].add_(bias, alpha=rows)  # the constant frequency, which the way back divides by their number
        ctx.save_for_backward(images, weight, seen, blocks)
        ctx.shape, ctx.spectrum = shape, spectrum
        outputs = torch.bmm(spectrum.output.expand(many, -1, -1), product)
        moved_off_zero = bias is not None and not bool((bias == 0).any())
        return outputs if moved_off_zero else _exact_where_blank(outputs, images, bias, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (images, weight, seen, blocks), spectrum, shape = ctx.saved_tensors, ctx.spectrum, ctx.shape
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():  # somebody will differentiate this again: by torch's own convolution
            return *_differentiable(gradients[0], images, weight, shape, needs[:3]), None
        many, rows, into = seen.shape
        out = len(weight)
        product = torch.bmm(spectrum.output.t().expand(many, -1, -1), gradients[0])
        of_images = of_weight = of_bias = None
        if needs[0]:
            back = torch.empty_like(seen)
            torch.bmm(_by_pair(product), blocks, out=_by_pair(back))
            pixels = torch.bmm(spectrum.image.t().expand(many, -1, -1), back)
            of_images = _laid_out_like(images, pixels.view(many, *shape.image, into).permute(0, 3, 1, 2))
        if needs[1]:
            found = torch.bmm(_by_pair(product).mT, _by_pair(seen)).view(rows // 2, 2, out, 2, into)
            taps = (spectrum.window.t() @ _from_blocks(found).view(rows, -1)).view(*shape.window, out, into)
            of_weight = _laid_out_like(weight, taps.permute(2, 3, 0, 1))
        if needs[2]:
            of_bias = product[:, -4].sum(0) * rows
        return of_images, of_weight, of_bias, None


def _by_pair(spectra: Tensor) -> Tensor:
    """Return (image, row, channel) as (pair, image, part and channel), without a copy."""
    many, rows, channels = spectra.shape
    return spectra.view(many, rows // 2, 2 * channels).transpose(0, 1)


def _laid_out_like(known: Tensor, values: Tensor) -> Tensor:
    """Return values in the memory layout of others of their shape: user code may view a gradient as the plain one."""
    return values if values.stride() == known.stride() else torch.empty_like(known).copy_(values)


def _exact_where_blank(outputs: Tensor, images: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """Return the outputs with exactly the bias where a window sees nothing but zeros.

    Spectra leave rounding errors there, and to a ReLU that follows a zero is not what a tiny number is.
    """
    (above, beside), marked = shape.padding, (images != 0).any(dim=1, keepdim=True)
    padded = F.pad(marked.to(images.dtype), (beside, beside, above, above))
    blank = F.max_pool2d(padded, shape.window, stride=1).view(len(images), -1, 1) == 0
    return torch.where(blank, 0.0 if bias is None else bias, outputs)


def _differentiable(
    grad_output: Tensor, images: Tensor, weight: Tensor, shape: Shape, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of images, weight and bias, so that they can be differentiated once more."""
    back = grad_output.reshape(len(images), *shape.output, len(weight)).permute(0, 3, 1, 2)
    found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
        back, images, weight, [len(weight)], [1, 1], list(shape.padding), [1, 1], False, [0, 0], 1, list(needs)
    )
    of_images, of_weight, of_bias = found
    plain = torch.contiguous_format if images.is_contiguous() else torch.channels_last
    return None if of_images is None else of_images.contiguous(memory_format=plain), of_weight, of_bias


def convolve_spectra(images: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """Return the convolution of the images, computed by their spectra; fastest with the channels innermost."""
    pixels: Tensor = _SpectralConvolution.apply(images, weight, bias, shape)  # type: ignore[no-untyped-call]
    return pixels.view(len(images), *shape.output, len(weight)).permute(0, 3, 1, 2)


def convolve(layer: nn.Conv2d, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a layer's convolution with this weight and bias, by the spectra wherever that is faster."""
    precise = images.dtype == weight.dtype and weight.dtype in (torch.float32, torch.float64)
    if images.ndim == 4 and len(images) and precise and _is_dense(layer) and not torch.is_autocast_enabled("cpu"):
        above, beside = (int(pad) for pad in layer.padding)
        (height, width), (rows, columns) = images.shape[2:], weight.shape[2:]
        shape = Shape((height, width), (rows, columns), (above, beside))
        if spectra_gain(shape, len(images), weight.shape[1], len(weight)):
            return convolve_spectra(images, weight, bias, shape)
    plain: Tensor = layer._conv_forward(images, weight, bias)
    return plain


def _is_dense(layer: nn.Conv2d) -> bool:
    """Return whether a layer's window goes over zeros and every pixel, and all channels see all."""
    whole = layer.groups == 1 and set(layer.stride) == set(layer.dilation) == {1}
    return whole and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
