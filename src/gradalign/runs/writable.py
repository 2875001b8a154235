"""Can a model be written when it is trained? Asked before, since the answer is the same."""

from __future__ import annotations

from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from gradalign.errors import GradalignError
from gradalign.server.federation import Federation


def require_writable(federation: Federation) -> None:
    """Refuse a model whose state cannot be written."""
    state = federation.task.make_model(federation.seed).state_dict()
    odd = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise GradalignError(
            f"the model's state has {odd}, a {type(state[odd]).__name__}, and only tensors can be written; let "
            "get_extra_state return a tensor, or run without a folder"
        )
    try:
        # Kind and layout decide, not the values, so none are copied.
        save({name: tensor.detach().new_empty(0).cpu() for name, tensor in state.items()})
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise GradalignError(f"the model's state cannot be written: {error}") from None
