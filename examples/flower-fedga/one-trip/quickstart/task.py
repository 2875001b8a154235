"""The model, the data, and how to train and test: nothing of Flower."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, TensorDataset

CLASSES, FEATURES = 8, 16


class Net(nn.Module):
    """A small network with batch norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x):
        """Return the classes' scores."""
        return self.last(relu(self.norm(self.first(x))))


def make_points(classes, seed):
    """Return points around the middle of their class."""
    middles = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(len(classes), FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(middles[classes] + noise, classes)


def load_data(partition_id, num_partitions, batch_size):
    """Return one client's loaders, for training and for testing: each client knows three classes."""
    size = 100 + 30 * partition_id
    classes = torch.arange(size) % 3
    points = make_points((classes + partition_id * CLASSES // num_partitions) % CLASSES, seed=1 + partition_id)
    train, test = torch.utils.data.random_split(points, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def load_test_data():
    """Return points of all classes, for the server."""
    return DataLoader(make_points(torch.arange(400) % CLASSES, seed=0), batch_size=128)


def train(net, loader, epochs, lr, device):
    """Train in place and return the mean loss of the steps."""
    net.to(device).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net, loader, device):
    """Return the mean loss and the share of right answers."""
    net.to(device).eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            scores = net(x.to(device))
            loss += cross_entropy(scores, y.to(device), reduction="sum").item()
            right += (scores.argmax(1) == y.to(device)).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)
