"""``python -m mantissa`` is the command ``mantissa``; and it is how the ranks of a run are started."""

from mantissa.base.environ import end_with_launcher

end_with_launcher()  # before imports that take seconds

from mantissa.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
