"""Measure what a cluster can do, in the processes of a launcher; torch is imported when a measurement starts."""
