"""The products, losses and batches of clients that step together, against torch's own for one client at a time."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import gradalign as ga
from exchanges import told, who
from gradalign.client.flat import Point
from gradalign.client.trainer import Setup, shuffled_batches
from gradalign.fast.batches import Neighbours, client_losses, cross_entropies, plan_batches
from gradalign.fast.cohort import own_product, shared_product, stepping_product
from gradalign.seeding import Purpose, torch_stream
from gradalign.tasks.batches import TensorExamples

sizes = st.integers(1, 5)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(clients=sizes, rows=sizes, into=sizes, out=sizes, bias=st.booleans(), first=st.booleans(),
       decay=st.sampled_from([0.0, 0.2]))  # fmt: skip
def test_backward_takes_each_client_s_step(clients, rows, into, out, bias, first, decay):
    """W ← W − α(∂f/∂W + λW), and so the bias, of each client's own loss, by torch.autograd one client at a time."""
    inputs, grad_output = numbers(clients, rows, into), numbers(clients, rows, out, seed=1)
    weight, offset = numbers(clients, out, into, seed=2), numbers(clients, out, seed=3) if bias else None
    expected = []
    for i in range(clients):
        leaves = [t[i].clone().requires_grad_() for t in (inputs, weight, offset) if t is not None]
        F.linear(*leaves).backward(grad_output[i])
        expected.append([leaves[0].grad, *((1 - 0.3 * decay) * leaf.detach() - 0.3 * leaf.grad for leaf in leaves[1:])])
    inputs.requires_grad_(not first)
    found = stepping_product(inputs, weight, offset, lr=0.3, decay=decay)
    found.backward(grad_output)
    results = [None if first else inputs.grad, weight, offset]
    for i, known in enumerate(expected):
        for own, other in zip([r for r in results if r is not None], known[first:], strict=True):
            assert torch.allclose(own[i], other, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(clients=sizes, rows=sizes, into=sizes, out=sizes, bias=st.booleans())
def test_one_weight_for_all_gives_each_client_its_own_gradient(clients, rows, into, out, bias):
    inputs, grad_output = numbers(clients, rows, into).requires_grad_(), numbers(clients, rows, out, seed=1)
    shared = [numbers(out, into, seed=2), numbers(out, seed=3) if bias else None]
    found: list[Tensor] = []
    outputs = shared_product(inputs, *shared, found=found)
    outputs.backward(grad_output)
    spread = [None if t is None else t.expand(clients, *t.shape).clone().requires_grad_() for t in shared]
    same = inputs.detach().clone().requires_grad_()
    own = own_product(same, *spread)
    own.backward(grad_output)
    assert torch.allclose(outputs, own)
    assert torch.allclose(inputs.grad, same.grad)
    for gradient, leaf in zip(reversed(found), [t for t in spread if t is not None], strict=True):
        assert torch.allclose(gradient, leaf.grad)


@settings(max_examples=30, deadline=None)
@given(clients=sizes, rows=sizes, classes=st.integers(2, 6), weighted=st.booleans())
def test_cross_entropies_are_torch_s(clients, rows, classes, weighted):
    outputs = (3 * numbers(clients, rows, classes)).requires_grad_()
    targets = torch.randint(classes, (clients, rows), generator=torch.Generator().manual_seed(1))
    weights = numbers(clients, rows, seed=2).abs() if weighted else None
    scales = numbers(clients, seed=3)
    losses = cross_entropies(outputs, targets, weights)
    (losses * scales).sum().backward()
    same = outputs.detach().clone().requires_grad_()
    each = F.cross_entropy(same.flatten(0, 1), targets.flatten(), reduction="none").view(clients, rows)
    known = each.mean(dim=1) if weights is None else (each * weights).sum(dim=1)
    (known * scales).sum().backward()
    assert torch.allclose(losses, known, rtol=1e-12)
    assert torch.allclose(outputs.grad, same.grad, rtol=1e-12, atol=1e-15)


def test_a_label_that_is_no_class_is_refused_as_torch_refuses_it():
    outputs, targets = numbers(2, 3, 4), torch.tensor([[0, 1, 2], [3, 4, 0]])
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        client_losses(outputs, targets, None)


@pytest.mark.parametrize(("size", "batch", "steps", "epochs"), [(7, 3, 8, None), (6, 3, None, 2), (4, 9, 3, None)])
def test_clients_of_one_size_get_the_batches_of_the_path_for_one(size, batch, steps, epochs):
    """Three clients whose data lie one after another: row k of client i is the i-th stream's plus where i begins."""
    local = ga.LocalTraining(batch_size=batch, **({"steps": steps} if steps else {"epochs": epochs}))
    starts = [0, size, 2 * size]
    nothing, data = torch.empty(0), [TensorExamples((torch.ones(size, 1),))] * 3
    setup = Setup(task=ga.Task(model=torch.nn.Linear(1, 1), clients=[(torch.ones(1, 1),)]), local=local, seed=5)
    group = Neighbours(told(Point(nothing, nothing, nothing), round=2), who([4, 0, 9]), data)
    found = plan_batches(setup, group, starts, torch.float32)
    many = steps or epochs * -(-size // batch)
    assert found.steps == [many] * 3
    assert found.weights == found.active == [None] * many
    for i, client in enumerate((4, 0, 9)):
        stream = shuffled_batches(size, min(batch, size), torch_stream(5, Purpose.SHUFFLE, 2, client))
        known = list(itertools.islice(stream, many))
        assert found.seen[i] == sum(len(rows) for rows in known)
        for rows, own in zip(found.rows, known, strict=True):
            assert torch.equal(rows[i] - starts[i], own)
