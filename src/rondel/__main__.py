"""`python -m rondel` is `rondel`."""

from rondel.cli import main

if __name__ == "__main__":
    main()
