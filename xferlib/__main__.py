"""`python -m xferlib`: the same as the command `xferlib`."""

from xferlib.cli import main

if __name__ == "__main__":
    main()
