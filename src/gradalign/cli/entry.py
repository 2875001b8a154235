# moved to gradalign.cli
from gradalign.cli import main as main
