"""The table of communication and the bandwidth in it."""
