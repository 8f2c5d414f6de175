"""`python -m headwise`."""

from headwise.cli.commands import main

if __name__ == "__main__":
    main()
