# moved to gradalign.tasks.readers
from gradalign.tasks.readers import read_batch as read_batch
