# moved to gradalign.tasks.paper
from gradalign.tasks.paper import CIFAR10_CLASSES as CIFAR10_CLASSES
from gradalign.tasks.paper import cifar10 as cifar10
from gradalign.tasks.paper import cifar100 as cifar100
