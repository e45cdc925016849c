"""Keep the verdicts on the runs of a directory, and count the hosts that they name."""
