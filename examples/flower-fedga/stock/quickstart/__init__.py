"""A Flower app as Flower's own quickstart has it."""
