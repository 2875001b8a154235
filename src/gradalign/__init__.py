"""gradalign."""
