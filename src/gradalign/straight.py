"""Models in torch's functional style, run faster: a ``forward`` of one's own that is a straight line of known calls.

Such a ``forward`` (no branches, no loops, nothing stored, nothing but the module's own layers and a few of torch's
functions by name) does the same at every call, so that its trace *is* the function. In the trace, a convolution and
what follows it can be carried out as in a plain stack. Any other ``forward`` is left alone.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from gradalign.stacks import Run, flattens, is_blind, is_hooked

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_INSTRUCTIONS = {
    *_ATTRIBUTES, "PUSH_NULL", "PRECALL", "CALL", "CALL_KW", "KW_NAMES", "LOAD_GLOBAL", "LOAD_CONST", "LOAD_SMALL_INT",
    "LOAD_FAST", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST",
    "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "BINARY_OP", "UNARY_NEGATIVE", "BUILD_TUPLE", "RETURN_VALUE",
}  # fmt: skip
_OTHER_KINDS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
_NAMES = {
    "nn", "functional", "relu", "max_pool2d", "avg_pool2d", "flatten", "view", "reshape", "size", "shape", "dropout",
    "dropout2d", "log_softmax", "softmax", "tanh", "sigmoid", "leaky_relu", "elu", "gelu", "silu",
}  # fmt: skip
_FUNCTIONS = {F.relu, F.max_pool2d, F.avg_pool2d, F.dropout, F.dropout2d, F.log_softmax, F.softmax, torch.flatten}
_POOLING = {"kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"}
Layer = Callable[..., Any]


def run_straight_faster(model: nn.Module) -> None:
    """Let every module of a model that is a straight line with convolutions in it be carried out faster, in place."""
    for part in model.modules():
        if type(part).__module__.startswith("torch.") or is_hooked(part):
            continue
        if any(type(layer) is nn.Conv2d for layer in part.children()) and _is_straight(part):
            part.forward = FasterForward(part)


def _is_straight(module: nn.Module) -> bool:
    """Return whether the module's ``forward`` takes one argument and is a straight line of known calls."""
    kind = type(module)
    forward = inspect.getattr_static(kind, "forward", None)
    usual = kind.__call__ is nn.Module.__call__ and kind.__getattr__ is nn.Module.__getattr__
    if not inspect.isfunction(forward) or not usual or kind.__getattribute__ is not object.__getattribute__:
        return False
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & _OTHER_KINDS or forward.__defaults__:
        return False
    own = code.co_varnames[0]
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("RESUME", "NOP")]
    if not all(_is_known(step, forward.__globals__, own) for step in steps):
        return False
    pairs = ((before, step.argval) for before, step in itertools.pairwise(steps) if step.opname in _ATTRIBUTES)
    return all(_is_member(module, name) if _loads(before, own) else name in _NAMES for before, name in pairs)


def _is_known(step: dis.Instruction, names: dict[str, Any], own: str) -> bool:
    """Return whether one instruction belongs to a straight line: it stores nothing and changes nothing in place."""
    if step.opname == "LOAD_GLOBAL":
        value = names.get(step.argval)
        return value is torch or value is nn or value is F or (inspect.isroutine(value) and value in _FUNCTIONS)
    in_place = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
    hides = step.opname.startswith("STORE") and own in _variables(step)
    return step.opname in _INSTRUCTIONS and not in_place and not hides


