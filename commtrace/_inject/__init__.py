"""What ``commtrace run`` and ``commtrace bench`` put on PYTHONPATH: a ``sitecustomize`` for every Python below them."""
