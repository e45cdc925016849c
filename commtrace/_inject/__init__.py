"""A folder for PYTHONPATH: a ``sitecustomize`` for every Python below ``commtrace run`` and ``commtrace bench``."""
