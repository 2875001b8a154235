# moved to gradalign.tasks.storage
from gradalign.tasks.storage import Arrays as Arrays
from gradalign.tasks.storage import cached_arrays as cached_arrays
