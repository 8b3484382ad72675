"""``python -m mantissa`` is the command ``mantissa``."""

from mantissa.cli import main

if __name__ == "__main__":
    main()
