"""FedLab's standalone simulation: its serial trainer, its server handler, its pipeline."""

from __future__ import annotations

import torch

# FedLab imports torchvision, for data sets that are not used here. Where torchvision was built for another torch than
# the one at hand (the usual wheel beside a CPU-only torch), its compiled operators do not load, and its import fails
# for want of these two: declared, and never called, they let FedLab start.
try:
    import torchvision  # noqa: F401
except RuntimeError:
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.gate import Gate
from benchmarks.workloads import Workload

MANY = 10**9  # rounds: the gate ends the run


class Clients:
    """The clients' examples, as FedLab asks for them."""

    def __init__(self, workload: Workload, data: tuple[Tensor, Tensor]) -> None:
        size = workload.size
        parts = zip(data[0].split(size), data[1].split(size), strict=True)
        self._datasets = [TensorDataset(*part) for part in parts]
        self._steps = workload.local_steps()

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
        """Return all batches of a client's round, which FedLab goes through once."""
        dataset = self._datasets[client]
        batches: list[list[int]] = []
        while len(batches) < self._steps:
            batches += [rows.tolist() for rows in torch.randperm(len(dataset)).split(batch_size)]
        return DataLoader(dataset, batch_sampler=batches[: self._steps])


class Handler(FedAvgServerHandler):
    """FedLab's server with the number of sampled clients given as such, not as a fraction that is rounded down."""

    sampled: int

    @property
    def num_clients_per_round(self) -> int:
        """Return how many clients a round samples."""
        return self.sampled


class Pipeline(StandalonePipeline):
    """FedLab's loop, which calls ``evaluate`` after every round."""

    gate: Gate

    def evaluate(self) -> None:
        """Wait for the next round."""
        self.gate.wait(self.handler.model.parameters)


def run(workload: Workload, gate: Gate) -> None:
    """Play rounds for as long as the gate lets them through."""
    torch.manual_seed(0)
    model = workload.model()
    trainer = FedAvgSerialClientTrainer(model, workload.clients)
    trainer.setup_dataset(Clients(workload, workload.data()))
    trainer.setup_optim(epochs=1, batch_size=workload.batch, lr=workload.lr)
    handler = Handler(model, global_round=MANY, sample_ratio=1.0)
    handler.sampled = workload.sampled
    pipeline = Pipeline(handler, trainer)
    pipeline.gate = gate
    pipeline.evaluate()
    pipeline.main()
