"""Convolutions by spectra give torch's numbers, and are used only where they gain."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gradalign as ga
from exchanges import trainer_of
from gradalign.fast.linear import ProductLinear
from gradalign.fast.spectrum import Shape, convolve, convolve_spectra, spectra_gain, spectrum_of
from gradalign.fast.stacks import FasterStack
from test_fast import both, close

LAST = torch.channels_last


class Spectral(nn.Conv2d):
    """A convolution by spectra, where that is faster."""

    def forward(self, images: Tensor) -> Tensor:
        return convolve(self, images, self.weight, self.bias)


def convolve_by_spectra(model: nn.Module) -> None:
    for part in model.modules():
        if type(part) is nn.Conv2d:
            part.__class__ = Spectral


@st.composite
def shapes(draw) -> Shape:
    """Images of 1 to 9 pixels a side, windows that fit, and less padding than window."""
    sides = []
    for _ in range(2):
        window = draw(st.integers(1, 6))
        padding = draw(st.integers(0, window - 1))
        sides.append((draw(st.integers(max(1, window - 2 * padding), 9)), window, padding))
    return Shape(*zip(*sides, strict=True))


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), many=st.integers(1, 3), into=st.integers(1, 3), out=st.integers(1, 4), bias=st.booleans())
def test_spectra_give_the_convolution_and_its_gradients(shape, many, into, out, bias):
    """Against torch's convolution in float64, for every size, odd and even, square or not, padded or not."""
    generator = torch.Generator().manual_seed(many)
    draw = lambda *size: torch.randn(*size, dtype=torch.float64, generator=generator)  # noqa: E731
    inputs = [draw(many, into, *shape.image), draw(out, into, *shape.window), draw(out) if bias else None]
    plain, ours = ([None if one is None else one.clone().requires_grad_() for one in inputs] for _ in range(2))
    expected = F.conv2d(*plain, padding=shape.padding)
    found = convolve_spectra(*ours, shape)
    assert found.shape == expected.shape == (many, out, *shape.output)
    grad_output = draw(*expected.shape)
    expected.backward(grad_output), found.backward(grad_output)
    pairs = [(expected, found), *((a.grad, b.grad) for a, b in zip(plain, ours, strict=True) if a is not None)]
    for known, own in pairs:
        assert torch.allclose(known, own, rtol=1e-10, atol=1e-11)


def test_a_spectrum_is_numpys():
    """The rows of a spectrum are fft2's numbers: re and im of one of two conjugates, then the four real ones."""
    image = torch.randn(4, 6, dtype=torch.float64)
    rows = spectrum_of(Shape((4, 6), (3, 3), (0, 0)), torch.float64).image @ image.flatten()
    assert len(rows) == 24
    expected = torch.fft.fft2(image)
    pairs = {complex(round(a, 9), round(b, 9)) for a, b in rows[:-4].view(-1, 2).tolist()}
    complex_ones = [number for number in expected.flatten().tolist() if abs(number.imag) > 1e-9]
    either = {complex(round(z.real, 9), round(s * z.imag, 9)) for z in complex_ones for s in (1, -1)}
    assert len(pairs) == 10
    assert pairs < either
    assert torch.allclose(rows[-4:], expected[[0, 0, 2, 2], [0, 3, 0, 3]].real)


def test_the_paper_s_second_layer_loses_no_digits():
    """32 to 64 channels, 5×5 over 12×12, in float32: as near to the exact numbers as torch's own convolution."""
    torch.manual_seed(0)
    plain = nn.Conv2d(32, 64, 5).to(memory_format=LAST)
    spectral = copy.deepcopy(plain)
    convolve_by_spectra(spectral)
    inputs = torch.randn(78, 32, 12, 12).contiguous(memory_format=LAST)
    exact = _all(copy.deepcopy(plain).double(), inputs.double())
    assert not torch.equal(spectral(inputs), plain(inputs)), "they round differently"
    for truth, direct, own in zip(exact, _all(plain, inputs), _all(spectral, inputs), strict=True):
        assert _distance(own, truth) < 3 * _distance(direct, truth) + 1e-7
        assert _distance(own, truth) < 1e-6


def _all(layer: nn.Conv2d, inputs: Tensor) -> list[Tensor]:
    images = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
    outputs = layer(images)
    outputs.sin().sum().backward()
    return [outputs.detach(), images.grad, layer.weight.grad, layer.bias.grad]


def _distance(own: Tensor, truth: Tensor) -> float:
    return float((own.double() - truth).norm() / truth.norm())


