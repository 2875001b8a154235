"""A real deployment on this machine: SuperLink and SuperNodes as processes, TLS, node keys, and one node killed."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

import gradalign as ga
from gradalign.algorithms.plan import combine
from gradalign.client.flat import FlatModel
from gradalign.client.trainer import Setup
from gradalign.engines.local import InProcessEngine
from gradalign.runs.metrics import read_metrics
from gradalign.server.federation import make_federation
from gradalign.server.rounds import play_round
from gradalign.server.state import ServerState
from gradalign.tasks.digits import digits

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'gradalign[flower]'")

EXAMPLE = Path(__file__).parent.parent / "examples" / "flower-fedga"
LOCAL = ga.LocalTraining(lr=0.2, steps=10, batch_size=32)


def load_deploy():
    spec = importlib.util.spec_from_file_location("deploy", EXAMPLE / "deploy.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["deploy"] = module
    spec.loader.exec_module(module)
    return module


class WithoutReports(InProcessEngine):
    """The local engine, on which a client answers the gradient phase in round 1 and then is gone."""

    def __init__(self, setup: Setup, gone: int) -> None:
        super().__init__(setup)
        self.gone = gone

    def gradients(self, told, who):
        return super().gradients(told, [one for one in who if told.round == 0 or one.client != self.gone])

    def train(self, told, who):
        return super().train(told, [one for one in who if one.client != self.gone])


def formula(rounds: int, gone: int):
    """Return the model after some rounds in which one client is gone from the training of round 1 on."""
    task = digits(seed=0, clients=3, classes_per_client=4)
    federation = make_federation(
        task, combine(ga.FedGA(beta=0.4)), LOCAL, per_round=None, weights="uniform", dropout=0.0, seed=0
    )
    state = ServerState(point=FlatModel(task.make_model(0)).read())
    for _ in range(rounds):
        state, _ = play_round(federation, WithoutReports(Setup(task=task, local=LOCAL), gone), state)
    model = task.make_model(0)
    FlatModel(model).load(state.point)
    return model.state_dict()


def wait_for(condition, what: str, seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """A SuperLink and three SuperNodes, and how long they took to start; the second test kills one of them."""
    source = str(Path(ga.__file__).parents[1])
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])]))
        with load_deploy().Deployment(tmp_path_factory.mktemp("flower") / "d") as made:
            yield made, time.monotonic() - begin


def test_flowers_quickstart_with_fedga(deployment):
    """The app of three changed lines: all train, two evaluate, and their metrics are told."""
    running, _ = deployment
    run = running.run(EXAMPLE / "one-trip", **{"num-server-rounds": 1, "fraction-evaluate": 0.1})
    wait_for(lambda: run.poll() is not None, "the run did not end")
    said = running.log("run")
    assert run.returncode == 0, said
    assert said.count("aggregate_train: Received 3 results and 0 failures") == 1, said
    assert said.count("aggregate_evaluate: Received 2 results and 0 failures") == 1, said
    assert re.search(r"1: \{'train_loss': '[12]\.", said)
    assert re.search(r"accuracy at the clients: 0\.\d+", said)


def test_a_node_killed_between_the_phases_and_one_without_a_key(deployment):
    """Client 2 sends its gradient and is killed; a node with a key that nobody enrolled never gets in.

    What the server then has must be what the formula gives: ḡ over all three and the average over the other two in
    round 1, the other two alone in round 2. To the last bit, through TLS and processes.
    """
    running, started = deployment
    # The server waits this long for the dead client: long enough for this machine, as busy as it is, to start the
    # other clients' processes. It has just started as many.
    seconds, earlier = min(45.0, max(20.0, 3.0 * started)), len(running.log("node2"))
    intruder = running.start_node(3, enrol=False)
    run = running.run(**{"num-server-rounds": 2, "connect-seconds": 150.0, "train-seconds": seconds})

    def sent_its_gradient() -> bool:
        assert run.poll() is None, running.log("run")
        log = running.log("node2")[earlier:]
        return "Sent successfully" in log[log.find("Sending: train.gradient") :] and "Sending: train.grad" in log

    wait_for(sent_its_gradient, "client 2 never sent its gradient")
    running.kill("node2")
    assert "Sending: train message" not in running.log("node2")[earlier:]
    wait_for(lambda: run.poll() is not None, "the run did not end")
    assert intruder.wait(timeout=30) != 0
    assert "Failed to activate SuperNode" in running.log("node3")
    said = running.log("run")
    assert "round 1, training phase: client 2 is left out: " in said, said
    rows = read_metrics(running.folder / "run")
    assert [row["reported"] for row in rows] == [None, 2, 2], said
    assert [row["failed"] for row in rows] == [None, 1, 1]
    stored, expected = load_file(running.folder / "run" / "model.safetensors"), formula(2, gone=2)
    assert all((stored[name] == value).all() for name, value in expected.items())
