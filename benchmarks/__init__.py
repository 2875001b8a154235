"""Speed and memory, measured: each module here prints ratios that can be run again with one command."""
