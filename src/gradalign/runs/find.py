# moved to gradalign.runs.read
from gradalign.runs.read import Skipped as Skipped
