"""What a round costs in messages and bytes.

Counts what Flower is given to carry (the records of every message, without Flower's envelopes) on a grid in this
process, for a model of 4,810 float32 parameters and ten clients a round.
"""

from __future__ import annotations

import gradalign as ga
from gradalign.algorithms.plan import combine
from gradalign.client.flat import FlatModel
from gradalign.flower.engine import in_process_engine
from gradalign.server.federation import ServerState, make_federation
from gradalign.server.rounds import play_round
from gradalign.tasks.digits import digits

CLIENTS, ROUNDS = 10, 5
ALGORITHMS = {
    "FedAvg": ga.FedAvg(),
    "FedProx": ga.FedProx(mu=0.1),
    "FedGA": ga.FedGA(beta=0.4),
    "FedGA in one trip": ga.FedGA(beta=0.4, mean="running"),
    "SCAFFOLD, fresh gradients": ga.Scaffold(),
    "SCAFFOLD, option II": ga.Scaffold(control="kept"),
    "FedDyn": ga.FedDyn(alpha=0.1),
}


def main() -> None:
    """Print one line for each algorithm, per client and round."""
    task, local = digits(clients=CLIENTS), ga.LocalTraining(lr=0.1, steps=2, batch_size=32)
    vector = FlatModel(task.make_model(0)).vector.numel() * 4
    print(f"one parameter vector: {vector:,} bytes\n")
    print(f"{'per client and round':28}{'messages':>10}{'bytes down':>12}{'bytes up':>12}{'vectors':>10}")
    for name, algorithm in ALGORITHMS.items():
        federation = make_federation(
            task, combine(algorithm), local, per_round=None, weights="uniform", dropout=0.0, seed=0
        )
        engine = in_process_engine(federation)
        state = ServerState(point=FlatModel(task.make_model(0)).read())
        for _ in range(ROUNDS):
            state, _ = play_round(federation, engine, state)
        seen, share = engine.exchange.traffic, CLIENTS * ROUNDS
        messages, down, up = seen.messages_down + seen.messages_up, seen.bytes_down / share, seen.bytes_up / share
        print(f"{name:28}{messages / share:10.0f}{down:12,.0f}{up:12,.0f}{(down + up) / vector:10.2f}")


if __name__ == "__main__":
    main()
