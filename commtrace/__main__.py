"""``python -m commtrace``: the ``commtrace`` command of this interpreter."""

from commtrace.cli.start import main

if __name__ == "__main__":
    main()
