# moved to gradalign.tasks.readers
from gradalign.tasks.readers import LETTERS as LETTERS
from gradalign.tasks.readers import SEQUENCE as SEQUENCE
from gradalign.tasks.readers import read_shakespeare as read_shakespeare
from gradalign.tasks.readers import window_starts as window_starts
