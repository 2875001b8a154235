"""Flower's simulation: a ClientApp and a ServerApp on Ray, one actor of one core for every core."""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.contenders import train_plainly
from benchmarks.peers.gate import Gate
from benchmarks.workloads import Workload, find_workload

MANY = 10**9  # rounds: the gate ends the run

app = ClientApp()


@cache  # an actor plays many clients: it makes the examples once
def _examples(name: str) -> tuple[Tensor, Tensor]:
    return find_workload(name).data()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client's model from the server's parameters."""
    workload = find_workload(str(message.content["config"]["workload"]))
    model = workload.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows = slice(workload.size * (client := int(context.node_config["partition-id"])), workload.size * (client + 1))
    inputs, targets = _examples(workload.name)
    train_plainly(model, TensorDataset(inputs[rows], targets[rows]), workload)
    metrics = MetricRecord({"num-examples": workload.size})
    answer = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=answer, reply_to=message)


def run(workload: Workload, gate: Gate) -> None:
    """Play rounds for as long as the gate lets them through."""
    server = ServerApp()
    torch.manual_seed(0)
    model = workload.model()

    def between_rounds(number: int, arrays: ArrayRecord) -> None:
        gate.wait(lambda: arrays.to_torch_state_dict().values())

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=workload.sampled / workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=workload.sampled,
            min_available_nodes=workload.clients,
        )
        strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=MANY,
            train_config=ConfigRecord({"workload": workload.name}),
            evaluate_fn=between_rounds,
        )

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=workload.clients, backend_config=resources)
