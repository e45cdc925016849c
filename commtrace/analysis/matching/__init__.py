"""Which operations of different ranks are one communication, what it is for, and what is missing of it."""
