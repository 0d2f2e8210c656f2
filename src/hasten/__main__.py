"""`python -m hasten`."""

from hasten.cli import main

if __name__ == "__main__":
    main()
