"""`python -m rondel` is `rondel`."""

from rondel.cli import run_program

if __name__ == "__main__":
    run_program()
