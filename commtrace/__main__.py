"""``python -m commtrace``: the ``commtrace`` command of this interpreter."""

from commtrace.cli.main import main

if __name__ == "__main__":
    main()
