"""What the ops, the packed layout and the methods cost; ``pytest benchmarks --benchmark-only``."""
