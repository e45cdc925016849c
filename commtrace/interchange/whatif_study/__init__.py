"""The what-if analysis of traces that were published with its study, by the rules of its authors."""
