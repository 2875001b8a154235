# moved to gradalign.watch
from gradalign.watch import Followed as Followed
from gradalign.watch._tail import MetricsTail as MetricsTail
from gradalign.watch._tail import is_held as is_held
