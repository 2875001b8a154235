"""Speed, measured against a plain PyTorch loop and against peers."""
