# moved to gradalign.tasks.holdout
from gradalign.tasks.holdout import Spans as Spans
from gradalign.tasks.holdout import spans_of as spans_of
from gradalign.tasks.holdout import split_groups as split_groups
