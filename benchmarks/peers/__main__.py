"""``python -m benchmarks.peers install|check [flower] [pfl] [fedlab] [--into DIR]``: the peers' environments."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.peers.driver import PeerError, contender
from benchmarks.peers.install import DEFAULT_PLACE, PEERS, hint, install, is_installed, players
from benchmarks.workloads import CHECK

ROUNDS = 2


def expected() -> torch.Tensor:
    """Return the parameters after the check's rounds by federated averaging written out: full-batch steps, a mean."""
    torch.manual_seed(0)
    server, model = CHECK.model(), CHECK.model()
    inputs, targets = CHECK.data()
    for _ in range(ROUNDS):
        ends = []
        for x, y in zip(inputs.split(CHECK.size), targets.split(CHECK.size), strict=True):
            model.load_state_dict(server.state_dict())
            for _ in range(CHECK.local_steps()):
                gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), [*model.parameters()])
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter -= CHECK.lr * gradient
            ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        torch.nn.utils.vector_to_parameters(torch.stack(ends).mean(dim=0), server.parameters())
    return torch.nn.utils.parameters_to_vector(server.parameters()).detach()


def check(peers: list[str], place: Path) -> bool:
    """Print how far each peer's model is from the expected one after two rounds without chance; True if none is far."""
    target, good = expected(), True
    for name, (peer, command) in players(place).items():
        if peer not in peers:
            continue
        if not is_installed(peer, place):
            print(f"{name}: {hint(peer)}")
            continue
        try:
            with contender([*command, CHECK.name]) as player:
                for _ in range(ROUNDS):
                    player.play()
                found = torch.tensor(player.weights())
        except PeerError as error:
            print(f"{name}: {error}")
            good = False
            continue
        far = float((found - target).norm() / target.norm()) if found.shape == target.shape else float("inf")
        good = good and far < 1e-5
        print(f"{name}: relative distance {far:.1e}, {'the same average' if far < 1e-5 else 'NOT the same average'}")
    return good


def main() -> None:
    """Install or check the peers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("action", choices=("install", "check"))
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"some of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--into", type=Path, default=DEFAULT_PLACE, metavar="DIR", help="where the environments are")
    words = parser.parse_args()
    unknown = [peer for peer in words.peers if peer not in PEERS]
    if unknown:
        parser.error(f"unknown peer {unknown[0]}: choose from {', '.join(PEERS)}")
    peers, place = words.peers or list(PEERS), words.into.absolute()
    if words.action == "check":
        raise SystemExit(0 if check(peers, place) else 1)
    for peer in peers:
        install(peer, place)


if __name__ == "__main__":
    main()
