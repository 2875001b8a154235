"""The server: FedGA in two message phases a round."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedga_digits.task import make_task
from gradalign import FedGA, LocalTraining
from gradalign.flower.exchange import Patience
from gradalign.flower.strategy import AlignedStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and print what came of it."""
    config = context.run_config
    strategy = AlignedStrategy(
        FedGA(beta=float(config["beta"])),
        make_task(context),  # the model, and the test digits; the clients' digits are at the clients
        local=LocalTraining(
            lr=float(config["lr"]), steps=int(config["local-steps"]), batch_size=int(config["batch-size"])
        ),
        clients=int(config["num-clients"]),
        weights="uniform",  # as in the paper
        min_fraction=float(config["min-fraction"]),
        patience=Patience(
            connect_seconds=float(config["connect-seconds"]),
            gradient_seconds=float(config["gradient-seconds"]),
            train_seconds=float(config["train-seconds"]),
        ),
        seed=int(config["seed"]),
        out=str(config["out"]) or None,
        checkpoint_seconds=0.0,
    )
    result = strategy.start(grid, num_rounds=int(config["num-server-rounds"]))
    print(f"final test accuracy: {result.summary['final_test_accuracy']:.2%}")
