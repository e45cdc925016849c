"""The analysis over windows of steps: a survey of the whole run, windows that are read and analysed one by one, and
results that add up. Memory is bounded by the window, not by the run."""
