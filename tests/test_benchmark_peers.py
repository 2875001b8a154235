import io
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the installed package

from benchmarks.peers import install  # noqa: E402
from benchmarks.peers.driver import PeerError, contender  # noqa: E402
from benchmarks.peers.gate import Gate, Stopped  # noqa: E402
from benchmarks.peers.timing import Peers, compare  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

FAKE = """
import subprocess, sys, time
from benchmarks.peers.gate import Gate, Stopped
{before}
gate = Gate.over_standard_streams()
try:
    while True:
        gate.wait(list)
        print("a simulator that prints")
        {during}
except Stopped:
    pass
"""


def fake(before: str = "", during: str = "time.sleep(0.05)") -> list[str]:
    return [sys.executable, "-c", FAKE.format(before=before, during=during)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Vector(list):
    """As much of a tensor as the gate asks for."""

    def detach(self):
        return self

    flatten = tolist = detach


def test_the_gate_reports_rounds_and_weights_and_stops_at_the_end_of_input():
    answers = io.StringIO()
    gate = Gate(io.StringIO("round\nweights\nround\n"), answers)
    gate.wait(list)
    time.sleep(0.01)
    gate.wait(lambda: [Vector([1.0, 2.0]), Vector([3.0])])
    with pytest.raises(Stopped):
        gate.wait(list)
    ready, first, weights, second = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert ready == {"ready": True}
    assert first["seconds"] >= 0.01
    assert weights == {"weights": [1.0, 2.0, 3.0]}
    assert 0 <= second["seconds"] < first["seconds"]


def test_a_contender_plays_round_by_round_and_its_own_prints_are_not_taken_for_answers():
    with contender(fake()) as player:
        assert all(player.play() >= 0.05 for _ in range(2))
        assert player.weights() == []


def test_a_contender_that_fails_says_why():
    with pytest.raises(PeerError, match="no such simulator"), contender(fake(before="sys.exit('no such simulator')")):
        pass
    with contender(fake(during="raise ValueError('out of luck')")) as player, pytest.raises(PeerError, match="out of"):
        player.play()


def test_a_contender_that_hangs_is_given_up():
    with contender(fake(during="time.sleep(60)")) as player, pytest.raises(PeerError, match="no answer"):
        player.play(patience=0.2)


DAEMON = """
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({path!r}, "w").write(str(daemon.pid))
"""


@pytest.mark.parametrize("during", ["pass", "__import__('os')._exit(1)"], ids=["ends in order", "dies"])
def test_no_daemon_of_a_contender_is_left_behind(tmp_path, during):
    path = tmp_path / "pid"
    with contender(fake(before=DAEMON.format(path=str(path)), during=during)) as player:
        daemon = int(path.read_text())
        assert is_alive(daemon)
        if during == "pass":
            player.play()
        else:
            with pytest.raises(PeerError):
                player.play()
    assert not is_alive(daemon)


def test_an_interrupted_benchmark_leaves_nothing_behind(tmp_path):
    path = tmp_path / "pid"
    with (
        pytest.raises(KeyboardInterrupt),
        contender(fake(before=DAEMON.format(path=str(path)), during="time.sleep(60)")),
    ):
        raise KeyboardInterrupt
    assert not is_alive(int(path.read_text()))


def test_memory_counts_shared_pages_once_and_children_too():
    mib = 2**20
    # 80 MiB that a forked child shares with its parent, and 40 MiB that are the child's own.
    fork = f"import os\nshared = b'x' * (80 * {mib})\nif not os.fork():\n    own = b'y' * (40 * {mib}); time.sleep(60)"
    with contender(fake(before=fork), watched=True) as player:
        time.sleep(0.5)
        player.play()
    # Interpreters come on top, two of them, with little that is their own.
    assert 120 * mib <= player.memory.peak < 160 * mib


def test_an_installation_counts_only_when_complete_and_of_the_pinned_versions(tmp_path):
    assert not install.is_installed("pfl", tmp_path)
    stamp = tmp_path / "pfl" / "installed.txt"
    stamp.parent.mkdir()
    stamp.write_text("pfl==0.0.1\n")
    assert not install.is_installed("pfl", tmp_path)
    stamp.write_text(install.requirements("pfl").read_text())
    assert install.is_installed("pfl", tmp_path)


@pytest.mark.parametrize("peer", install.PEERS)
def test_every_requirement_of_a_peer_is_pinned(peer):
    lines = [line for line in install.requirements(peer).read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert "torch==2.13.0" in lines


def test_peers_that_are_not_installed_are_named_with_the_command_that_installs_them(tmp_path):
    with ExitStack() as stack:
        peers = Peers(WORKLOADS["W1"], tmp_path, stack)
    assert peers.names() == []
    rows = compare({"plain": 6.0, "gradalign": 2.0}, peers.remarks)
    assert rows["pfl"] == {"remark": "not installed: python -m benchmarks.peers install pfl"}
    assert set(rows) == {"Flower", "pfl", "pfl, 2 processes", "FedLab"}


def test_ratios_of_a_peer():
    rows = compare({"plain": 6.0, "tuned": 5.0, "gradalign": 2.0, "Flower": 8.0}, {"pfl": "failed: so it is"})
    assert rows == {
        "Flower": {"seconds": 8.0, "speedup_over_plain": 0.75, "gradalign_speedup": 4.0},
        "pfl": {"remark": "failed: so it is"},
    }


def test_workloads_and_the_plain_loop_need_no_gradalign():
    code = (
        "import sys; sys.modules['gradalign'] = None\n"
        "from benchmarks.contenders import plain_loop\n"
        "from benchmarks.workloads import CHECK\n"
        "with plain_loop(CHECK, CHECK.data()) as play: play()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
