# moved to gradalign.tracking.progress
from gradalign.tracking.progress import SweepBar as SweepBar
from gradalign.tracking.progress import score_words as score_words
from gradalign.tracking.progress import sweep_bar as sweep_bar
