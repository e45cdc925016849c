"""One module per command, imported only when it is called."""
