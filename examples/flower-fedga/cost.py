"""What a round costs in messages and bytes.

Counts what Flower is given to carry (the records of every message, without Flower's envelopes) on a grid in this
process, for a model of 4,810 float32 parameters and ten clients a round.
"""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import Message
from flwr.serverapp import Grid

import gradalign as ga
from gradalign.algorithms.plan import combine
from gradalign.client.flat import FlatModel
from gradalign.flower.engine import in_process_engine
from gradalign.server.federation import make_federation
from gradalign.server.rounds import play_round
from gradalign.server.state import ServerState
from gradalign.tasks.digits import digits

CLIENTS, ROUNDS = 10, 5
ALGORITHMS = {
    "FedAvg": ga.FedAvg(),
    "FedProx": ga.FedProx(mu=0.1),
    "FedGA()": ga.FedGA(),
    "FedGA with fresh gradients": ga.FedGA(beta=0.4),
    "SCAFFOLD, fresh gradients": ga.Scaffold(),
    "SCAFFOLD, option II": ga.Scaffold(control="kept"),
    "FedDyn": ga.FedDyn(alpha=0.1),
}


def note_sizes(grid: Grid) -> tuple[list[int], list[int]]:
    """Have a grid write down the bytes of every message, as Flower counts those of records: on its way down, and up."""
    down, up = list[int](), list[int]()
    push, pull = grid.push_messages, grid.pull_messages

    def noted(messages: Iterable[Message], sizes: list[int]) -> list[Message]:
        messages = list(messages)
        sizes += (sum(record.count_bytes() for record in message.content.values()) for message in messages)
        return messages

    grid.push_messages = lambda messages: push(noted(messages, down))
    grid.pull_messages = lambda ids: noted(pull(ids), up)
    return down, up


def main() -> None:
    """Print one line for each algorithm, per client and round."""
    task, local = digits(clients=CLIENTS), ga.LocalTraining(lr=0.1, steps=2, batch_size=32)
    vector = FlatModel(task.make_model(0)).vector.numel() * 4
    print(f"one parameter vector: {vector:,} bytes\n")
    print(f"{'per client and round':28}{'messages':>10}{'bytes down':>12}{'bytes up':>12}{'vectors':>10}")
    for name, algorithm in ALGORITHMS.items():
        federation = make_federation(
            task, combine(algorithm), local, per_round=None, weights="uniform", dropout=0.0, seed=0, rounds=ROUNDS
        )
        engine = in_process_engine(federation)
        state, (down, up) = ServerState(point=FlatModel(task.make_model(0)).read()), note_sizes(engine.exchange.grid)
        for _ in range(ROUNDS):
            state, _ = play_round(federation, engine, state)
        share = CLIENTS * ROUNDS
        messages, sent, returned = (len(down) + len(up)) / share, sum(down) / share, sum(up) / share
        print(f"{name:28}{messages:10.0f}{sent:12,.0f}{returned:12,.0f}{(sent + returned) / vector:10.2f}")


if __name__ == "__main__":
    main()
