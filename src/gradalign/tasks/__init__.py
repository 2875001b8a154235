"""What is trained: a Task is a model factory, client data and test data."""
