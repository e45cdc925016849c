"""CUDA graphs: what is captured into them, and their replays."""
