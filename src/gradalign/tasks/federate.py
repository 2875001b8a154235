# moved to gradalign.tasks.paper
from gradalign.tasks.paper import federate as federate