def test_gradients_can_be_differentiated_again():
    """Hessian products of a model with spectra: those of torch's convolution, in float64."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(24, 48, 5, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(4800, 2)).double()
    spectral = copy.deepcopy(plain)
    convolve_by_spectra(spectral)
    assert spectra_gain(Shape((12, 12), (5, 5), (1, 1)), 40, 24, 48)
    images = torch.randn(40, 24, 12, 12, dtype=torch.float64, requires_grad=True)
    found = []
    for model in (plain, spectral):
        leaves = [images, *model.parameters()]
        first = torch.autograd.grad(model(images).sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for known, own in zip(*found, strict=True):
        assert torch.allclose(known, own, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("bias", [None, 0.0, 0.25])
def test_blank_windows_give_exactly_the_bias(bias):
    """Zeros in, zeros out: to a ReLU that follows, a rounding error would be a positive number."""
    layer = nn.Conv2d(24, 48, 5, padding=2, bias=bias is not None)
    if bias is not None:
        nn.init.constant_(layer.bias, bias)
    spectral = copy.deepcopy(layer)
    convolve_by_spectra(spectral)
    images = torch.randn(60, 24, 12, 12)
    images[:, :, 5:] = 0
    assert spectra_gain(Shape((12, 12), (5, 5), (2, 2)), 60, 24, 48)
    known, own = layer(images), spectral(images)
    assert torch.allclose(known, own, atol=1e-5)
    assert not torch.equal(known, own)
    if not bias:
        assert torch.equal((known == 0).nonzero(), (own == 0).nonzero())
        assert int((own == 0).sum()) == 60 * 48 * 5 * 12, "rows 7 to 11 see only zeros"


def test_spectra_are_used_only_where_they_gain():
    """By hand: of 78 images each takes 9.83 M multiplications directly, 4.28 M + 250·295 k/78 by spectra."""
    paper = Shape((12, 12), (5, 5), (0, 0))
    assert spectra_gain(paper, 78, 32, 64)
    assert not spectra_gain(paper, 3, 32, 64), "the weight's spectrum costs more than three images save"
    assert not spectra_gain(Shape((12, 12), (3, 3), (1, 1)), 78, 32, 64), "a small window"
    assert not spectra_gain(Shape((28, 28), (5, 5), (0, 0)), 78, 1, 32), "a large image"
    assert not spectra_gain(Shape((4, 4), (5, 5), (0, 0)), 78, 32, 64), "nothing comes out"
    assert not spectra_gain(Shape((12, 12), (5, 5), (5, 5)), 78, 32, 64), "more padding than the period holds"
    assert not spectra_gain(Shape((128, 128), (11, 11), (0, 0)), 10**6, 512, 512), "a transform of a gigabyte"


@pytest.mark.parametrize("options", [{"stride": 2}, {"dilation": 2}, {"padding": "same"}, {"groups": 4},
                                     {"padding": 1, "padding_mode": "circular"}])  # fmt: skip
def test_other_convolutions_stay_as_they_are(options):
    assert spectra_gain(Shape((12, 12), (5, 5), (0, 0)), 64, 32, 64)
    layer = nn.Conv2d(32, 64, 5, **options)
    images = torch.randn(64, 32, 12, 12)
    assert torch.equal(convolve(layer, images, layer.weight, layer.bias), layer(images))


def test_halves_unbatched_images_and_autocast_take_the_plain_way():
    layer = nn.Conv2d(32, 64, 5)
    spectral = copy.deepcopy(layer)
    convolve_by_spectra(spectral)
    one = torch.randn(32, 12, 12)
    assert torch.equal(spectral(one), layer(one))
    many = torch.randn(64, 32, 12, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(spectral(many), layer(many))
    assert torch.equal(spectral.bfloat16()(many.bfloat16()), layer.bfloat16()(many.bfloat16()))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("algorithm", [ga.FedGA(beta=0.1), ga.FedAvg() + ga.Scaffold()])
def test_a_run_by_spectra_agrees_with_the_plain_one(algorithm, inplace):
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 32, 3), nn.ReLU(inplace), nn.Conv2d(32, 48, 5, padding=1), nn.ReLU(inplace), nn.Flatten(),
        nn.Linear(3072, 48), nn.ReLU(inplace), nn.Linear(48, 5),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(70, 3, 12, 12, generator=generator), torch.randint(5, (70,), generator=generator))
        for _ in range(2)
    ]
    task = ga.Task(model=model, clients=data, test=data[0])
    local = ga.LocalTraining(lr=0.02, steps=3, batch_size=60)
    trainer = trainer_of(task, local)
    assert isinstance(trainer.flat.module.forward, FasterStack)
    assert ProductLinear in {type(part) for part in trainer.flat.module}
    assert spectra_gain(Shape((10, 10), (5, 5), (1, 1)), 60, 32, 48)
    close(both(task, algorithm, local))
