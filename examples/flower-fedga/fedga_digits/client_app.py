"""The client: answers train.gradient and train for the node's partition."""

from fedga_digits.task import make_task
from gradalign.flower.client import client_app

app = client_app(make_task)
