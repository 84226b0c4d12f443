"""``python -m gradfree``: the command ``gradfree``."""

from gradfree.cli import main

if __name__ == "__main__":
    main()
