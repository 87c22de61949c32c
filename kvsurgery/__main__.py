"""Where the command line starts: Ctrl-C ends it without a traceback, also while modules are loaded."""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from kvsurgery.cli import main

        main()
    except KeyboardInterrupt:
        print("kvsurgery: interrupted; run the same command again", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
