# moved to gradalign.watch
from gradalign.watch import Watched as Watched
