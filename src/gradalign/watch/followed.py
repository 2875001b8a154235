# moved to gradalign.watch
from gradalign.watch import Followed as Followed
from gradalign.runs.metrics import MetricsTail as MetricsTail
from gradalign.runs.folder import is_held as is_held
