# moved to gradalign.report.figures
from gradalign.report.figures import COLOURS as COLOURS
