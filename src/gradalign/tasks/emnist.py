# moved to gradalign.tasks.paper
from gradalign.tasks.paper import emnist as emnist
