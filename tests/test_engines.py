"""Workers: the same bits for any number of them, also when they are killed; and nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import gradalign as ga
from conftest import blobs, hear_ctrl_c, vector
from gradalign.algorithms.plan import combine
from gradalign.client.exchange import Broadcast
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.engines.pool import PoolEngine
from gradalign.server.federation import make_federation
from gradalign.server.rounds import play_round
from gradalign.server.state import ServerState
from gradalign.tasks.digits import digits
from gradalign.tasks.task import PartitionedClients

LOCAL = ga.LocalTraining(lr=0.1, steps=3, batch_size=8)
EVERYTHING = ga.FedGA(beta=0.1) + ga.FedProx(mu=0.1) + ga.Scaffold(control="kept") + ga.FedAdam(lr=0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


ONE_TRIP = ga.FedGA(beta="auto", length=0.5, mean="running") + ga.FedInit() + ga.FedLESAM() + ga.FedSAM()


@pytest.mark.parametrize("algorithm", [ga.FedAvg(), EVERYTHING, ONE_TRIP], ids=["fedavg", "everything", "one-trip"])
def test_bits_do_not_depend_on_the_number_of_workers(algorithm):
    runs = [
        ga.run(blobs(), algorithm, rounds=3, clients_per_round=4, local=LOCAL, workers=workers)
        for workers in (0, 1, 2, 3)
    ]
    for run in runs[1:]:
        assert torch.equal(vector(run), vector(runs[0]))
        for name, column in run.history.items():
            assert name == "seconds" or column == runs[0].history[name], name


def _federation(task, algorithm, per_round=None):
    return make_federation(task, combine(algorithm), LOCAL, per_round=per_round, weights="uniform", dropout=0.0, seed=0)


def _play(engine, federation, rounds=2):
    state = ServerState(point=FlatModel(federation.task.make_model(0)).read())
    for _ in range(rounds):
        state, _ = play_round(federation, engine, state)
    return state


class Slow:
    """A client's dataset that takes its time, so that there is a middle of a round to be killed in."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int):
        time.sleep(0.002)
        return self.inputs[index], self.targets[index]


def test_a_killed_worker_is_replaced_and_the_bits_stay():
    task = blobs()
    slow = ga.Task(model=task.model, clients=[Slow(*client) for client in task.clients], test=task.test)
    federation = _federation(slow, EVERYTHING)
    setup = Setup(task=slow, local=LOCAL, clients_per_round=len(slow.clients), algorithm=EVERYTHING)
    with InProcessEngine(setup) as engine:
        expected = _play(engine, federation)
    with PoolEngine(setup, 2) as engine:
        first = engine.worker_pids()
        killed: list[int] = []

        def kill_some() -> None:
            for _ in range(3):
                time.sleep(0.1)
                while not (pids := engine.worker_pids()):  # for a moment, when all make way for others
                    time.sleep(0.01)
                os.kill(pids[0], signal.SIGKILL)
                killed.append(pids[0])

        killer = threading.Thread(target=kill_some)
        killer.start()
        found = _play(engine, federation)
        killer.join()
        assert len(set(killed)) >= 2
        assert set(engine.worker_pids()) != set(first)
    assert torch.equal(found.point.x, expected.point.x)
    assert torch.equal(found.point.floats, expected.point.floats)
    assert found.totals == expected.totals


def test_a_worker_killed_while_idle_is_replaced():
    task = blobs()
    federation = _federation(task, ga.FedAvg())
    with PoolEngine(Setup(task=task, local=LOCAL), 2) as engine:
        expected = _play(engine, federation)
        for pid in engine.worker_pids():
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not engine.worker_pids())
        assert torch.equal(_play(engine, federation).point.x, expected.point.x)


