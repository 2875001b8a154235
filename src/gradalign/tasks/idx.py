# moved to gradalign.tasks.readers
from gradalign.tasks.readers import _MOST_ARRAY as _MOST_ARRAY
from gradalign.tasks.readers import read_idx as read_idx
