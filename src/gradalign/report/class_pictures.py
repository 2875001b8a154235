# moved to gradalign.report.figures
from gradalign.report.figures import draw_class_counts as draw_class_counts