def _variables(step: dis.Instruction) -> tuple[str, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _loads(step: dis.Instruction, own: str) -> bool:
    """Return whether an instruction leaves the module itself on top of the stack."""
    return "LOAD_FAST" in step.opname and _variables(step)[-1] == own


def _is_member(module: nn.Module, name: str) -> bool:
    """Return whether a module's attribute is one of its layers or a number."""
    return not hasattr(type(module), name) and (
        name in module._modules or isinstance(vars(module).get(name), int | float)
    )


class _Tracer(fx.Tracer):
    """Sees every member as one call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class FasterForward:
    """How a module is carried out; takes the place of its ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: list[Any] = []
        self._nodes: list[tuple[fx.Node, Layer | None]] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the module's own ``forward`` makes of the inputs."""
        module = self._module
        if len(inputs) != 1 or named or type(inputs[0]) is not Tensor or torch._C._are_functorch_transforms_active():
            return type(module).forward(module, *inputs, **named)
        numbers = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
        layers = [
            (name, layer, type(layer), layer is None or is_hooked(layer)) for name, layer in module._modules.items()
        ]
        present = [type(module).forward, numbers, layers]
        if present != self._known:
            self._known, self._nodes = present, planned_calls(module)
        return self._carry_out(inputs[0]) if self._nodes else type(module).forward(module, inputs[0])

    def _carry_out(self, inputs: Tensor) -> Any:
        values: dict[fx.Node, Any] = {}
        for node, layer in self._nodes:
            if node.op == "placeholder":
                values[node] = inputs
                continue
            arguments = fx.node.map_arg(node.args, values.__getitem__)
            if node.op == "output":
                return arguments[0]
            if layer is None:
                layer = getattr(arguments[0], str(node.target))
                arguments = arguments[1:]
            values[node] = layer(*arguments, **fx.node.map_arg(node.kwargs, values.__getitem__))
        raise AssertionError("a trace ends with its output")


def planned_calls(module: nn.Module) -> list[tuple[fx.Node, Layer | None]]:
    """Return the nodes of the module's trace with what they call, runs of layers as one; none where it has no trace."""
    try:
        nodes = list(_Tracer().trace(module).nodes)
    except fx.proxy.TraceError:
        return []
    calls: dict[fx.Node, Layer | None] = {}
    inside: set[fx.Node] = set()
    for node in nodes:
        run = [] if node in calls or node in inside else _run_from(node, module)
        if len(run) > 1:
            last = run[-1][0]
            calls[last] = Run([layer for _, layer in run])
            last.args, last.kwargs = node.args, {}
            inside.update(one for one, _ in run[:-1])
        elif node.op == "call_module":
            calls.setdefault(node, module.get_submodule(str(node.target)))
        elif node.op == "call_function":
            calls.setdefault(node, node.target)
    return [(node, calls.get(node)) for node in nodes if node not in inside]


def _run_from(node: fx.Node, module: nn.Module) -> list[tuple[fx.Node, nn.Module]]:
    """Return the nodes and layers of the run that begins with this convolution; nothing for any other node."""
    layer = _layer_of(node, module)
    if type(layer) is not nn.Conv2d or not is_blind(layer):
        return []
    run: list[tuple[fx.Node, nn.Module]] = [(node, layer)]
    while list(node.users) == [node.next]:  # nothing else sees what is in between, or happens in between
        node = node.next
        after = _layer_of(node, module)
        if after is None or not (is_blind(after) or flattens(after)):
            break
        run.append((node, after))
        if flattens(after):
            break
    return run


def _layer_of(node: fx.Node, module: nn.Module) -> nn.Module | None:
    """Return the layer that a node is a call of, given one tensor: the module's own, or one like a function's call."""
    arguments: list[Any] = [*node.args, None]
    given, numbers = arguments[0], arguments[1:-1]
    named: dict[str, Any] = dict(node.kwargs)
    constant = all(value is None or isinstance(value, int | tuple) for value in [*numbers, *named.values()])
    if not isinstance(given, fx.Node) or not constant:
        return None
    if node.op == "call_module" and not numbers and not named:
        return module.get_submodule(str(node.target))
    if node.target in (F.relu, torch.relu) and not numbers and named.keys() <= {"inplace"}:
        return nn.ReLU(**named)
    if node.target is F.max_pool2d and named.keys() <= _POOLING and not named.get("return_indices"):
        return nn.MaxPool2d(*numbers, **named)
    if node.target is torch.flatten and numbers == [1] and not named:
        return nn.Flatten()
    return None
