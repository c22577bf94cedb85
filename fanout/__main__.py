"""`python -m fanout`: the command line."""

from fanout.cli import main

if __name__ == "__main__":
    main()