class Deadly:
    """A client whose data ends the process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_client_that_always_kills_its_worker_is_named():
    task = ga.Task(model=blobs().model, clients=[Deadly(), Deadly()])
    with (
        PoolEngine(Setup(task=task, local=LOCAL), 2) as engine,
        pytest.raises(ga.GradalignError, match=r"client \d ended its worker process 3 times"),
    ):
        _play(engine, _federation(task, ga.FedAvg()))


class Broken(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise KeyError("no such layer")


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_in_user_code_name_the_client_and_keep_the_traceback(workers):
    task = ga.Task(model=Broken, clients=blobs().clients)
    measure = ga.Measure(train_every=0)
    with pytest.raises(ga.GradalignError, match="client 0 failed: KeyError: 'no such layer'") as caught:
        ga.run(task, ga.FedAvg(), rounds=1, workers=workers, measure=measure)
    trace = "".join(getattr(caught.value, "__notes__", [])) + str(caught.value.__cause__)
    assert "no such layer" in trace


def test_workers_end_with_the_engine_and_after_an_error():
    task = blobs()
    engine = PoolEngine(Setup(task=task, local=LOCAL), 3)
    pids = engine.worker_pids()
    assert len(pids) == 3
    point = FlatModel(task.make_model(0)).read()
    assert list(engine.train(Broadcast(point=point, round=0, algorithm=combine(ga.FedAvg()), lr=0.1), [])) == []
    pids += engine.worker_pids()
    engine.close()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from conftest import blobs
import gradalign as ga
from gradalign.client.trainer import Setup
from gradalign.engines.pool import PoolEngine
engine = PoolEngine(Setup(task=blobs(), local=ga.LocalTraining()), 2)
print(*engine.worker_pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(end):
    code = PARENT.format(tests=str(Path(__file__).parent))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=hear_ctrl_c
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(alive(pid) for pid in pids)
    parent.send_signal(end)
    parent.wait(timeout=20)
    parent.stdout.close()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_spawned_workers_give_the_same_bits():
    task, local = digits(clients=4, classes_per_client=3), LOCAL
    federation = make_federation(
        task, combine(ga.FedGA(beta=0.1)), local, per_round=None, weights="uniform", dropout=0.0, seed=0
    )
    setup = Setup(task=task, local=local)
    with InProcessEngine(setup) as engine:
        expected = _play(engine, federation, rounds=1)
    with PoolEngine(setup, 1, method="spawn") as engine:
        assert torch.equal(_play(engine, federation, rounds=1).point.x, expected.point.x)


def test_tasks_that_cannot_be_spawned_say_so():
    with pytest.raises(ga.GradalignError, match="use workers=0"):
        PoolEngine(Setup(task=blobs(), local=LOCAL), 1, method="spawn")


def test_a_hundred_thousand_clients_keep_state_only_for_those_seen():
    clients = 100_000
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(clients, 8, generator=generator), torch.arange(clients) % 4
    task = ga.Task(
        model=blobs().model,
        clients=PartitionedClients((inputs, labels), torch.arange(clients).view(-1, 1)),
    )
    # Batch norm cannot train on one example; every client here has one.
    task = ga.Task(model=lambda: torch.nn.Linear(8, 4), clients=task.clients)
    federation = _federation(task, ga.Scaffold(control="kept") + ga.FedDyn(alpha=0.1), per_round=20)
    with InProcessEngine(Setup(task=task, local=LOCAL)) as engine:
        state = _play(engine, federation, rounds=3)
    seen = {client for r in range(3) for client in federation.sample(r)}
    assert set(state.kept["scaffold"]) == set(state.kept["feddyn"]) == seen
    assert 40 < len(seen) <= 60


def test_sampling_is_uniform_without_replacement():
    """Each of 10 clients is in a sample of 3 with probability 0.3: within 5 standard deviations over 4000 rounds."""
    federation = _federation(blobs(clients=10), ga.FedAvg(), per_round=3)
    samples = [federation.sample(r) for r in range(4000)]
    assert all(len(set(sample)) == 3 and sample == sorted(sample) for sample in samples)
    counts = torch.bincount(torch.tensor(samples).reshape(-1), minlength=10)
    spread = (4000 * 0.3 * 0.7) ** 0.5
    assert all(abs(int(count) - 1200) < 5 * spread for count in counts)
