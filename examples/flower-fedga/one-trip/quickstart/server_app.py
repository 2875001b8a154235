"""The server: averages, and evaluates on points of its own."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from gradalign.flower import FedGA, OneTrip

from quickstart.task import Net, load_test_data
from quickstart.task import test as test_fn

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and save the model."""
    config = context.run_config
    torch.manual_seed(0)
    arrays = ArrayRecord(Net().state_dict())

    strategy = OneTrip(FedAvg(fraction_evaluate=config["fraction-evaluate"]), FedGA())
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )

    print("accuracy at the clients:", result.evaluate_metrics_clientapp[config["num-server-rounds"]]["eval_acc"])
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate on the server's own points."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test_fn(net, load_test_data(), torch.device("cpu"))
    return MetricRecord({"loss": loss, "accuracy": accuracy})
