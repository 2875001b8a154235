"""The client: trains and evaluates on its own data."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()


def load(msg: Message, context: Context):
    """Return the server's model and the client's data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    node, run = context.node_config, context.run_config
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return net, load_data(node["partition-id"], node["num-partitions"], run["batch-size"]), device


@app.train()
def train(msg: Message, context: Context):
    """Train the server's model on local data."""
    net, (loader, _), device = load(msg, context)
    loss = train_fn(net, loader, context.run_config["local-epochs"], msg.content["config"]["lr"], device)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the server's model on local data."""
    net, (_, loader), device = load(msg, context)
    loss, accuracy = test_fn(net, loader, device)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
