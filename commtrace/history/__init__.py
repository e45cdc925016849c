"""The runs of a directory, what was found in each, and the hosts that were named in them."""
