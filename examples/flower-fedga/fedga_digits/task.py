"""What is trained. Replace this with your own model and data."""

from flwr.app import Context

from gradalign import Task
from gradalign.tasks.digits import digits


def make_task(context: Context) -> Task:
    """Return the digits, cut into one part for each client.

    A client of a real deployment would load its own data here and return a Task with that one client.
    """
    config = context.run_config
    return digits(seed=int(config["seed"]), clients=int(config["num-clients"]), classes_per_client=4)
