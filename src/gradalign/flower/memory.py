"""What a client keeps between messages, in Flower's ``context.state``: x and its own gradient, and its k_i.

A k_i is kept in two versions: the one the server knows of, and the one after the present round. When the reply is
lost on its way the server names the older round again and the client goes back to it, and both mean the same vector.
The server is the authority: an order has the digests of g_i and k_i as the server has them, and a client that holds
others (its Δ_i was clipped or noised on the way) asks for them.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message
from torch import Tensor

from gradalign.client.flat import Point
from gradalign.errors import GradalignError
from gradalign.flower.messages import ARRAYS, digest, received_point, to_array, to_tensor

_GRADIENT, _POINT, _KEPT = "gradalign.gradient", "gradalign.point", "gradalign.kept"


class MemoryLostError(GradalignError):
    """The server counts on a vector that this client does not have, or not with the same bits.

    It is missing when a SuperNode was restarted; it ``differs`` when Δ_i or g_i was changed on its way to the server.
    """

    def __init__(self, text: str, *, differs: bool = False) -> None:
        super().__init__(text)
        self.differs = differs


def _same(vector: Tensor, wanted: str | None, what: str) -> Tensor:
    """Return a vector that is the server's, too; ``wanted`` is the digest of the server's."""
    if wanted is not None and digest(vector) != wanted:
        raise MemoryLostError(f"this client's {what} is not the server's", differs=True)
    return vector


class ClientMemory:
    """One client's part of ``context.state``, for one Flower run."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def _record(self, name: str) -> ArrayRecord:
        records = self._context.state.array_records
        return records[name] if name in records else ArrayRecord()

    def _tag(self, round_index: int) -> str:
        # A state can outlive a run (Flower's run series); another run's vectors must not be taken for this one's.
        return f"{self._context.run_id}:{round_index}"

    def put_point(self, message: Message, round_index: int) -> None:
        """Remember x and the buffers until this round's training, so that they are sent once."""
        tag = self._tag(round_index)
        arrays = message.content.array_records[ARRAYS]
        self._context.state[_POINT] = ArrayRecord({f"{tag}/{name}": array for name, array in arrays.items()})

    def point(self, message: Message, round_index: int, like: Point) -> Point:
        """Return the point that a message carries, or the one of this round that was remembered."""
        arrays = message.content.array_records[ARRAYS]
        if "x" in arrays:
            return received_point(arrays, like)
        prefix = f"{self._tag(round_index)}/"
        found = {name: array for name, array in self._record(_POINT).items() if name.startswith(prefix)}
        if not found:
            raise MemoryLostError(f"this client has no model of round {round_index + 1}")
        return received_point(ArrayRecord({name.removeprefix(prefix): array for name, array in found.items()}), like)

    def put_gradient(self, gradient: Tensor, round_index: int, limit: int | None) -> None:
        """Remember g_i until this round's training."""
        name = f"{self._tag(round_index)}:{limit}"
        self._context.state[_GRADIENT] = ArrayRecord({name: to_array(gradient)})

    def gradient(self, round_index: int, limit: int | None, like: Tensor, wanted: str | None = None) -> Tensor:
        """Return the g_i of this round; it is lost when it is not there, or not the one with the wanted digest."""
        record, name = self._record(_GRADIENT), f"{self._tag(round_index)}:{limit}"
        if name not in record:
            raise MemoryLostError(f"this client has no gradient of round {round_index + 1}")
        return _same(to_tensor(record[name], like.dtype), wanted, "gradient")

    def kept(self, label: str, round_index: int, like: Tensor, wanted: str | None = None) -> Tensor:
        """Return k_i as it was after this round; it is lost when it is not there, or not the one wanted."""
        record, name = self._record(_KEPT), f"{label}@{self._tag(round_index)}"
        if name not in record:
            raise MemoryLostError(f"this client has no vector of {label} from round {round_index + 1}")
        return _same(to_tensor(record[name], like.dtype), wanted, f"vector of {label}")

    def put_kept(self, label: str, versions: dict[int, Tensor]) -> None:
        """Remember k_i as it was after each of these rounds, and forget all others."""
        others = {name: array for name, array in self._record(_KEPT).items() if not name.startswith(f"{label}@")}
        fresh = {f"{label}@{self._tag(index)}": to_array(vector) for index, vector in versions.items()}
        self._context.state[_KEPT] = ArrayRecord(others | fresh)
