# moved to gradalign.cli.tables
from gradalign.cli.tables import print_shown as print_shown_sweep

__all__ = ["print_shown_sweep"]
