"""Flower's client mods on our messages.

Flower's privacy mods expect one ArrayRecord each way with the same names, and take the difference of the two for the
update. Ours go down with x and ḡ and come up with the update itself. ``on_update`` shows a mod what it expects: zeros
going down, the update coming up. The difference is then the update, to the bit.
"""

from __future__ import annotations

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from gradalign.flower.messages import ARRAYS, CONFIG, TRAIN

_CARRIED = ("update", "gradient")


def on_update(mod: Mod, *, gradients: bool = True) -> Mod:
    """Return a Flower mod that applies ``mod`` to Δ_i, and to g_i in the gradient phase; buffers pass untouched.

    Args:
        mod: For example ``fixedclipping_mod``, ``adaptiveclipping_mod`` or ``LocalDpMod(...)``.
        gradients: Whether g_i goes through the mod, too. A g_i sent as it is says as much about the data as Δ_i.
    """

    def adapted(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        if not (kind == TRAIN or (gradients and kind.startswith(f"{TRAIN}."))):
            return call_next(message, context)
        reply = call_next(message, context)
        if reply.has_error() or ARRAYS not in reply.content.array_records:
            return reply
        arrays = reply.content.array_records[ARRAYS]
        carried = {name: array for name, array in arrays.items() if name in _CARRIED}
        rest = {name: array for name, array in arrays.items() if name not in _CARRIED}
        zeros = {name: Array(np.zeros_like(array.numpy())) for name, array in carried.items()}

        def shown_reply(_: Message, __: Context) -> Message:
            reply.content[ARRAYS] = ArrayRecord(carried)
            return reply

        seen = _shown(message, zeros)
        answer = mod(seen, context, shown_reply)
        if not answer.has_error():
            answer.content[ARRAYS] = ArrayRecord({**answer.content.array_records[ARRAYS], **rest})
        return answer

    return adapted


def _shown(message: Message, arrays: dict[str, Array]) -> Message:
    """Return the message as a mod expects it: the same order, other arrays."""
    content = RecordDict({ARRAYS: ArrayRecord(arrays), CONFIG: message.content.config_records[CONFIG]})
    shown = Message(content, reply_to=message)
    shown.metadata.__dict__.update(message.metadata.__dict__)  # so that an error reply finds its way
    return shown
