# moved to gradalign.theory.check
from gradalign.theory.check import plot_checks as plot_checks
from gradalign.theory.check import require_plottable as require_plottable
