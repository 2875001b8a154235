# moved to gradalign.server.rounds
from gradalign.server.rounds import Sums as Sums
