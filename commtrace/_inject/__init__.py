"""What ``commtrace run`` puts on PYTHONPATH: a ``sitecustomize`` that every Python below the command executes."""
