"""pfl's simulated backend with its federated averaging, in one process or, under torchrun, in several."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.gate import Gate, Stopped
from benchmarks.workloads import Workload

MANY = 10**9  # rounds: the gate ends the run


class Net(nn.Module):
    """A network with the two methods that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(self.net(inputs), targets)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
        """Return the loss of a batch, for pfl's evaluation before the first round."""
        return {"loss": Weighted(len(targets) * self.loss(inputs, targets).item(), len(targets))}


class Between(TrainingProcessCallback):
    """Waits between rounds: the first process at the gate, the others for the first."""

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Wait for the first round."""
        self._wait(model)
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, **_: Any
    ) -> tuple[bool, Metrics]:
        """Wait for the next round."""
        self._wait(model)
        return False, Metrics()

    def _wait(self, model: PyTorchModel) -> None:
        go = torch.ones(1)
        if self._gate:
            try:
                self._gate.wait(model.pytorch_model.parameters)
            except Stopped:
                go.zero_()
        if dist.is_initialized():
            dist.broadcast(go, src=0)
        if not go:
            raise Stopped


def run(workload: Workload, gate: Gate) -> None:
    """Play rounds for as long as the gate lets them through.

    Raises:
        Stopped: A client's steps are not a whole number of epochs, all that pfl's training knows.
    """
    epochs, rest = divmod(workload.local_steps(), workload.batches())
    if rest:
        raise gate.refuse(
            f"pfl trains whole epochs: {workload.local_steps()} steps are not of {workload.batches()} each"
        )
    size = workload.size
    inputs, targets = (values.split(size) for values in workload.data())
    clients = FederatedDataset(
        lambda client: PyTorchTensorDataset((inputs[client], targets[client])),
        get_user_sampler("minimize_reuse", list(range(workload.clients))),
    )
    torch.manual_seed(0)
    net = Net(workload.model())
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    params = NNAlgorithmParams(
        central_num_iterations=MANY, evaluation_frequency=MANY, train_cohort_size=workload.sampled, val_cohort_size=None
    )
    local = NNTrainHyperParams(
        local_num_epochs=epochs, local_learning_rate=workload.lr, local_batch_size=workload.batch
    )
    first = os.environ.get("RANK", "0") == "0"
    FederatedAveraging().run(
        params,
        SimulatedBackend(training_data=clients, val_data=clients),
        model,
        local,
        callbacks=[Between(gate if first else None)],
        send_metrics_to_platform=False,
    )
